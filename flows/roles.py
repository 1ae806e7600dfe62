"""The roles as Prefect tasks, and each as a flow of its own.

A task wraps a role's whole loop. Prefect starts it, shows it, retries it and cancels it; it carries no sample
and no per-step traffic, and the run does not depend on its states: the records are the truth.
"""

import importlib
import os
from typing import Any

from prefect import Task, flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext

from data_contracts.errors import ConfigError, ProtocolError, RoleFailed, RunStopped, TrainingDiverged
from infra.runs import load_run
from tasks.role import Role, append_control

ROLES = ("start", "rollout", "reward", "curate", "train", "evaluate", "export")

FINAL = (RoleFailed, ProtocolError, TrainingDiverged, ConfigError)
"""Errors that starting the role again cannot mend."""


def play(name: str, run_url: str) -> str:
    """Play one role in this process until the run ends or is stopped; return how it ended.

    Raises:
        RollflowError: the role failed; whether for good is for the caller to say (see `announce_failure`).
    """
    run = load_run(run_url)
    loop = importlib.import_module(f"tasks.{name}")
    with Role(name, run.store, run.config) as role:
        try:
            loop.run(role)
        except RunStopped as stop:
            return f"stopped: {stop}"
    return "done"


def announce_failure(name: str, run_url: str, error: BaseException) -> None:
    """Tell every other role that this one is dead for good, with its own error."""
    if not isinstance(error, RoleFailed):  # that one is another role's news, already told
        store = load_run(run_url).store
        append_control(store, "supervisor", "fail", role=name, error=f"{type(error).__name__}: {error}")


async def _may_retry(_: Task[..., Any], __: TaskRun, state: State) -> bool:
    error = await state.aresult(raise_on_failure=False)
    return not isinstance(error, FINAL)


@task(task_run_name="{name}", retry_delay_seconds=1, cache_policy=NO_CACHE, retry_condition_fn=_may_retry)
def play_role(name: str, run_url: str) -> str:
    """Play one role of a run.

    Args:
        name: one of ROLES.
        run_url: the run's prefix in the store.
    """
    logger = get_run_logger()
    logger.info("role %s of %s in process %d", name, run_url, os.getpid())
    try:
        how = play(name, run_url)
    except Exception as error:
        if isinstance(error, FINAL) or _is_last_attempt():
            announce_failure(name, run_url, error)
        raise
    logger.info("role %s %s", name, how)
    return how


def _is_last_attempt() -> bool:
    context = TaskRunContext.get()
    return context is None or context.task_run.run_count > context.task.retries


@flow(name="role", flow_run_name="{name}-alone")
def role_alone(name: str, run_url: str) -> str:
    """Play one role of a run that goes on elsewhere."""
    if name not in ROLES:
        raise ConfigError(f"role {name}: expected one of {', '.join(ROLES)}")
    return play_role(name, run_url)
