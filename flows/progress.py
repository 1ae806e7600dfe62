"""A run as Prefect shows it: a progress bar while it goes on, a table at its end."""

import time

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact

from data_contracts.records import Commit
from infra.log import Log
from infra.runs import Run

LOG_EVERY_PERCENT = 10
TOLD = ("reward/mean", "staleness/mean", "optimizer/grad_norm", "policy/entropy")
"""Metrics of a commit that the flow run's log tells."""


class Progress:
    """Shows the run in Prefect as a progress bar; a server that is away costs nothing."""

    def __init__(self, run: Run) -> None:
        self._steps = run.config.steps
        self._log = Log(run.store, "log/commit", Commit)
        self._next = 0
        self._artifact = None
        self._shown_at = float("-inf")
        self._logged = -1
        self.version = -1

    def update(self, *, every_s: float = 5.0) -> None:
        """Show the newest version, at most once in `every_s` seconds."""
        if time.monotonic() - self._shown_at < every_s:
            return
        self._shown_at = time.monotonic()
        self.version = self._log.tail() - 1
        percent = 100.0 * max(self.version, 0) / self._steps
        self._tell(int(percent // LOG_EVERY_PERCENT))
        try:
            if self._artifact is None:
                self._artifact = create_progress_artifact(percent, key="progress", description="optimizer steps")
            else:
                update_progress_artifact(self._artifact, percent)  # pyright: ignore[reportArgumentType]
        except Exception:  # noqa: BLE001 a view of the run, not the run
            return

    def _tell(self, tenths: int) -> None:
        """Log the newest version, if it has got a stretch further since the last time."""
        if self.version < 0 or tenths == self._logged:
            return
        self._logged = tenths
        commit = self._log.read(self.version)
        metrics = commit.metrics if commit else {}
        told = [f"{name} {metrics[name]:.3g}" for name in TOLD if name in metrics]
        get_run_logger().info("step %d of %d: %s", self.version, self._steps, ", ".join(told) or "no metrics yet")

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
