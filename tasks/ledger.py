"""One process's view of the records that decide a run, and the way to add to them.

`sync` reads what is new, `append` puts a decision at the next number. A decision that lost against another
process's record was made before that record was known: the caller applies it (done here) and decides again.
"""

import json

from data_contracts.config import RunConfig
from data_contracts.protocol_state import LOGS, LogName, RunState
from data_contracts.protocol_ticket import Rules
from data_contracts.records import Claim, Commit, Curated, Record, Refused
from infra.log import Log
from infra.objects import get_object
from infra.store import Store


class Ledger:
    """The fold over log/claim, log/curated, log/refused and log/commit.

    Attributes:
        state: what this process knows; it may lag behind the store, never run ahead of it.
        newest: the newest commit known; None before commit 0.
    """

    def __init__(self, store: Store, config: RunConfig) -> None:
        self.store = store
        self.rules = Rules.of(config)
        self._logs = {name: Log(store, f"log/{name}", kind) for name, kind in LOGS.items()}
        self.newest: Commit | None = self._logs["commit"].last()  # pyright: ignore[reportAttributeAccessIssue]
        self.state = self._restore()
        self.sync()

    def _restore(self) -> RunState:
        """Begin from the newest snapshot, so that the cost of a start does not grow with the run."""
        if self.newest is None or self.newest.snapshot_version == 0:
            return RunState(self.rules)
        commit = self._logs["commit"].read(self.newest.snapshot_version)
        if not isinstance(commit, Commit) or commit.snapshot is None:
            return RunState(self.rules)
        return RunState.from_snapshot(self.rules, json.loads(get_object(self.store, commit.snapshot)))

    def sync(self) -> bool:
        """Apply what is new in the four logs; return whether there was anything."""
        changed = False
        while True:
            for name in LOGS:
                changed |= self._read(name)
            if not self.state.behind():
                return changed

    def _read(self, name: LogName) -> bool:
        records = self._logs[name].read_from(self.state.next[name])
        for record in records:
            self._apply(name, record)
        return bool(records)

    def _apply(self, name: LogName, record: Record) -> None:
        self.state.apply(name, self.state.next[name], record)
        if isinstance(record, Commit):
            self.newest = record

    def append(self, record: Claim | Curated | Refused | Commit) -> bool:
        """Append a decision made on the present state; return whether it stands.

        When another record has the number, that one is applied instead: decide again.
        """
        name: LogName = next(name for name, kind in LOGS.items() if isinstance(record, kind))
        winner = self._logs[name].append(self.state.next[name], record)
        self._apply(name, record if winner is None else winner)
        return winner is None

    def commit(self, version: int) -> Commit:
        """Return the commit of a version that exists."""
        if self.newest is not None and self.newest.version == version:
            return self.newest
        commit = self._logs["commit"].read(version)
        if not isinstance(commit, Commit):
            raise LookupError(f"commit {version} does not exist in {self.store.url}")
        return commit
