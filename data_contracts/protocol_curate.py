"""Which results are waited for, and how the first of them settles a ticket."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from data_contracts.protocol_state import RunState
from data_contracts.protocol_ticket import Ticket
from data_contracts.records import Curated, GroupRef, Verdict


class Judged(NamedTuple):
    """Curation's opinion on one scored record: a candidate verdict for every group in it, refused ones included."""

    rollout: str
    number: int
    verdicts: tuple[Verdict, ...]


def followed(state: RunState) -> dict[str, int]:
    """Return the rollout writers whose results are waited for, with the first scored record not yet dealt with.

    Reward follows their raw logs (it goes on where its scored logs end), curation their scored logs.
    """
    writers = {writer for t in state.in_flight() if t.is_pending for writer in t.writers}
    return {writer: state.covers.get(writer, 0) for writer in sorted(writers)}


def decide_verdicts(state: RunState, writer: str, judged: Iterable[Judged]) -> Curated | None:
    """Settle what can be settled: the first result of a ticket counts, others are recorded as late.

    Args:
        state: curation's view, not behind.
        writer: who settles.
        judged: opinions on scored records that `state.covers` does not cover yet, in order of arrival; those
            of one rollout writer in number order and without a gap. Covered ones are ignored.

    Tickets that were given up are refused when none of `judged` has a result. With `deterministic`, verdicts
    come in ticket order and a result waits for all tickets before it. A result whose claim is not known in
    this view waits too.
    """
    state.require_current()
    round_ = _Settling(state)
    waiting = [j for j in judged if j.number >= state.covers.get(j.rollout, 0)]
    for opinion in waiting:
        round_.collect(opinion)
    round_.release()
    late: list[GroupRef] = []
    covers: dict[str, int] = {}
    for opinion in waiting:
        expected = covers.get(opinion.rollout, state.covers.get(opinion.rollout, 0))
        if opinion.number == expected and round_.is_dealt_with(opinion):
            covers[opinion.rollout] = opinion.number + 1
            late += round_.late(opinion)
    if not round_.verdicts and not covers:
        return None
    accepted = sum(verdict.accepted for verdict in round_.verdicts.values())
    return Curated(
        writer=writer,
        verdicts=tuple(round_.verdicts.values()),
        covers=covers,
        late=tuple(late),
        num_accepted=state.num_accepted_by_curation + accepted,
        num_refused=state.num_refused_by_curation + len(round_.verdicts) - accepted,
    )


@dataclass
class _Settling:
    """One round of verdicts."""

    state: RunState
    candidates: dict[int, Verdict] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)

    def collect(self, opinion: Judged) -> None:
        for verdict in opinion.verdicts:
            ticket = self.state.tickets.get(verdict.ticket)
            if ticket is not None and ticket.is_pending and not _is_outdated(verdict, ticket):
                self.candidates.setdefault(verdict.ticket, verdict)

    def release(self) -> None:
        for ticket in self.state.in_flight():
            if not ticket.is_pending:
                continue
            verdict = self.candidates.get(ticket.number)
            if verdict is None and ticket.given_up:
                verdict = Verdict(ticket=ticket.number, accepted=False, reason="given_up", attempt=ticket.attempt)
            if verdict is not None:
                self.verdicts[ticket.number] = verdict
            elif self.state.rules.deterministic:
                break
        if not self.state.rules.deterministic:  # in order of arrival, those without a result last
            order = {n: i for i, n in enumerate(self.candidates)}
            self.verdicts = dict(sorted(self.verdicts.items(), key=lambda item: order.get(item[0], len(order))))

    def is_dealt_with(self, opinion: Judged) -> bool:
        """Whether every group of the record has its verdict, now or before, or came too late."""
        for verdict in opinion.verdicts:
            if verdict.ticket >= self.state.next_ticket:
                return False
            ticket = self.state.tickets.get(verdict.ticket)
            if ticket is None or not ticket.is_pending or verdict.ticket in self.verdicts:
                continue
            if not _is_outdated(verdict, ticket):
                return False
        return True

    def late(self, opinion: Judged) -> list[GroupRef]:
        return [v.group for v in opinion.verdicts if v.group is not None and not self._counts(v)]

    def _counts(self, verdict: Verdict) -> bool:
        ticket = self.state.tickets.get(verdict.ticket)
        first = self.verdicts.get(verdict.ticket) or (ticket.verdict if ticket is not None else None)
        return first is not None and (first.attempt, first.batch) == (verdict.attempt, verdict.batch)


def _is_outdated(verdict: Verdict, ticket: Ticket) -> bool:
    """Whether the result is of an attempt before a rebase, whose tokens are too old by now."""
    return verdict.accepted and verdict.attempt < ticket.floor_attempt
