"""The protocol: who may do what next. Views of the logs in, decisions out; no clock and no store.

    rollout --raw--> reward --scored--> curate --curated--> train --commit--> rollout

Every role runs one loop: read the logs further and `apply` them, decide, append the decided record at
`state.next[log]`. If another record was there first, apply that one and decide again. Decisions return
complete records (their nonce and time for people are stamped on by the record itself) or small commands.

rollout   waits for: room, or a lost lease.            unblocked by: a commit, a refusal
reward    waits for: raw records of followed writers.  unblocked by: rollout
curate    waits for: scored records, given-up tickets. unblocked by: reward, rollout
train     waits for: enough accepted groups, such that those left behind can still make it.
                                                       unblocked by: curate, a rebase, its own refusals
Nobody waits for a person.

Why the bound holds. When `n` more tickets are claimed with version w, all tickets in flight, these included,
number at most (w + eta + 1 - v) * B for every commit v up to now: exactly the places of the steps up to the
new tickets' deadline w + eta. Each commit takes B of them away and one step. So whatever the trainer
consumes, the tickets in flight up to a deadline always fit their places in number; the trainer's rule
(`choose_groups`) sees to it that they also fit in order. A view that lags sees less room, never more: only
claims take room away, and an append to `claim` proves that the view of `claim` was complete.

The one exception is a trainer that was replaced while it worked and whose last commit still won: it may
have trained tickets that its successor had refused and whose places were given away again. There are at
most as many surplus groups as such tickets (`RunState.num_both`); the trainer refuses them as overbooked. One
that is claimed in a lagging view after the last commit stays in flight when the run is over.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from data_contracts.errors import ProtocolError
from data_contracts.protocol_leases import Lease, Leases, Timeouts
from data_contracts.protocol_state import LOGS, RETURNED, Account, LogName, Rules, RunState, Ticket
from data_contracts.records import Claim, Consumed, Curated, GroupRef, Refused, Verdict

__all__ = [
    "LOGS",
    "RETURNED",
    "Account",
    "Finished",
    "Judged",
    "Lease",
    "Leases",
    "LogName",
    "Recover",
    "Refuse",
    "Replaced",
    "Rules",
    "RunState",
    "Ticket",
    "Timeouts",
    "Train",
    "Wait",
    "choose_groups",
    "decide_claim",
    "decide_rebase",
    "decide_reclaim",
    "decide_refuse",
    "decide_start",
    "decide_verdicts",
    "followed",
    "owned",
    "room",
]

RefuseReason = Literal["unreadable", "digest", "contract", "dropped", "timeout", "overbooked"]


# --- rollout ---


def room(state: RunState, version: int) -> int:
    """Return how many tickets a worker that holds the weights of `version` may claim; 0 or less: none.

    (version + eta + 1) * B + settled without training - claimed, and never beyond what the remaining steps
    need or beyond `max_unsettled` tickets in flight.
    """
    rules = state.rules
    last = rules.steps
    if rules.max_staleness is not None:
        last = min(last, version + rules.max_staleness + 1)
    free = last * rules.groups_per_step + state.num_refused - state.next_ticket
    if rules.max_unsettled is not None:
        free = min(free, rules.max_unsettled - state.num_in_flight)
    return free


def decide_claim(
    state: RunState, writer: str, *, version: int, curriculum: int, limit: int | None = None
) -> Claim | None:
    """Claim the next tickets, if there is room.

    Args:
        state: the worker's view, not behind.
        writer: who claims.
        version: weights the worker holds; every token of the tickets will be sampled by these or later ones.
        curriculum: commit whose curriculum state decides the prompts; the newest one unless told otherwise.
        limit: how many the worker can take on; None: a block.
    """
    _require_current(state)
    _require_version(state, version)
    _require_version(state, curriculum)
    size = min(state.rules.claim_block, room(state, version))
    if limit is not None:
        size = min(size, limit)
    if size <= 0:
        return None
    first = state.next_ticket
    return Claim(
        writer=writer,
        kind="claim",
        tickets=tuple(range(first, first + size)),
        attempt=0,
        version=version,
        curriculum=curriculum,
        deadline=state.rules.deadline(version),
        next_ticket=first + size,
    )


def decide_reclaim(
    state: RunState, writer: str, lost: Iterable[Lease], *, version: int, limit: int | None = None
) -> Claim | None:
    """Take over tickets whose lease was lost, or give them up after the last attempt.

    One record speaks of tickets of one attempt and one curriculum state; call again for the others. A
    takeover needs weights at least as new as the tickets' oldest version, so that no deadline shrinks: a
    worker with older weights gets them first.
    """
    _require_current(state)
    _require_version(state, version)
    tickets = []
    for lease in sorted(set(lost)):
        ticket = state.tickets.get(lease.ticket)
        if ticket is not None and ticket.is_pending and not ticket.given_up and ticket.attempt == lease.attempt:
            tickets.append(ticket)
    exhausted = [t for t in tickets if t.attempt + 1 >= state.rules.max_attempts]
    if exhausted:
        attempt = exhausted[0].attempt
        same = [t for t in exhausted if t.attempt == attempt]
        return _continued(state, writer, "give_up", same, attempt, version, same[0].curriculum)
    tickets = [t for t in tickets if t.floor <= version][: None if limit is None else max(limit, 0)]
    if not tickets:
        return None
    attempt, curriculum = tickets[0].attempt, tickets[0].curriculum
    same = [t for t in tickets if (t.attempt, t.curriculum) == (attempt, curriculum)]
    same = same[: state.rules.claim_block]
    return _continued(state, writer, "reclaim", same, attempt + 1, version, curriculum)


def decide_rebase(state: RunState, writer: str, unfinished: Iterable[int], *, version: int) -> Claim | None:
    """Move to `version` those of the worker's unfinished tickets whose deadline holds training up.

    Only when stragglers are to be interrupted. The worker puts the groups on these weights before it samples
    another token; tokens that have become too old stay as context and leave the loss.
    """
    _require_current(state)
    _require_version(state, version)
    if state.rules.stragglers != "interrupt":
        return None
    plan = _plan(state)
    if len(plan.chosen) < state.rules.groups_per_step:
        return None  # training lacks groups, not time
    mine = set(unfinished)
    tickets = [
        t
        for t in plan.blocking
        if t.number in mine and t.is_pending and not t.given_up and t.owner == writer and t.floor < version
    ]
    if not tickets:
        return None
    same = [t for t in tickets if t.attempt == tickets[0].attempt]
    return _continued(state, writer, "rebase", same, same[0].attempt, version, same[0].curriculum)


def owned(state: RunState, writer: str) -> list[Ticket]:
    """Return the tickets that the worker should be working on or has delivered, in ticket order."""
    return [t for t in state.in_flight() if t.is_pending and not t.given_up and t.owner == writer]


def _continued(
    state: RunState,
    writer: str,
    kind: Literal["reclaim", "rebase", "give_up"],
    tickets: Sequence[Ticket],
    attempt: int,
    version: int,
    curriculum: int,
) -> Claim:
    return Claim(
        writer=writer,
        kind=kind,
        tickets=tuple(sorted(t.number for t in tickets)),
        attempt=attempt,
        version=version,
        curriculum=curriculum,
        deadline=state.rules.deadline(version),
        next_ticket=state.next_ticket,
    )


# --- reward and curate ---


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
    _require_current(state)
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


# --- train ---


class Train(NamedTuple):
    """Train towards `version` on these groups; the fields go into the commit as they are."""

    version: int
    consumed: tuple[Consumed, ...]
    positions: dict[str, int]
    num_trained: int


class Wait(NamedTuple):
    """Nothing can be trained: `groups` lack, or the `deadlines` of these pending tickets come first."""

    reason: Literal["groups", "deadlines"]
    tickets: tuple[int, ...]


class Refuse(NamedTuple):
    """Append these tickets to `refused` (see decide_refuse), then choose again."""

    tickets: tuple[int, ...]
    reason: RefuseReason


class Replaced(NamedTuple):
    """Another trainer has started since: stop, and write nothing more."""

    by: str


class Recover(NamedTuple):
    """Commits up to `version` exist that this trainer does not hold: load them before anything else."""

    version: int


class Finished(NamedTuple):
    """Every step is committed and no ticket is in flight."""


def decide_start(state: RunState, writer: str) -> Refused | None:
    """Announce a trainer in `refused`; None once it is the newest one.

    A trainer appends this first, and reads `refused` and then `commit` to their ends after it and after
    each commit, before it decides anything.
    """
    _require_current(state)
    if state.trainer == writer:
        return None
    return _refused(state, writer, (), "start", "")


def decide_refuse(
    state: RunState, writer: str, tickets: Iterable[int], reason: RefuseReason, detail: str = ""
) -> Refused | None:
    """Refuse those of the tickets that are in flight; None when there are none."""
    _require_current(state)
    if state.trainer != writer:
        raise ProtocolError(f"trainer {writer} cannot refuse: {state.trainer or 'nobody'} is the newest trainer")
    known = [state.tickets[n] for n in sorted(set(tickets)) if n in state.tickets]
    numbers = tuple(t.number for t in known if t.is_in_flight)
    return _refused(state, writer, numbers, reason, detail) if numbers else None


def choose_groups(
    state: RunState, writer: str, *, version: int | None = None, overdue: Iterable[int] = ()
) -> Train | Wait | Refuse | Replaced | Recover | Finished:
    """Decide the trainer's next move.

    Accepted groups are taken earliest deadline first, and only if those left behind can still all make it:
    for every deadline d, the groups in flight with a deadline up to d fit into the (d - t) * B places of the
    steps after this one. `drop` names victims among the pending ones instead of waiting for them.

    Args:
        state: the trainer's view, of which `refused` and then `commit` were read to their ends.
        writer: the trainer.
        version: version of the weights it would train from. A trainer that it replaced may have committed
            since it loaded them, also after its start was recorded.
        overdue: tickets that have been out too long (see Timeouts).

    Raises:
        ProtocolError: everything that must make it is accepted and the rule still fails.
    """
    _require_current(state)
    rules, t = state.rules, state.version
    if state.trainer != writer:
        return Replaced(state.trainer)
    if version is not None and version != t:
        return Recover(t)
    if state.is_finished:
        left = tuple(ticket.number for ticket in state.in_flight())
        return Refuse(left, "overbooked") if left else Finished()
    late = sorted(n for n in set(overdue) if n in state.tickets and state.tickets[n].is_pending)
    if late:
        return Refuse(tuple(late), "timeout")
    broken = _broken_promises(state)
    if broken:
        return Refuse(broken, "contract")
    plan = _plan(state)
    if plan.surplus:
        spare = state.num_both - state.num_overbooked
        if len(plan.surplus) > spare:
            raise ProtocolError(
                f"step {t + 1}: the accepted tickets {plan.surplus} cannot all be trained in time, "
                f"and only {max(spare, 0)} may be surplus; more was claimed than admission allows"
            )
        return Refuse(plan.surplus, "overbooked")
    if len(plan.chosen) < rules.groups_per_step:
        return Wait("groups", tuple(ticket.number for ticket in state.in_flight() if ticket.is_pending))
    if plan.blocking and rules.stragglers == "drop":
        return Refuse(plan.victims, "dropped")
    if plan.blocking:
        return Wait("deadlines", tuple(ticket.number for ticket in plan.blocking))
    return Train(
        version=t + 1,
        consumed=tuple(_consumed(state, ticket) for ticket in plan.chosen),
        positions={**state.next},
        num_trained=(t + 1) * rules.groups_per_step,
    )


class _Plan(NamedTuple):
    """What earliest deadline first would do now."""

    chosen: list[Ticket]
    """Accepted groups to train, at most B."""
    blocking: list[Ticket]
    """Pending tickets of which at least one must settle or move before the chosen ones may be trained."""
    victims: tuple[int, ...]
    """Fewest pending tickets without which the rest would fit."""
    surplus: tuple[int, ...]
    """Accepted tickets that cannot fit, whatever happens."""


def _plan(state: RunState) -> _Plan:
    rules, t = state.rules, state.version
    last = rules.steps - 1

    def due(ticket: Ticket) -> int:
        deadline = state.deadline(ticket)
        return last if deadline is None else min(deadline, last)

    def urgency(ticket: Ticket) -> tuple[int, int]:
        deadline = state.deadline(ticket)
        return (0 if deadline is None else deadline, ticket.number)

    ordered = sorted(state.in_flight(), key=urgency)
    chosen = [ticket for ticket in ordered if ticket.is_accepted and due(ticket) >= t][: rules.groups_per_step]
    taken = {ticket.number for ticket in chosen}
    blocking: list[Ticket] = []
    victims: list[int] = []
    surplus: list[int] = []
    pending: deque[Ticket] = deque()
    num_fitting = 0
    for ticket in ordered:
        if ticket.number in taken:
            continue
        num_fitting += 1
        if ticket.is_pending:
            pending.append(ticket)
        if num_fitting <= (due(ticket) - t) * rules.groups_per_step:
            continue
        num_fitting -= 1
        if pending:
            blocking = blocking or list(pending)
            victims.append(pending.popleft().number)
        else:
            surplus.append(ticket.number)
    return _Plan(chosen, blocking, tuple(victims), tuple(surplus))


def _broken_promises(state: RunState) -> tuple[int, ...]:
    """Return accepted tickets with tokens older than their claim promised, although nobody was to be interrupted."""
    if state.rules.max_staleness is None or state.rules.stragglers == "interrupt":
        return ()
    accepted = [
        (t, t.verdict.group) for t in state.in_flight() if t.verdict is not None and t.verdict.group is not None
    ]
    return tuple(t.number for t, group in accepted if 0 <= group.oldest_version < t.floor)


def _consumed(state: RunState, ticket: Ticket) -> Consumed:
    verdict = ticket.verdict
    if verdict is None or verdict.batch is None or verdict.group is None:
        raise ProtocolError(f"ticket {ticket.number} was accepted without naming its batch and group")
    return Consumed(
        ticket=ticket.number,
        attempt=verdict.attempt,
        batch=verdict.batch,
        group=verdict.group,
        deadline=state.deadline(ticket),
    )


def _refused(
    state: RunState, writer: str, tickets: tuple[int, ...], reason: Literal["start"] | RefuseReason, detail: str
) -> Refused:
    return Refused(
        writer=writer,
        tickets=tickets,
        reason=reason,
        detail=detail,
        commit=state.version,
        num_refused=state.num_refused_by_trainers + len(tickets),
    )


def _require_current(state: RunState) -> None:
    behind = state.behind()
    if behind:
        raise ProtocolError(f"this view lags behind in {behind}: read these logs to their ends before deciding")


def _require_version(state: RunState, version: int) -> None:
    if not 0 <= version <= state.version:
        raise ProtocolError(f"version {version} is not among the commits 0..{state.version} of this view")
