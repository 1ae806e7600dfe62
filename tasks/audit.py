"""The audit role: holds windows of the run's data against suites of expectations, and says what it found.

    log/raw/*  ──┐
    log/scored/* ├─ features ─► window of a stage ─► checks with bounds from earlier windows ─► log/audit
    log/commit ──┘

Nothing waits for it, and a run goes on without it. What refuses rows are the structural gate and curation, which see
every row before it is accepted; the audit looks at what became of them, in windows, and warns, or stops the run when
a violated rule says so. Its record of a window says how far it has read: after a restart it goes on from there.
"""

import contextvars
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from data_contracts import features
from data_contracts.errors import RunStopped
from data_contracts.records import Audit, RuleResult
from data_contracts.suites import (
    STAGES,
    AuditStage,
    Check,
    Suite,
    check_severities,
    constants_of,
    load_suite,
    make_checks,
    statistics_of,
)
from infra import data_docs
from infra.log import Log
from tasks.audit_rows import RoundTrip, read_new
from tasks.model_files import read_model_files
from tasks.role import Role

ARTIFACT_EVERY_S = 15.0
STAGE_OF_LOG: dict[str, AuditStage] = {"raw": "raw", "scored": "scored", "commit": "curated"}
"""Second part of a log's path to the stage that is read from it."""


def run(role: Role) -> None:
    """Audit until the run is over or stopped, then what is left."""
    auditor = Auditor(role)
    try:
        while not role.is_over:
            if auditor.turn():
                role.progressed("auditing")
            else:
                role.wait("data to audit")
    except RunStopped:
        if not role.is_leaving:  # a run that was stopped may never be resumed
            auditor.finish()
        raise
    auditor.finish()


@dataclass
class Window:
    """Rows of one stage that have not been judged yet."""

    tables: list[pa.Table] = field(default_factory=list)
    num_rows: int = 0
    num_torn: int = 0
    opened_at: float = field(default_factory=time.monotonic)


class Auditor:
    """Follows the logs of all stages; one window of each is open at a time."""

    def __init__(self, role: Role) -> None:
        """Go on where the last record of log/audit says.

        Raises:
            ConfigError: a suite cannot be read, or the configuration names a rule that there is not.
        """
        self._role = role
        self._config = role.config.audit
        self._suites: dict[AuditStage, Suite] = {stage: load_suite(stage, self._config) for stage in STAGES}
        check_severities(list(self._suites.values()), self._config)
        self._constants = constants_of(role.config)
        self._log = Log(role.store, "log/audit", Audit)
        self._validator = None
        self._tokenizer_says: RoundTrip | None = None
        self._shown_at = float("-inf")
        self._begin()

    def _begin(self) -> None:
        """Take positions and history from the records; forget rows that were read and not yet judged."""
        self._next = self._log.tail()
        first = max(0, self._next - self._config.history * len(STAGES))
        records = self._log.read_from(first, limit=self._next - first)
        self._covers = dict(records[-1].covers) if records else {}
        self._recent = {stage: [r for r in records if r.stage == stage][-self._config.history :] for stage in STAGES}
        self._windows: dict[AuditStage, Window] = {stage: Window() for stage in STAGES}
        self._read = dict(self._covers)

    def finish(self) -> None:
        """Judge what is left when the run is over, and leave the Data Docs in the store."""
        self.turn(is_last=True)
        self.show(is_last=True)
        data_docs.publish(self._role.store)  # here, where Great Expectations has been imported already

    def turn(self, *, is_last: bool = False) -> bool:
        """Read what is new and judge the windows that are full; return whether there was anything.

        Args:
            is_last: the run is over: judge windows that are not full too, and stop nothing.
        """
        found = False
        for stage in STAGES:
            for looked in read_new(self._role.store, stage, self._read, self._round_trip):
                found = True
                window = self._windows[stage]
                window.tables += looked.tables
                window.num_rows += sum(table.num_rows for table in looked.tables)
                window.num_torn += looked.num_torn
                self._read[looked.log] = looked.number + 1
                if window.num_rows >= self._config.window_rows and not self._close(stage, is_last):
                    return True
                if not is_last:
                    self._role.check()
            if self._is_due(self._windows[stage], is_last):
                found = True
                if not self._close(stage, is_last):
                    return True
        return found

    def _is_due(self, window: Window, is_last: bool) -> bool:
        is_old = time.monotonic() - window.opened_at > self._config.window_s
        return window.num_rows + window.num_torn >= self._config.min_rows and (is_old or is_last)

    def _close(self, stage: AuditStage, is_last: bool) -> bool:
        """Judge a window, record what was found, and stop a run that goes on when a violated rule asks for it.

        Returns:
            Whether the record stands. When another audit was first, everything goes on from its word.
        """
        window, suite = self._windows[stage], self._suites[stage]
        history = [record.statistics for record in self._recent[stage]]
        checks, unjudged = make_checks(suite, self._config, self._constants, history)
        results = [_readable(window)]
        statistics: dict[str, float] = {}
        if window.tables:
            table = features.concatenate(window.tables)
            results += self._validate(table, checks)
            statistics = statistics_of(table, suite)
        covers = self._covers | {log: n for log, n in self._read.items() if STAGE_OF_LOG[log.split("/")[1]] == stage}
        record = Audit(
            writer=self._role.writer,
            stage=stage,
            num_rows=window.num_rows,
            num_torn=window.num_torn,
            results=tuple(results),
            unjudged=tuple(unjudged),
            statistics=statistics,
            covers=covers,
        )
        if self._log.append(self._next, record) is not None:
            self._begin()
            return False
        self._next += 1
        self._covers = covers
        self._recent[stage] = [*self._recent[stage], record][-self._config.history :]
        self._windows[stage] = Window()
        if not is_last:
            self._stop_if_asked(record)
        self.show()
        return True

    def _round_trip(self, responses: Sequence[Sequence[int]]) -> list[bool]:
        if self._tokenizer_says is None:
            from tasks.prompts import make_round_trip, tokenizer_from_files  # seconds to import: not before it is asked

            self._tokenizer_says = make_round_trip(tokenizer_from_files(read_model_files(self._role.store)))
        return self._tokenizer_says(responses)

    def _validate(self, table: pa.Table, checks: list[Check]) -> list[RuleResult]:
        if self._validator is None:
            from infra.expectations import Validator  # seconds to import: not before there is something to judge

            self._validator = Validator()
        return self._validator.validate(table, checks)

    def _stop_if_asked(self, record: Audit) -> None:
        broken = [result for result in record.results if not result.passed and result.severity == "stop"]
        if broken:
            first = broken[0]
            self._role.tell(
                "stop",
                error=f"audit of {record.stage} data, rule {first.rule}: expected {first.expected}; {first.observed}",
                detail={"audit": self._next - 1, "results": [result.model_dump() for result in broken]},
            )
            self._role.check(often=True)

    def show(self, *, is_last: bool = False) -> None:
        """Show the newest windows in Prefect, when this role is played there; a server that is away costs nothing."""
        newest = [records[-1] for records in self._recent.values() if records]
        is_due = is_last or time.monotonic() - self._shown_at > ARTIFACT_EVERY_S
        if not newest or not is_due or not _is_prefect_task():
            return
        self._shown_at = time.monotonic()
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(_publish, to_markdown(newest)), daemon=True)
        thread.start()
        if is_last:
            thread.join(timeout=5.0)


def _readable(window: Window) -> RuleResult:
    """Return the one rule that no suite has: rows must be fit to be looked at."""
    total = window.num_rows + window.num_torn
    return RuleResult(
        rule="rows_readable",
        severity="warn",
        passed=window.num_torn == 0,
        expected="readable batches, no missing values, per-token columns of equal lengths",
        observed=f"{window.num_torn} of {total} rows not so",
    )


def to_markdown(records: Sequence[Audit]) -> str:
    """Return the windows as one table, violations first."""
    rows = [(result.passed, record, result) for record in records for result in record.results]
    lines = ["| | stage | rule | expected | observed |", "|---|---|---|---|---|"]
    for passed, record, result in sorted(rows, key=lambda row: row[0]):
        mark = "ok" if passed else result.severity
        lines.append(f"| {mark} | {record.stage} | {result.rule} | {result.expected} | {result.observed} |")
    counts = ", ".join(f"{record.stage} {record.num_rows} rows, {record.num_torn} torn" for record in records)
    return "\n".join([f"Newest windows: {counts}.", "", *lines])


def _is_prefect_task() -> bool:
    if "prefect" not in sys.modules:  # a role that is played without Prefect has nobody to show it to
        return False
    from prefect.context import TaskRunContext

    return TaskRunContext.get() is not None


def _publish(markdown: str) -> None:
    from prefect.artifacts import create_markdown_artifact

    try:
        create_markdown_artifact(markdown, key="data-quality", description="newest windows against their suites")
    except Exception:  # noqa: BLE001 a view of the records, which are there whatever happens here
        return
