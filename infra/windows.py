"""Which records of the other roles belong to a commit: those that its trainer had applied and the one before had not.

Records of the rollout, reward and curate roles carry what their process did since its last record (tokens,
seconds). Commits say how far into log/curated their trainer had read, and curated records how far into each
log of scored records, which stand at the numbers of the raw ones: so every record falls to exactly one version.
"""

from data_contracts.records import Commit, Curated, Raw, Scored
from infra.log import Log
from infra.store import Store

Told = Curated | Raw | Scored


class Windows:
    """Asked about commits in order, it reads each record once; asked anew, it looks back as far as it must."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._curated = Log(store, "log/curated", Curated)
        self._next = 0  # first curated record that was not looked at
        self._covered: dict[str, int] = {}  # rollout writer to its records that those before `_next` deal with
        self._is_complete = True  # whether a writer that is not in it has no records before

    def read(self, before: Commit | None, commit: Commit) -> list[Told]:
        """Return the records that fall to `commit`; `before` is the commit before it, None for the first."""
        start = before.positions.get("curated", 0) if before else 0
        count = max(0, commit.positions.get("curated", 0) - start)
        if start != self._next:
            self._covered, self._is_complete = {}, start == 0
        curated = self._curated.read_from(start, limit=count)
        told: list[Told] = [*curated]
        for number, record in enumerate(curated, start):
            for writer, stop in record.covers.items():
                first = self._covered.get(writer)
                first = self._look_back(writer, number) if first is None else first
                told += Log(self._store, f"log/scored/{writer}", Scored).read_from(first, limit=stop - first)
                told += Log(self._store, f"log/raw/{writer}", Raw).read_from(first, limit=stop - first)
                self._covered[writer] = stop
        self._next = start + count
        return told

    def _look_back(self, writer: str, number: int) -> int:
        """Return how many records of `writer` the curated records before `number` deal with."""
        while not self._is_complete and number > 0:
            number -= 1
            record = self._curated.read(number)
            if record is not None and writer in record.covers:
                return record.covers[writer]
        return 0
