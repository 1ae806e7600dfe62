"""The roles as Prefect tasks, and each as a flow of its own.

A task wraps one start of a role's whole loop. Prefect starts it, shows it and cancels it; it carries no sample and no
per-step traffic, and the run does not depend on its states: the records are the truth. Who starts a role again, and
where, is for `flows.placement` to say.
"""

import contextlib
import os
import threading
from collections.abc import Iterator

from distributed import get_worker
from distributed.core import Status
from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from data_contracts.errors import ServiceError
from flows.play import FINAL, announce_failure, check_role, play
from infra.heartbeats import heartbeat_key
from infra.runs import load_run
from tasks.role import Role, new_writer

LEAVING = (Status.closing, Status.closing_gracefully, Status.closed)
LEAVING_POLL_S = 0.2


@task(task_run_name="{label}", cache_policy=NO_CACHE)
def play_role(name: str, run_url: str, writer: str, label: str, devices: str, tracking_uri: str) -> str:
    """Play one role of a run, once.

    Args:
        name: one of flows.play.ROLES.
        run_url: the run's prefix in the store.
        writer: id of this start in the records.
        label: what Prefect calls it.
        devices: CUDA devices it may use; empty for all that this process may.
        tracking_uri: MLflow's address for a worker that has none; may be empty.

    Raises:
        ServiceError: this very start was made before. Dask repeats a task whose worker died, whoever waits for it.
    """
    logger = get_run_logger()
    logger.info("role %s of %s in process %d", name, run_url, os.getpid())
    if load_run(run_url).store.exists(heartbeat_key(name, writer)):
        raise ServiceError(f"role {name}: writer {writer} was started before; another start needs another id")
    os.environ.update(
        ROLLFLOW_TRACKING_URI=tracking_uri,
        ROLLFLOW_FLOW_RUN_ID=str(flow_run.id or ""),
        ROLLFLOW_FLOW_RUN_URL=str(flow_run.ui_url or ""),
    )
    if devices:  # CUDA reads it when it is first used in this process
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    try:
        how = play(name, run_url, writer, _told_to_leave)
    except FINAL as error:
        announce_failure(name, run_url, error)
        raise
    logger.info("role %s %s", name, how)
    return how


@contextlib.contextmanager
def _told_to_leave(role: Role) -> Iterator[None]:
    """Have the role leave in order when its Dask worker is about to close."""
    try:
        worker = get_worker()
    except ValueError:  # not on a Dask worker
        yield
        return
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(LEAVING_POLL_S):
            if worker.status in LEAVING:
                role.leave("the Dask worker is closing")
                return

    threading.Thread(target=watch, name="leaving", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


@flow(name="role", flow_run_name="{name}-alone")
def role_alone(name: str, run_url: str) -> str:
    """Play one role of a run that goes on elsewhere."""
    check_role(name)
    return play_role(name, run_url, new_writer(), name, "", "")
