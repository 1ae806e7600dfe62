"""Which earlier samples have been used again, and how often: a fold over log/curated. Pure.

The curriculum hands a source out again only when nobody can be holding it by an older state (reuse.Drawing.may_offer).
With a bound on staleness that is nearly always right. A worker claims under the newest commit it knows, and knows those
of all claims before its own, so what claims name never goes back; a claim under the state of commit c takes a ticket
below (c + eta + 1) * B + settled without training; and once the trainer has chosen the groups of commit c + eta + 1,
that many have been claimed. It is no promise, though: without a bound a worker may claim under a state of any age
before others claim under the next one, and while one trainer replaces another, a group can be chosen and refused at
once, which leaves room for one claim too many.

So the promise is kept where a group is accepted. Verdicts stand in one order, and the one that would use a source once
more than is allowed is a refusal. A first verdict is never undone, so no view that lags can change that.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from data_contracts.records import Curated, GroupRef, Verdict


class Use(NamedTuple):
    """One use of an earlier ticket's samples."""

    kind: str
    """copied: all of a group's rows are theirs; joined: they complete a group that is sampled in parts."""
    ticket: int
    oldest_version: int


def uses_of(group: GroupRef | None) -> list[Use]:
    """Return the uses that a group makes, were it trained; what is lent to several groups does not count."""
    if group is None:
        return []
    copied = [] if group.reused is None else [Use("copied", group.reused.ticket, group.reused.oldest_version)]
    return copied + [Use("joined", one.ticket, one.oldest_version) for one in group.joined if not one.lent]


class Uses:
    """What accepted verdicts have used, those of the records that were added."""

    def __init__(self, max_copies: int) -> None:
        """`max_copies`: how often a group may be copied; parts of groups are joined once."""
        self._limits = {"copied": max_copies, "joined": 1}
        self._counts: Counter[tuple[str, int]] = Counter()

    def add(self, record: Curated) -> None:
        """Count what a record's accepted verdicts use."""
        self._counts.update(_keys(record.verdicts))

    def check(self, record: Curated) -> Curated:
        """Return the record with a refusal in place of every verdict that uses a source too often; count nothing.

        Args:
            record: about to be appended, when all records before it that may use the same sources were added.
        """
        counts, verdicts = self._counts.copy(), []
        for verdict in record.verdicts:
            why = self._why_not(verdict, counts)
            counts.update([] if why else _keys([verdict]))
            verdicts.append(verdict.model_copy(update={"accepted": False, "reason": why}) if why else verdict)
        changed = sum(old.accepted != new.accepted for old, new in zip(record.verdicts, verdicts, strict=True))
        if not changed:
            return record
        return record.model_copy(
            update={
                "verdicts": tuple(verdicts),
                "num_accepted": record.num_accepted - changed,
                "num_refused": record.num_refused + changed,
            }
        )

    def _why_not(self, verdict: Verdict, counts: Counter[tuple[str, int]]) -> str:
        for use in uses_of(verdict.group) if verdict.accepted else ():
            limit, count = self._limits[use.kind], counts[use.kind, use.ticket]
            if count >= limit:
                return f"used_before: the samples of ticket {use.ticket} were {use.kind} {count} times, at most {limit}"
        return ""


def _keys(verdicts: Iterable[Verdict]) -> list[tuple[str, int]]:
    return [(use.kind, use.ticket) for verdict in verdicts if verdict.accepted for use in uses_of(verdict.group)]
