"""What a rollout worker may claim, take over, move to newer weights and give up."""

from collections.abc import Iterable, Sequence
from typing import Literal

from data_contracts.protocol_leases import Lease
from data_contracts.protocol_state import RunState
from data_contracts.protocol_ticket import Ticket
from data_contracts.protocol_train import plan_step
from data_contracts.records import Claim


def room(state: RunState, version: int) -> int:
    """Return how many tickets a worker that holds the weights of `version` may claim; 0 or less: none.

    (version + eta + 1) * B + settled without training - claimed, and never beyond what the remaining steps
    need or beyond `max_unsettled` tickets in flight. Where eta adapts it is the one in force, at most the bound.
    """
    rules, limit = state.rules, state.effective_staleness
    last = rules.steps
    if limit is not None:
        last = min(last, version + limit + 1)
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
    state.require_current()
    state.require_version(version)
    state.require_version(curriculum)
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
    state.require_current()
    state.require_version(version)
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
    state.require_current()
    state.require_version(version)
    if state.rules.stragglers != "interrupt":
        return None
    plan = plan_step(state)
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
