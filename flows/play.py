"""Plays one role in this process, without Prefect: what every way of starting a role comes down to."""

import gc
import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from data_contracts.errors import ConfigError, ProtocolError, RoleFailed, RunStopped, TrainingDiverged
from infra.runs import load_run
from infra.settings import keep_freed_memory
from tasks.role import Role, append_control
from tasks.supervise import EXPENDABLE

ROLES = ("start", "rollout", "reward", "curate", "train", "evaluate", "audit", "export")

BACKGROUND = ("evaluate", "export", "audit")
"""Roles that nothing waits for while the run goes on: they leave the processor to rollout and training."""

BACKGROUND_NICENESS = 10

FINAL = (RoleFailed, ProtocolError, TrainingDiverged, ConfigError)
"""Errors that starting the role again cannot mend."""


LEFT = "left"
"""How a role ended whose process had to go while the run went on."""


def play(
    name: str,
    run_url: str,
    writer: str = "",
    watched: Callable[[Role], AbstractContextManager[object]] = lambda role: nullcontext(),
) -> str:
    """Play one role until the run ends or is stopped; return how it ended.

    Args:
        name: one of ROLES.
        run_url: the run's prefix in the store.
        writer: id in the records, which nobody has used before; made up when empty.
        watched: makes what is to surround the role's loop, for example what tells it to leave.

    Raises:
        RollflowError: the role failed; whether for good is for the caller to say (see `announce_failure`).
    """
    keep_freed_memory()
    run = load_run(run_url)
    # A worker of a cluster outlives the role, and what is nice cannot become less so.
    if name in BACKGROUND and run.config.orchestration.scheduler is None:
        os.nice(BACKGROUND_NICENESS)
    with Role(name, run.store, run.config, writer) as role, watched(role):
        # Imported inside, so that the heartbeat beats while torch loads: on a busy machine that takes long.
        loop = importlib.import_module(f"tasks.{name}")
        # What the imports made lives as long as the process: a full collection need not walk through it every time.
        gc.freeze()
        try:
            loop.run(role)
        except RunStopped as stop:
            return LEFT if role.is_leaving else f"stopped: {stop}"
    return "done"


def announce_failure(name: str, run_url: str, error: BaseException) -> None:
    """Tell every other role that this one is dead for good, with its own error.

    The exporter is no reason to end a run: its view can be made again from the records.
    """
    if name not in EXPENDABLE and not isinstance(error, RoleFailed):  # that one is another role's news, already told
        store = load_run(run_url).store
        append_control(store, "supervisor", "fail", role=name, error=f"{type(error).__name__}: {error}")


def check_role(name: str) -> None:
    """Raise ConfigError unless there is a role of this name."""
    if name not in ROLES:
        raise ConfigError(f"role {name}: expected one of {', '.join(ROLES)}")
