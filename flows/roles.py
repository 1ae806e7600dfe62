"""The roles as Prefect tasks, and each as a flow of its own.

A task wraps a role's whole loop. Prefect starts it, shows it, retries it and cancels it; it carries no sample
and no per-step traffic, and the run does not depend on its states: the records are the truth.
"""

import os
from typing import Any

from prefect import Task, flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext

from flows.play import FINAL, announce_failure, check_role, play


async def _may_retry(_: Task[..., Any], __: TaskRun, state: State) -> bool:
    error = await state.aresult(raise_on_failure=False)
    return not isinstance(error, FINAL)


@task(task_run_name="{name}", retry_delay_seconds=1, cache_policy=NO_CACHE, retry_condition_fn=_may_retry)
def play_role(name: str, run_url: str) -> str:
    """Play one role of a run.

    Args:
        name: one of flows.play.ROLES.
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
    check_role(name)
    return play_role(name, run_url)
