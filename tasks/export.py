"""The export role: tails the records into MLflow at its own pace.

Nothing waits for it while the run goes on. A tracking server that is slow, down or restored from yesterday costs
the run nothing; the exporter catches up by itself, and every point is there once.
"""

import os
import time

from data_contracts.records import Control, Evaluation
from infra.export_loop import export_loop
from infra.heartbeats import read_heartbeats
from infra.history import run_state
from infra.log import Log
from infra.runs import load_run
from infra.tracking import Exporter
from tasks.role import Role
from tasks.supervise import is_alive, is_local


def run(role: Role) -> None:
    """Export until the run has ended, its last version is evaluated, and everything is in MLflow."""
    run = load_run(role.store.url)
    tags = {"rollflow.replay_of": run.replay_of} if run.replay_of else {}
    exporter = Exporter(
        role.store,
        role.config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or os.environ.get("ROLLFLOW_TRACKING_URI"),
        role.config,
        run.id,
        packages=run.packages,
        flow_run_id=os.environ.get("ROLLFLOW_FLOW_RUN_ID", ""),
        flow_run_url=os.environ.get("ROLLFLOW_FLOW_RUN_URL", ""),
        tags=tags,
    )
    evaluations = Log(role.store, "log/eval", Evaluation)
    control = Log(role.store, "log/control", Control)
    over_since: float | None = None

    def is_over() -> bool:
        nonlocal over_since
        if over_since is None and not run_state(control.read_from(0)).is_over:
            role.check()
            return False
        over_since = over_since or time.monotonic()
        # The audit judges its last windows when the run is over or stopped, and the last version is evaluated then.
        if _is_at_work(role, "audit") and time.monotonic() - over_since < role.config.tracking.drain_s:
            return False
        # A stopped run goes on later, and a replay has evaluated what it wanted to before it ended.
        if run.replay_of or run_state(control.read_from(0)).kind != "ended":
            return True
        last = evaluations.last()
        is_evaluated = last is not None and last.version >= role.config.steps
        return is_evaluated or not _is_at_work(role, "evaluate")

    export_loop(
        exporter,
        is_over,
        wait=lambda seconds: role.pause(seconds),
        report=role.progressed,
        poll_s=role.config.tracking.poll_s,
        drain_s=role.config.tracking.drain_s,
    )


def _is_at_work(role: Role, name: str) -> bool:
    """Return whether a process of that role goes on, as far as its heartbeat tells."""
    beats = [beat for beat in read_heartbeats(role.store, name) if not beat.done]
    return any(beat.writer not in role.dead_writers and (not is_local(beat) or is_alive(beat)) for beat in beats)
