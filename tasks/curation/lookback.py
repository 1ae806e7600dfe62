"""Rules that look back at what was accepted before: applied when verdicts are about to be settled, in their order.

A group is judged alone when it is read. What it shares with earlier groups can be said only once it is known which
groups are before it, which is when its verdict goes into log/curated. So the memory is a fold over that log: another
process, or this one after a restart, remembers the same.
"""

from collections.abc import Callable

from data_contracts.config import CurateConfig
from data_contracts.errors import ContractError, ObjectMissing
from data_contracts.records import BatchRef, Curated, GroupRef, Verdict
from infra.log import Log
from infra.objects import get_batch
from infra.store import Store
from tasks.curation.chain import judge, verdict_of
from tasks.curation.duplicates import Recent
from tasks.curation.group import Group, Rows


class Lookback:
    """Judges accepted verdicts once more, against the accepted groups before them."""

    def __init__(self, store: Store, config: CurateConfig) -> None:
        """Remember nothing yet: `check` reads what it needs."""
        self._store = store
        self._config = config
        self._log = Log(store, "log/curated", Curated)
        self._recent = Recent(config.rules)
        self._next: int | None = None
        self._rows: dict[str, Rows] = {}

    @property
    def is_needed(self) -> bool:
        """Whether any rule looks back."""
        return self._recent.num_groups > 0

    def check(self, record: Curated, number: int, *, refused: Callable[[Verdict], None]) -> Curated:
        """Return the record as it should be appended at `number`, all records before which exist.

        Args:
            record: verdicts by the groups alone.
            number: its place in log/curated.
            refused: called with every verdict that changed to a refusal or lost rows.
        """
        if not self.is_needed:
            return record
        self._follow(number)
        recent = self._recent.copy()
        verdicts = [self._judge(verdict, recent, refused) for verdict in record.verdicts]
        changed = sum(v.accepted for v in record.verdicts) - sum(v.accepted for v in verdicts)
        return record.model_copy(
            update={
                "verdicts": tuple(verdicts),
                "num_accepted": record.num_accepted - changed,
                "num_refused": record.num_refused + changed,
            }
        )

    def _judge(self, verdict: Verdict, recent: Recent, refused: Callable[[Verdict], None]) -> Verdict:
        if not verdict.accepted or verdict.batch is None or verdict.group is None or verdict.group.reused is not None:
            return verdict
        group = Group.of_ref(verdict.group.model_copy(update={"left_out": ()}), self._read(verdict.batch))
        outcome = judge(group, self._config, recent)
        if not outcome.why:
            recent.add(outcome.kept)
        again = verdict_of(outcome, verdict.batch)
        again = again.model_copy(update={"batch": verdict.batch, "outcome": verdict.outcome})
        if (again.accepted, again.group) != (verdict.accepted, verdict.group):
            refused(again)
        return again

    def _follow(self, number: int) -> None:
        """Remember what the records before `number` accepted; at first, go back no further than is looked back."""
        if self._next is None:
            self._next, found = number, 0
            while self._next > 0 and found < self._recent.num_groups:
                self._next -= 1
                record = self._log.read(self._next)
                found += sum(v.accepted for v in record.verdicts) if record is not None else 0
        for record in self._log.read_from(self._next, limit=number - self._next):
            for verdict in record.verdicts:
                if (
                    verdict.accepted
                    and verdict.batch is not None
                    and verdict.group is not None
                    and verdict.group.reused is None
                ):
                    self._remember(verdict.batch, verdict.group)
        self._next = number
        self._rows.clear()

    def _remember(self, batch: BatchRef, ref: GroupRef) -> None:
        try:
            group = Group.of_ref(ref, self._read(batch))
        except (ContractError, ObjectMissing):  # torn since: the trainer will refuse it, and nobody can be like it
            return
        self._recent.add(group)

    def _read(self, batch: BatchRef) -> Rows:
        """Return the rows of a batch; those of the batches at hand are read once."""
        if batch.sha256 not in self._rows:
            self._rows[batch.sha256] = Rows(get_batch(self._store, batch, "scored"))
        return self._rows[batch.sha256]
