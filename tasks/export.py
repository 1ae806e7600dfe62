"""The export role: tails the records into MLflow at its own pace.

Nothing waits for it while the run goes on. A tracking server that is slow, down or restored from yesterday costs
the run nothing; the exporter catches up by itself, and every point is there once.
"""

import os
import time

from data_contracts.records import Control, Evaluation
from infra.heartbeats import read_heartbeats
from infra.log import Log
from infra.runs import load_run
from infra.tracking import Exporter, export_loop
from tasks.role import Role


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
    closed = False
    over_since: float | None = None

    def is_over() -> bool:
        nonlocal closed, over_since
        closed = closed or _is_closed(control)
        if not closed:
            role.check()
            return False
        if not role.is_over or run.replay_of:  # a replay has evaluated what it wanted to before it ended
            return True
        over_since = over_since or time.monotonic()
        if _audits_still(role) and time.monotonic() - over_since < role.config.tracking.drain_s:
            return False  # its last windows are judged when the run is over
        last = evaluations.last()
        return last is not None and last.version >= role.config.steps

    export_loop(
        exporter,
        is_over,
        wait=lambda seconds: role.pause(seconds),
        report=role.progressed,
        poll_s=role.config.tracking.poll_s,
        drain_s=role.config.tracking.drain_s,
    )


def _audits_still(role: Role) -> bool:
    """Return whether an audit process is at work, as far as its heartbeat tells."""
    beats = read_heartbeats(role.store, "audit")
    return any(not beat.done and beat.writer not in role.dead_writers for beat in beats)


def _is_closed(control: Log[Control]) -> bool:
    """Return whether the run has ended, stopped or failed since its last start."""
    kinds = [record.kind for record in control.read_from(0)]
    since = len(kinds) - kinds[::-1].index("start") if "start" in kinds else 0
    return any(kind in ("stop", "end", "fail") for kind in kinds[since:])
