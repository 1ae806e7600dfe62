"""Batches are damaged while a run goes on: each is a refusal with a reason, the run ends, and the books add up."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dashboards.reconcile import reconcile
from data_contracts.records import Audit, Commit, Curated, Refused
from infra.log import Log
from infra.runs import Run
from tasks.quarantine import fates, read_quarantine

pytestmark = pytest.mark.slow

ROLES = ("train", "rollout", "reward", "curate", "audit")
EVERY = 4
"""One of so many batches is damaged."""


def flip(body: bytes) -> bytes | None:
    """Change one bit in the middle."""
    place = len(body) // 2
    return body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "flipped": flip,
    "cut": lambda body: body[: len(body) // 3],
    "emptied": lambda body: b"",
    "replaced": lambda body: b"ARROW1" + bytes(len(body) - 6),
    "deleted": lambda body: None,
}


class Vandal(threading.Thread):
    """Damages every so-manieth batch as soon as it sees it, each in another way."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._folder = Path(run.store.url) / "batch"
        self.damaged: dict[str, str] = {}
        self.over = threading.Event()

    def run(self) -> None:
        seen: set[str] = set()
        while not self.over.wait(0.002):
            names = {path.name for path in self._folder.glob("*.arrow")} if self._folder.is_dir() else set()
            for name in sorted(names - seen):
                seen.add(name)
                if len(seen) % EVERY == 0:
                    self._damage(self._folder / name)

    def _damage(self, path: Path) -> None:
        how = list(DAMAGES)[len(self.damaged) % len(DAMAGES)]
        body = DAMAGES[how](path.read_bytes())
        path.unlink()  # batches are immutable, also for their owner
        if body is not None:
            path.write_bytes(body)
        self.damaged[f"batch/{path.name}"] = how


def test_a_run_goes_on_while_its_batches_are_damaged(begun: Callable[..., Run], processes) -> None:
    run = begun(
        steps=20,
        staleness={"max_staleness": 2},
        audit={"window_rows": 64, "min_rows": 4},
        rollout={"groups_per_batch": 2},
    )
    vandal = Vandal(run)
    vandal.start()
    try:
        started = processes.start_all(run, ROLES)
        processes.join(started, limit_s=600.0)
    finally:
        vandal.over.set()
        vandal.join()
    assert [process.exitcode for process in started] == [0] * len(started)
    commits = Log(run.store, "log/commit", Commit).read_from(0)
    assert [commit.version for commit in commits] == list(range(21))
    assert set(vandal.damaged.values()) == set(DAMAGES), "each kind must occur to be tested"

    books = reconcile(run.store, deep=True)
    assert books.issued == books.trained + books.refused.total() + books.in_flight.total()
    assert books.trained == 20 * run.config.groups_per_step
    assert all(any(key in said for key in vandal.damaged) for said in books.contradictions)

    refused = {v.ticket for r in Log(run.store, "log/curated", Curated).read_from(0) for v in r.verdicts if v.reason}
    refused |= {ticket for r in Log(run.store, "log/refused", Refused).read_from(0) for ticket in r.tickets}
    quarantined = {ticket for entry in read_quarantine(run.store) for ticket in entry.tickets}
    assert refused, "the case must occur to be tested"
    assert refused <= quarantined, "the evidence of every refusal is kept"
    told = fates(run.store)
    assert all("refused" in told[ticket] for ticket in refused)
    torn = sum(record.num_torn for record in Log(run.store, "log/audit", Audit).read_from(0))
    assert torn > 0, "the audit has seen it too"
