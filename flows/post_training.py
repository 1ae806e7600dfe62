"""The post-training flow: places the roles of a run, watches them, and tells them when it is over.

    start --commit 0--> rollout --raw--> reward --scored--> curate --curated--> train --commit v+1--> rollout
                                                                                  |--> evaluate, audit, export

The flow waits for the roles' futures. The roles wait for records, never for the flow. A role whose process dies or
that fails is placed again (`flows.placement`); one that is dead for good ends the run through log/control with its own
error. A flow that is terminated asks the roles to stop, and gives them a while to do so.
"""

import logging
import sys
import time
from collections.abc import Sequence

from dask import config as dask_config
from distributed.utils import get_mp_context
from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed
from prefect_dask.task_runners import DaskTaskRunner

from data_contracts.config import RunConfig
from data_contracts.errors import RoleFailed
from flows.placement import Placement, role_names
from flows.progress import Progress
from infra.cluster import OFFERED
from infra.runs import Run, load_run
from tasks.supervise import Supervisor

PRELOADED = [
    "prefect",
    "distributed",
    "distributed.nanny",
    "flows.roles",
    "tasks.rollout",
    "tasks.train",
    "tasks.reward",
]
"""What every worker of a run needs; mlflow is left to the one role that uses it."""

POLL_S = 0.5
CLOUD_POLL_S = 5.0
STOP_LIMIT_S = 20.0
"""How long a terminated flow waits for its roles to stop: Prefect kills it after 30 s."""


QUIET_DASK = {
    # A worker plays one role until the end: what Dask samples of it a hundred times a second tells nothing, and the
    # ticks and monitors of eight workers take a tenth of two cores.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.tick.limit": "30s",
    "distributed.admin.system-monitor.interval": "5s",
}


def make_task_runner(config: RunConfig) -> DaskTaskRunner:
    """Return the placement of a run: an existing Dask cluster, or one local process for each role."""
    logging.getLogger("distributed").setLevel(logging.WARNING)  # prefect-dask has it tell every connection
    if config.orchestration.scheduler:
        return DaskTaskRunner(address=config.orchestration.scheduler)
    dask_config.set(QUIET_DASK)
    preload_roles()
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return DaskTaskRunner(
        cluster_kwargs={
            "n_workers": len(role_names(config)),
            "threads_per_worker": 1,
            "host": "127.0.0.1",
            "dashboard_address": "127.0.0.1:0",
            "resources": dict.fromkeys(OFFERED, 1),
            "memory_limit": 0,  # Dask would pause or kill a role by its memory; the operating system decides
            "env": threads,
            "silence_logs": 40,
        }
    )


def preload_roles() -> None:
    """Have Dask fork its workers from one process that has done the imports, instead of importing in each.

    Seven processes that each import torch and Prefect take half a minute of two cores before anything begins.
    """
    dask_config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    get_mp_context().set_forkserver_preload(PRELOADED)  # pyright: ignore[reportAttributeAccessIssue]


def _name_of_flow_run() -> str:
    return str(flow_run.parameters["run_url"]).rstrip("/").rpartition("/")[2]


@flow(name="post-training", flow_run_name=_name_of_flow_run, retries=0)
def post_training(run_url: str) -> State:
    """Carry a run from where its records stand to its last step.

    Args:
        run_url: the run's prefix in the store; the run exists already.
    """
    return carry(load_run(run_url))


def carry(run: Run) -> State:
    """Carry a run from where its records stand to its last step, within a flow run; return how that ends.

    Raises:
        RoleFailed: a role is dead for good; the message is its own error.
    """
    supervisor = Supervisor(run.store)
    progress = Progress(run)
    logger = get_run_logger()
    with make_task_runner(run.config) as runner:
        placement = Placement(run, runner, supervisor, logger)
        try:
            watch(placement, supervisor, progress)
        except TerminationSignal:  # the run is stopped and can go on, which is no crash
            logger.info("terminated: stopping every role")
        finally:
            supervisor.stop_if_open("the flow ended")
            placement.wait(STOP_LIMIT_S)
    progress.finish()
    error = supervisor.failure()
    if error:
        raise RoleFailed(error)
    if supervisor.was_stopped():
        logger.info("stopped; resume with: rollflow resume %s", run.id)
        return Cancelled(message=f"stopped at version {progress.version}; resume with: rollflow resume {run.id}")
    return Completed(message=f"{run.config.steps} versions")


def watch(placement: Placement, supervisor: Supervisor, progress: Progress) -> None:
    """Wait until every role is over; pass on deaths, failures and a cancellation asked for in the UI."""
    asked_at = time.monotonic()
    while not placement.is_over:
        progress.update()
        placement.turn(progress.version)
        supervisor.bury_the_dead()
        if time.monotonic() - asked_at > CLOUD_POLL_S:
            asked_at = time.monotonic()
            if is_cancelling():
                supervisor.stop_if_open("cancelled in the UI")
        time.sleep(POLL_S)


def is_cancelling() -> bool:
    """Return whether somebody asked Prefect to cancel this flow run. An unreachable server means no."""
    if not flow_run.id:
        return False
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run.id).state
    except Exception:  # noqa: BLE001 the server may be away; the run does not need it
        return False
    return state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED)


def main(arguments: Sequence[str]) -> int:
    """Run the flow on one run: `python -m flows.post_training RUN_URL`."""
    (run_url,) = arguments
    state = post_training(run_url, return_state=True)
    return 1 if state.is_failed() or state.is_crashed() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
