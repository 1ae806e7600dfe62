"""Places the roles of a run on the workers of a Dask cluster, one role on a worker, and replaces what is lost.

Dask itself would queue a role behind another that never ends, and would start a role again as if nothing had
happened. So the flow looks at the cluster once a second, chooses a free worker for each part that has none, and pins
it there. A part whose worker is gone, or that failed, gets another start under another writer's id; a worker that
joins later gets a rollout role while there are fewer than rollout.max_workers.
"""

import logging
import os
import time
from collections import Counter
from concurrent.futures import CancelledError
from dataclasses import dataclass

from dask.base import annotate
from distributed import KilledWorker
from prefect.client.orchestration import get_client
from prefect.states import Crashed
from prefect_dask.task_runners import DaskTaskRunner, PrefectDaskFuture

from data_contracts.config import RunConfig
from data_contracts.errors import RoleFailed
from flows.play import FINAL, LEFT
from flows.roles import play_role
from infra.cluster import Offer, assign, read_offers, resource_of
from infra.runs import Run
from tasks.role import new_writer
from tasks.supervise import Supervisor

LOOK_EVERY_S = 1.0

Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]


def role_names(config: RunConfig) -> list[str]:
    """Return the role of each process that a run needs, one entry per process; the ones hardest to place first."""
    names = ["train", *["rollout"] * config.rollout.workers, "start", "reward", "curate", "evaluate"]
    names += ["audit"] if config.audit.enabled else []
    return [*names, "export"] if config.tracking.enabled else names


def devices_of(config: RunConfig, role: str, number: int) -> str:
    """Return the CUDA devices of a role's process of that number, as for CUDA_VISIBLE_DEVICES; empty for all."""
    if config.orchestration.scheduler or role not in config.orchestration.devices:
        return ""
    return config.orchestration.devices[role][number]


@dataclass
class Start:
    """One start of a part: a process that plays it, or did."""

    writer: str
    worker: str
    future: PrefectDaskFuture


@dataclass
class Part:
    """A role that somebody must play until it is over.

    Attributes:
        name: the role.
        label: what people call it, for example rollout-2.
        devices: CUDA devices it may use; empty for all.
        is_extra: whether the run does without it: it is given up when its worker goes.
        failures: starts that ended with an error.
        deaths: starts whose process died, since version `died_at` was the newest.
    """

    name: str
    label: str
    devices: str = ""
    is_extra: bool = False
    start: Start | None = None
    num_starts: int = 0
    failures: int = 0
    deaths: int = 0
    died_at: int = -1
    is_over: bool = False


class Placement:
    """The parts of one run and where they are played. `turn` does whatever there is to do."""

    def __init__(self, run: Run, runner: DaskTaskRunner, supervisor: Supervisor, logger: Logger) -> None:
        self._run = run
        self._runner = runner
        self._supervisor = supervisor
        self._logger = logger
        self._parts: list[Part] = []
        self._troubles: Counter[str] = Counter()
        self._looked_at = float("-inf")
        self._waits_for = ""
        names = role_names(run.config)
        for i, name in enumerate(names):
            number = names[:i].count(name)
            label = name if names.count(name) == 1 else f"{name}-{number}"
            self._parts.append(Part(name, label, devices_of(run.config, name, number)))

    @property
    def is_over(self) -> bool:
        """Whether every part is over."""
        return all(part.is_over for part in self._parts)

    def turn(self, version: int) -> None:
        """Settle what has ended, and find a worker for what has none.

        Args:
            version: the newest one.

        Raises:
            ServiceError: the scheduler does not answer.
        """
        for part in self._parts:
            if part.start and part.start.future.wrapped_future.done():
                self._settle(part, part.start, version)
        if time.monotonic() - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = time.monotonic()
        offers = read_offers(self._runner.client)
        alive = {offer.worker for offer in offers}
        for part in self._parts:
            if part.start and part.start.worker not in alive:
                self._lose(part, part.start, version, "its Dask worker is gone")
        self._parts = [part for part in self._parts if not (part.is_extra and part.is_over)]
        self._place(offers)

    def wait(self, limit_s: float) -> None:
        """Wait until no part is played any more, for `limit_s` at most."""
        give_up = time.monotonic() + limit_s
        while time.monotonic() < give_up and any(
            part.start and not part.start.future.wrapped_future.done() for part in self._parts
        ):
            time.sleep(0.1)

    def _place(self, offers: list[Offer]) -> None:
        taken = {part.start.worker for part in self._parts if part.start}
        free = [offer for offer in offers if offer.is_free and offer.worker not in taken]
        free.sort(key=lambda offer: (self._troubles[offer.worker], len(offer.resources)))
        closing = self._supervisor.closing()
        if closing in ("stop", "fail"):
            for part in self._parts:
                part.is_over = part.is_over or part.start is None
        waiting = [part for part in self._parts if part.start is None and not part.is_over]
        extras = [] if closing else self._make_extras(free)
        placed = assign([part.name for part in (*waiting, *extras)], free)
        for i, part in enumerate((*waiting, *extras)):
            if i in placed:
                self._begin(part, placed[i])
                if part.is_extra:
                    self._parts.append(part)
        self._tell_missing([part for i, part in enumerate(waiting) if i not in placed])

    def _make_extras(self, free: list[Offer]) -> list[Part]:
        """Return rollout roles for workers that joined; one that failed on a worker is not tried there again."""
        num_rollouts = sum(part.name == "rollout" and not part.is_over for part in self._parts)
        limit = (self._run.config.rollout.max_workers or 0) - num_rollouts
        willing = [o for o in free if resource_of("rollout") in o.resources and not self._troubles[o.worker]]
        return [Part("rollout", f"rollout-{new_writer()[:4]}", is_extra=True) for _ in willing[: max(limit, 0)]]

    def _begin(self, part: Part, worker: str) -> None:
        writer = new_writer()
        part.num_starts += 1
        label = part.label if part.num_starts == 1 else f"{part.label} (start {part.num_starts})"
        parameters = {
            "name": part.name,
            "run_url": self._run.store.url,
            "writer": writer,
            "label": label,
            "devices": part.devices,
            "tracking_uri": os.environ.get("MLFLOW_TRACKING_URI", ""),
        }
        with annotate(workers=[worker], allow_other_workers=False, resources={resource_of(part.name): 1}):
            part.start = Start(writer, worker, self._runner.submit(play_role, parameters))
        self._logger.info("%s on %s as %s", label, worker, writer)

    def _settle(self, part: Part, start: Start, version: int) -> None:
        """Take note of how a start has ended."""
        if start.future.wrapped_future.status in ("cancelled", "lost"):
            self._lose(part, start, version, "Dask lost it")
            return
        try:
            outcome = start.future.result(raise_on_failure=False)
        except (KilledWorker, CancelledError) as cause:
            self._lose(part, start, version, str(cause))
            return
        except Exception as cause:  # noqa: BLE001 a future may carry any error; it is told, not swallowed
            outcome = cause
        if outcome == LEFT:
            self._lose(part, start, version, "its Dask worker closes")
        elif isinstance(outcome, BaseException):
            self._fail(part, start, outcome)
        else:
            part.start, part.is_over = None, True

    def _fail(self, part: Part, start: Start, error: BaseException) -> None:
        part.start = None
        part.failures += 1
        self._troubles[start.worker] += 1
        self._supervisor.bury(start.writer)
        if isinstance(error, FINAL) or (
            not part.is_extra and part.failures > self._run.config.orchestration.role_retries
        ):
            part.is_over = True
            self._supervisor.settle_role(part.name, error)
        else:
            self._logger.warning("%s failed on %s: %s: %s", part.label, start.worker, type(error).__name__, error)
            part.is_over = part.is_extra

    def _lose(self, part: Part, start: Start, version: int, why: str) -> None:
        """Take note that the process of a start is gone; deaths count as long as the run makes no step in between."""
        self._logger.warning("%s on %s is gone: %s", part.label, start.worker, why)
        part.start = None
        self._supervisor.bury(start.writer)
        start.future.wrapped_future.cancel(reason=why)
        _show_crashed(start.future, why)
        part.deaths = part.deaths + 1 if part.died_at == version else 1
        part.died_at = version
        part.is_over = part.is_extra
        if not part.is_extra and part.deaths > self._run.config.orchestration.role_retries:
            part.is_over = True
            error = f"its process died {part.deaths} times at version {version}, more than role_retries allows"
            self._supervisor.settle_role(part.name, RoleFailed(error))

    def _tell_missing(self, parts: list[Part]) -> None:
        missing = ", ".join(f"{part.label} ({resource_of(part.name)})" for part in parts)
        if missing and missing != self._waits_for:
            self._logger.warning("no free Dask worker for %s: waiting for one to join", missing)
        self._waits_for = missing


def _show_crashed(future: PrefectDaskFuture, why: str) -> None:
    """Have Prefect show the task run as crashed: a killed process cannot report its own end."""
    try:
        with get_client(sync_client=True) as client:
            client.set_task_run_state(future.task_run_id, Crashed(message=why), force=True)
    except Exception:  # noqa: BLE001 a view of the run, not the run
        return
