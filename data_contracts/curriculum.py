"""Which prompt a ticket gets, and what is known of prompts: a fold over claims and verdicts, part of every commit.

The trainer folds the claims, the verdicts and its own refusals up to what a commit covers into one state; the commit
names it, and every claim names the commit whose state it was made under. So what a ticket gets is a function of
committed state alone: whoever works on it, however often, after any restart.

The state is a queue of prompt numbers, one for each ticket from `base_ticket` on. With prompts in order the queue holds
those that were returned, and the order goes on behind it: as long as nothing was returned, ticket k gets prompt k. A
sampler that draws from a pool fills the queue anew at every commit (data_contracts/samplers.py). Some places of the
queue go to earlier groups instead of a prompt (data_contracts/reuse.py). How a number becomes a prompt (seed, env,
shuffling) is not decided here.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from data_contracts.difficulty import Difficulty
from data_contracts.errors import ProtocolError
from data_contracts.frozen import Frozen
from data_contracts.protocol_state import RETURNED, RunState
from data_contracts.records import BatchRef, GroupRef, Verdict


class Source(Frozen):
    """An earlier ticket's group, to be used again."""

    ticket: int
    prompt: int
    """Prompt number."""
    batch: BatchRef
    group: GroupRef
    score: float = 0.0
    """Spread of its rewards."""
    uses: int = 0
    """How often it was handed out again."""

    @property
    def oldest_version(self) -> int:
        """Oldest version that sampled a token of it, joined rows included."""
        return min([self.group.oldest_version, *(joined.oldest_version for joined in self.group.joined)])


class Place(Frozen):
    """What one ticket gets."""

    prompt: int
    """Prompt number."""
    samples: int = 0
    """Samples of its group; 0: samples_per_group."""
    source: Source | None = None
    """Earlier group: copied, or joined with the samples of this ticket."""
    is_copy: bool = False
    """Whether the ticket gets a copy of `source` and nothing is sampled."""


class Curriculum(Frozen):
    """What the tickets from `base_ticket` on get, when they are claimed under this state.

    >>> state = Curriculum(base_ticket=10, next_prompt=9, returned=(4,))
    >>> [prompt_number(ticket, state) for ticket in (10, 11, 12)]
    [4, 9, 10]
    """

    base_ticket: int = 0
    """First ticket that this state speaks of."""
    next_prompt: int = 0
    """First prompt that no ticket had before and that is not in the queue."""
    returned: tuple[int, ...] = ()
    """The queue: prompts that go first, in this order."""
    is_pool: bool = False
    """Whether the queue is all there is, and begins again where it ends."""
    samples: dict[int, int] = {}
    """Place in the queue to the samples of its group, where they are not samples_per_group."""
    sources: dict[int, Source] = {}
    """Place in the queue to an earlier group that the ticket's own samples are joined with."""
    copies: dict[int, Source] = {}
    """Place in the queue to an earlier group that the ticket gets instead of a prompt."""
    open: dict[int, Place] = {}
    """Ticket to what it was given, while it waits for its verdict; empty where verdicts are not remembered."""
    difficulty: dict[int, Difficulty] = {}
    """Prompt number to what is believed of it; the others are unknown."""
    kept: tuple[Source, ...] = ()
    """Groups that may be used again, largest score first."""
    successes: dict[int, Source] = {}
    """Prompt number to the newest group of it in which a sample passed, for hard prompts."""
    parts: dict[int, Source] = {}
    """Prompt number to the samples drawn so far of a group that is sampled in parts."""
    offered: dict[int, int] = {}
    """Ticket of an earlier group to the newest commit whose queue names it."""

    @property
    def is_plain(self) -> bool:
        """Whether every ticket gets the prompt of its own number and nothing is remembered: it need not be stored."""
        return self == Curriculum(base_ticket=self.base_ticket, next_prompt=self.base_ticket)


class Handed(NamedTuple):
    """A ticket and the commit whose curriculum state decided its prompt."""

    ticket: int
    curriculum: int


def place_of(ticket: int, state: Curriculum | None) -> Place:
    """Return what the ticket gets under the state named by its claim; None: the plain state.

    Raises:
        ProtocolError: the state speaks of later tickets only.
    """
    if state is None:
        return Place(prompt=ticket)
    index = ticket - state.base_ticket
    if index < 0:
        raise ProtocolError(f"ticket {ticket}: its curriculum state begins at ticket {state.base_ticket}")
    if index < len(state.returned):
        copy = state.copies.get(index)
        source = copy or state.sources.get(index)
        return Place(
            prompt=state.returned[index],
            samples=state.samples.get(index, 0),
            source=source,
            is_copy=copy is not None,
        )
    if state.is_pool:
        # More tickets than a queue was made for: its prompts once more, whole groups of their own.
        return Place(prompt=state.returned[index % len(state.returned)])
    return Place(prompt=state.next_prompt + index - len(state.returned))


def prompt_number(ticket: int, state: Curriculum | None) -> int:
    """Return the number of the ticket's prompt (see place_of)."""
    return place_of(ticket, state).prompt


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


def judged_since_commit(state: RunState) -> list[Verdict]:
    """Return the verdicts that the newest commit's trainer had not seen, in ticket order."""
    return [
        t.verdict
        for _, t in sorted(state.tickets.items())
        if t.is_claimed and t.verdict is not None and t.verdict_at >= state.seen["curated"]
    ]


def advance(
    current: Curriculum | None,
    claimed: Iterable[Handed],
    returned: Iterable[Handed],
    states: Mapping[int, Curriculum | None],
) -> Curriculum:
    """Return the state for the next commit of prompts in order, with nothing remembered.

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
    places = [place_of(ticket, states[curriculum]) for ticket, curriculum in claimed]
    handed = [place.prompt for place in places if not place.is_copy]
    next_prompt = max([before.next_prompt, *(prompt + 1 for prompt in handed)])
    waiting = [prompt for index, prompt in enumerate(before.returned) if index not in before.copies]
    queue = [*waiting, *range(before.next_prompt, next_prompt)]
    gone = set(handed)
    queue = [prompt for prompt in queue if prompt not in gone]
    for ticket, curriculum in returned:
        place = place_of(ticket, states[curriculum])
        if place.prompt not in queue and not place.is_copy:
            queue.append(place.prompt)
    base_ticket = claimed[-1].ticket + 1 if claimed else before.base_ticket
    return Curriculum(base_ticket=base_ticket, next_prompt=next_prompt, returned=tuple(queue))
