"""Holds verdicts to how often earlier samples may be used again, by what log/curated has accepted before them."""

from collections.abc import Callable

from data_contracts.config import RunConfig
from data_contracts.records import Commit, Curated, Verdict
from data_contracts.uses import Uses, uses_of
from infra.log import Log
from infra.store import Store


class UseLimit:
    """Reads what it needs of log/curated; another process, or this one after a restart, says the same."""

    def __init__(self, store: Store, config: RunConfig, commit: Callable[[int], Commit]) -> None:
        """`commit` returns the commit of a version."""
        reuse = config.curriculum.reuse
        self._uses = Uses(reuse.max_uses if reuse is not None else 0)
        self._log = Log(store, "log/curated", Curated)
        self._commit = commit
        self._first = self._next = -1

    def check(self, record: Curated, number: int, *, refused: Callable[[Verdict], None]) -> Curated:
        """Return the record as it should be appended at `number`, all records before which exist.

        Args:
            record: verdicts, accepted ones among them that may use a source too often.
            number: its place in log/curated.
            refused: called with every verdict that changed to a refusal.
        """
        versions = [use.oldest_version for v in record.verdicts if v.accepted for use in uses_of(v.group)]
        if not versions:
            return record
        self._follow(max(min(versions), 0), number)
        checked = self._uses.check(record)
        for before, after in zip(record.verdicts, checked.verdicts, strict=True):
            if before.accepted and not after.accepted:
                refused(after)
        return checked

    def _follow(self, version: int, number: int) -> None:
        """Count the uses in the records before `number`, from the first that can use what `version` sampled on.

        What the trainer of a commit had read was written before its weights sampled anything.
        """
        first = min(self._commit(version).positions.get("curated", 0), number)
        if self._next < 0:
            self._first = self._next = first
        for start, stop in ((first, self._first), (self._next, number)):
            for one in self._log.read_from(start, limit=stop - start) if start < stop else ():
                self._uses.add(one)
        self._first, self._next = min(first, self._first), number
