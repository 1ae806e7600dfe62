"""Which prompt a ticket gets: prompts are numbered 0, 1, 2, ... and handed out in order, returned ones first.

The trainer folds the claims and its own refusals up to what a commit covers into one small state; the commit
names it, and every claim names the commit whose state it was made under. As long as nothing was returned,
ticket k gets prompt k. How a number becomes a prompt (seed, env, shuffling) is not decided here.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from data_contracts.errors import ProtocolError
from data_contracts.protocol_state import RETURNED, RunState


class Curriculum(BaseModel):
    """What the tickets from `base_ticket` on get, when they are claimed under this state.

    >>> state = Curriculum(base_ticket=10, next_prompt=9, returned=(4,))
    >>> [prompt_number(ticket, state) for ticket in (10, 11, 12)]
    [4, 9, 10]
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    base_ticket: int = 0
    """First ticket that this state speaks of."""
    next_prompt: int = 0
    """First prompt that no ticket had before."""
    returned: tuple[int, ...] = ()
    """Prompts that go first, in this order."""

    @property
    def is_plain(self) -> bool:
        """Whether every ticket gets the prompt of its own number; such a state need not be stored."""
        return not self.returned and self.next_prompt == self.base_ticket


class Handed(NamedTuple):
    """A ticket and the commit whose curriculum state decided its prompt."""

    ticket: int
    curriculum: int


def prompt_number(ticket: int, state: Curriculum | None) -> int:
    """Return the number of the ticket's prompt under the state named by its claim; None: the plain state.

    Raises:
        ProtocolError: the state speaks of later tickets only.
    """
    if state is None:
        return ticket
    index = ticket - state.base_ticket
    if index < 0:
        raise ProtocolError(f"ticket {ticket}: its curriculum state begins at ticket {state.base_ticket}")
    if index < len(state.returned):
        return state.returned[index]
    return state.next_prompt + index - len(state.returned)


def claimed_since_commit(state: RunState) -> list[Handed]:
    """Return the tickets claimed since the newest commit's trainer had looked, in ticket order."""
    return [Handed(n, r.curriculum) for r in state.claim_ranges for n in range(r.first, r.end)]


def returned_since_commit(state: RunState) -> list[Handed]:
    """Return the tickets that trainers refused since then and whose prompts go back, in ticket order."""
    return [
        Handed(t.number, t.curriculum)
        for _, t in sorted(state.tickets.items())
        if t.refused_at is not None
        and t.refused_at >= state.seen["refused"]
        and t.is_claimed
        and not t.is_trained
        and t.refused_reason in RETURNED
    ]


def advance(
    current: Curriculum | None,
    claimed: Iterable[Handed],
    returned: Iterable[Handed],
    states: Mapping[int, Curriculum | None],
) -> Curriculum:
    """Return the state for the next commit.

    Args:
        current: state of the newest commit.
        claimed: tickets claimed since it was computed, in ticket order (see claimed_since_commit).
        returned: tickets dropped since then (see returned_since_commit).
        states: state by commit, for every commit that the handed tickets name.

    A worker may claim under an older state than `current`; what that state gave away is taken as it was, and
    prompts that it passed over are put back, so that no prompt is ever lost. One may then be handed out twice.
    """
    before = current or Curriculum()
    claimed = list(claimed)
    handed = [prompt_number(ticket, states[curriculum]) for ticket, curriculum in claimed]
    next_prompt = max([before.next_prompt, *(prompt + 1 for prompt in handed)])
    queue = [*before.returned, *range(before.next_prompt, next_prompt)]
    gone = set(handed)
    queue = [prompt for prompt in queue if prompt not in gone]
    for ticket, curriculum in returned:
        prompt = prompt_number(ticket, states[curriculum])
        if prompt not in queue:
            queue.append(prompt)
    base_ticket = claimed[-1].ticket + 1 if claimed else before.base_ticket
    return Curriculum(base_ticket=base_ticket, next_prompt=next_prompt, returned=tuple(queue))
