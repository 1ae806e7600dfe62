"""The post-training flow: places the roles of a run, watches them, and tells them when it is over.

    start --commit 0--> rollout --raw--> reward --scored--> curate --curated--> train --commit v+1--> rollout
                                                                                  |--> evaluate, audit, export

The flow waits for the roles' futures. The roles wait for records, never for the flow. A role whose process dies
is started again by Dask on the replaced worker; a role that raises is retried by Prefect; a role that is dead for
good ends the run through log/control with its own error.
"""

import sys
import time
from collections.abc import Sequence

from dask import config as dask_config
from dask.base import annotate
from dask.distributed import KilledWorker
from distributed.utils import get_mp_context
from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed
from prefect_dask.task_runners import DaskTaskRunner, PrefectDaskFuture

from data_contracts.config import RunConfig
from data_contracts.errors import RoleFailed
from data_contracts.records import Commit
from flows.roles import play_role
from infra.log import Log
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


def role_names(config: RunConfig) -> list[str]:
    """Return the role of each process of a run, one entry per process."""
    names = ["start", "train", *["rollout"] * config.rollout.workers, "reward", "curate", "evaluate"]
    names += ["audit"] if config.audit.enabled else []
    return [*names, "export"] if config.tracking.enabled else names


def make_task_runner(config: RunConfig) -> DaskTaskRunner:
    """Return the placement of a run: an existing Dask cluster, or one local process for each role."""
    if config.orchestration.scheduler:
        return DaskTaskRunner(address=config.orchestration.scheduler)
    preload_roles()
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return DaskTaskRunner(
        cluster_kwargs={
            "n_workers": len(role_names(config)),
            "threads_per_worker": 1,
            "host": "127.0.0.1",
            "dashboard_address": None,
            "resources": {"ROLE": 1},
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


@flow(name="post-training", flow_run_name="{run_url}", retries=0)
def post_training(run_url: str) -> State:
    """Carry a run from where its records stand to its last step.

    Args:
        run_url: the run's prefix in the store; the run exists already.
    """
    run = load_run(run_url)
    logger = get_run_logger()
    futures = place_roles(run)
    supervisor = Supervisor(run.store)
    progress = Progress(run)
    try:
        watch(run, futures, supervisor, progress)
    finally:
        supervisor.stop_if_open("the flow ended")
    error = supervisor.failure()
    progress.finish()
    if error:
        raise RoleFailed(error)
    if supervisor.was_stopped():
        logger.info("stopped; resume with: rollflow resume %s", run.id)
        return Cancelled(message=f"stopped at version {progress.version}; resume with: rollflow resume {run.id}")
    return Completed(message=f"{run.config.steps} versions")


def place_roles(run: Run) -> dict[str, PrefectDaskFuture]:
    """Submit every role; each takes a worker of its own."""
    retries = run.config.orchestration.role_retries
    names = role_names(run.config)
    futures = {}
    with dask_config.set({"distributed.scheduler.allowed-failures": retries}), annotate(resources={"ROLE": 1}):
        for i, name in enumerate(names):
            label = name if names.count(name) == 1 else f"{name}-{i}"
            futures[label] = play_role.with_options(retries=retries).submit(name, run.store.url)
    return futures


def watch(run: Run, futures: dict[str, PrefectDaskFuture], supervisor: Supervisor, progress: "Progress") -> None:
    """Wait until every role is over; pass on deaths, failures and a cancellation asked for in the UI."""
    open_futures = dict(futures)
    asked_at = time.monotonic()
    while open_futures:
        time.sleep(POLL_S)
        supervisor.bury_the_dead()
        progress.update()
        if time.monotonic() - asked_at > CLOUD_POLL_S:
            asked_at = time.monotonic()
            if is_cancelling():
                supervisor.stop_if_open("cancelled in the UI")
        for name, future in list(open_futures.items()):
            if not future.wrapped_future.done():
                continue
            del open_futures[name]
            supervisor.settle_role(name, find_error(future))


def find_error(future: PrefectDaskFuture) -> BaseException | None:
    """Return what a finished role raised, or what killed its worker once too often."""
    try:
        outcome = future.result(raise_on_failure=False)
    except KilledWorker as cause:
        return RoleFailed(f"its process died more often than role_retries allows: {cause}")
    except Exception as cause:  # noqa: BLE001 a future may carry any error; it is told, not swallowed
        return cause
    return outcome if isinstance(outcome, BaseException) else None


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


class Progress:
    """Shows the run in Prefect as a progress bar; a server that is away costs nothing."""

    def __init__(self, run: Run) -> None:
        self._steps = run.config.steps
        self._log = Log(run.store, "log/commit", Commit)
        self._next = 0
        self._artifact = None
        self._shown_at = float("-inf")
        self.version = -1

    def update(self, *, every_s: float = 5.0) -> None:
        """Show the newest version, at most once in `every_s` seconds."""
        if time.monotonic() - self._shown_at < every_s:
            return
        self._shown_at = time.monotonic()
        self.version = self._log.tail() - 1
        percent = 100.0 * max(self.version, 0) / self._steps
        try:
            if self._artifact is None:
                self._artifact = create_progress_artifact(percent, key="progress", description="optimizer steps")
            else:
                update_progress_artifact(self._artifact, percent)  # pyright: ignore[reportArgumentType]
        except Exception:  # noqa: BLE001 a view of the run, not the run
            return

    def finish(self) -> None:
        """Show the last version and a short summary."""
        self.update(every_s=0.0)
        commit = self._log.read(self.version) if self.version >= 0 else None
        if commit is None:
            return
        lines = [f"| {name} | {value:.4g} |" for name, value in sorted(commit.metrics.items())]
        try:
            create_markdown_artifact("\n".join(["| metric | last |", "|---|---|", *lines]), key="summary")
        except Exception:  # noqa: BLE001 a view of the run, not the run
            return


def main(arguments: Sequence[str]) -> int:
    """Run the flow on one run: `python -m flows.post_training RUN_URL`."""
    (run_url,) = arguments
    config = load_run(run_url).config
    runner = make_task_runner(config)
    state = post_training.with_options(task_runner=runner)(run_url, return_state=True)  # pyright: ignore[reportArgumentType]
    return 1 if state.is_failed() or state.is_crashed() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
