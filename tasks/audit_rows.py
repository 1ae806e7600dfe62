"""The rows that the audit looks at: features of what the logs of each stage have that was not read yet.

raw and scored: every row of every batch. curated: the rows that commits trained on, with their staleness.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from data_contracts import features
from data_contracts.errors import ContractError, ObjectMissing
from data_contracts.records import BatchRef, Commit, Consumed, Raw, Scored
from data_contracts.suites import AuditStage
from data_contracts.trajectory import Stage
from infra.log import Log
from infra.objects import get_batch
from infra.store import Store

R = TypeVar("R", Raw, Scored, Commit)
ROUND_TRIPS = 16
"""Rows of a batch whose text is encoded again."""

RoundTrip = Callable[[Sequence[Sequence[int]]], list[bool]]
"""Responses to whether the text of each, encoded again, gives other tokens."""
MISMATCH = "policy/mismatch_k3"


class Looked(NamedTuple):
    """What one record holds."""

    log: str
    """Path of its log."""
    number: int
    tables: list[pa.Table]
    """Features of its rows, in tables of at least one row."""
    num_torn: int
    """Rows from which no features can be derived, those of unreadable batches included."""


def read_new(
    store: Store, stage: AuditStage, positions: dict[str, int], round_trip: RoundTrip | None = None
) -> Iterator[Looked]:
    """Yield the records of a stage from `positions` (log path to number, 0 where it is not named) on."""
    if stage == "curated":
        for number, commit in _records(store, "log/commit", Commit, positions):
            tables, num_torn = trained_rows(store, commit)
            yield Looked("log/commit", number, tables, num_torn)
        return
    for writer in store.at(f"log/{stage}").list_folders():
        path = f"log/{stage}/{writer}"
        records = _records(store, path, Raw, positions) if stage == "raw" else _records(store, path, Scored, positions)
        for number, record in records:
            table = _get(store, record.batch, stage) if record.batch is not None else None
            if table is None:
                yield Looked(path, number, [], 0 if record.batch is None else record.batch.num_rows)
                continue
            rows, num_torn = derive(table, stage)
            if stage == "raw":
                rows = rows.append_column("round_trip_differs", pa.array(round_trips(table, rows.num_rows, round_trip)))
            yield Looked(path, number, [rows] if rows.num_rows else [], num_torn)


def derive(table: pa.Table, stage: Stage) -> tuple[pa.Table, int]:
    """Return (features of the rows that have them, number of rows that have not)."""
    intact = features.find_intact(table)
    num_torn = int(np.sum(~intact))
    whole = table if not num_torn else table.filter(pa.array(intact))
    return features.derive(whole, stage), num_torn


def round_trips(table: pa.Table, num_rows: int, differs: RoundTrip | None) -> np.ndarray:
    """Return [num_rows] float64: 1 where the text of a response gives other tokens, NaN for rows not looked at."""
    found = np.full(num_rows, np.nan)
    if differs is not None and num_rows == table.num_rows:  # rows of a torn batch are under suspicion already
        responses = table.column("response_ids").slice(0, ROUND_TRIPS).to_pylist()
        found[: len(responses)] = differs(responses)
    return found


def trained_rows(store: Store, commit: Commit) -> tuple[list[pa.Table], int]:
    """Return (features of the rows that a commit trained on, number of rows that cannot be looked at)."""
    by_batch: dict[str, list[Consumed]] = {}
    for consumed in commit.consumed:
        by_batch.setdefault(consumed.batch.sha256, []).append(consumed)
    tables: list[pa.Table] = []
    num_torn = 0
    for groups in by_batch.values():
        table = _get(store, groups[0].batch, "scored")
        if table is None:
            num_torn += sum(consumed.group.num_rows for consumed in groups)
            continue
        rows, staleness = _places(groups, commit.version - 1)
        derived, torn = derive(table.take(pa.array(rows)), "scored")
        num_torn += torn
        if derived.num_rows and not torn:
            mismatch = commit.metrics.get(MISMATCH, 0.0)
            derived = derived.append_column("staleness", pa.array(staleness))
            tables.append(derived.append_column("mismatch_k3", pa.array(np.full(derived.num_rows, mismatch))))
    return tables, num_torn


def _places(groups: Sequence[Consumed], version: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows of the groups in their batch, those left out aside; their age in versions at `version`)."""
    rows: list[int] = []
    ages: list[int] = []
    for consumed in groups:
        group, left_out = consumed.group, set(consumed.group.left_out)
        kept = [group.first_row + place for place in range(group.num_rows) if place not in left_out]
        rows += kept
        ages += [version - group.oldest_version if group.oldest_version >= 0 else 0] * len(kept)
    return np.array(rows, np.int64), np.array(ages, np.int64)


def _records(store: Store, path: str, kind: type[R], positions: dict[str, int]) -> Iterator[tuple[int, R]]:
    first = positions.get(path, 0)
    yield from enumerate(Log(store, path, kind).read_from(first), first)


def _get(store: Store, batch: BatchRef, stage: Stage) -> pa.Table | None:
    """Return a batch; None for one that is missing, torn, altered or of another schema: the gate has reported it."""
    try:
        return get_batch(store, batch, stage)
    except (ContractError, ObjectMissing):
        return None
