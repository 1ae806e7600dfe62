"""What the trainer does next: train, wait, refuse, recover, or make way for another trainer."""

from collections import deque
from collections.abc import Iterable
from typing import Literal, NamedTuple

from data_contracts.errors import ProtocolError
from data_contracts.protocol_state import RunState
from data_contracts.protocol_ticket import Ticket
from data_contracts.records import Consumed, Refused

RefuseReason = Literal["unreadable", "digest", "contract", "dropped", "timeout", "overbooked"]


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
    state.require_current()
    if state.trainer == writer:
        return None
    return _refused(state, writer, (), "start", "")


def decide_refuse(
    state: RunState, writer: str, tickets: Iterable[int], reason: RefuseReason, detail: str = ""
) -> Refused | None:
    """Refuse those of the tickets that are in flight; None when there are none."""
    state.require_current()
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
    state.require_current()
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
    plan = plan_step(state)
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


def ready_groups(state: RunState) -> tuple[Consumed, ...]:
    """Return the accepted groups that are likely to be in the next step, so that they can be fetched meanwhile."""
    return tuple(_consumed(state, ticket) for ticket in plan_step(state).chosen)


class Plan(NamedTuple):
    """What earliest deadline first would do now."""

    chosen: list[Ticket]
    """Accepted groups to train, at most B."""
    blocking: list[Ticket]
    """Pending tickets of which at least one must settle or move before the chosen ones may be trained."""
    victims: tuple[int, ...]
    """Fewest pending tickets without which the rest would fit."""
    surplus: tuple[int, ...]
    """Accepted tickets that cannot fit, whatever happens."""


def plan_step(state: RunState) -> Plan:
    """Return which groups the next step would take, and what is in its way."""
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
    return Plan(chosen, blocking, tuple(victims), tuple(surplus))


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
