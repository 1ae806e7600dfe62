"""The whole fold from one commit's curriculum state to the next one's."""

from collections.abc import Mapping

from data_contracts.curriculum import (
    Curriculum,
    Handed,
    Place,
    advance,
    claimed_since_commit,
    judged_since_commit,
    place_of,
    returned_since_commit,
)
from data_contracts.curriculum_config import FromPool
from data_contracts.protocol_state import RunState
from data_contracts.reuse import Drawing, Memory, News, interleave, learn
from data_contracts.samplers import View, rank_pool


def first_state(drawing: Drawing) -> Curriculum | None:
    """Return the state that version 0 names; None where every ticket gets the prompt of its own number."""
    if not isinstance(drawing.config.sampler, FromPool):
        return None
    return _fill(Curriculum(is_pool=True), [], Memory(), drawing, 0)


def commits_named(state: RunState) -> set[int]:
    """Return the commits whose states `next_state` asks for, the newest one included."""
    handed = (*claimed_since_commit(state), *returned_since_commit(state))
    return {state.version, *(ticket.curriculum for ticket in handed)}


def next_state(state: RunState, states: Mapping[int, Curriculum | None], drawing: Drawing) -> Curriculum:
    """Return the state that the commit after the newest one names.

    Args:
        state: the trainer's view when it chose the groups of that commit.
        states: curriculum state by commit (see commits_named); None for a plain one.
        drawing: the run's rules.
    """
    version = state.version + 1
    claimed, returned = claimed_since_commit(state), returned_since_commit(state)
    current = states[state.version]
    if current is None or current.is_plain:  # which need not be stored, and then does not know how far it has come
        base = state.next_ticket - len(claimed)
        current = Curriculum(base_ticket=base, next_prompt=base)
    following = advance(current, claimed, returned, states)
    if drawing.config.is_plain:
        return following
    places = {handed.ticket: place_of(handed.ticket, states[handed.curriculum]) for handed in claimed}
    known = {**current.open, **places}
    refused = frozenset(t.number for t in state.tickets.values() if t.refused_at is not None)
    memory = learn(current, News(known, tuple(judged_since_commit(state)), refused), drawing, version)
    pending = [ticket.number for ticket in state.in_flight() if ticket.is_pending and ticket.number in known]
    following = following.model_copy(
        update={"open": {number: known[number] for number in pending}, "offered": current.offered}
    )
    is_pool = isinstance(drawing.config.sampler, FromPool)
    first = _returned_to_pool(returned, states) if is_pool else list(following.returned)
    return _fill(following.model_copy(update={"is_pool": is_pool}), first, memory, drawing, version)


def _returned_to_pool(returned: list[Handed], states: Mapping[int, Curriculum | None]) -> list[int]:
    places = [place_of(handed.ticket, states[handed.curriculum]) for handed in returned]
    return list(dict.fromkeys(place.prompt for place in places if not place.is_copy))


def _fill(state: Curriculum, first: list[int], memory: Memory, drawing: Drawing, version: int) -> Curriculum:
    """Return the state with its queue filled anew and all that is remembered.

    Args:
        state: positions, and what is open.
        first: prompts that go before all others.
        memory: what is remembered by now.
        drawing: the run's rules.
        version: commit that will name the state.
    """
    sampler, next_prompt = drawing.config.sampler, state.next_prompt
    places = [Place(prompt=prompt) for prompt in first]
    if isinstance(sampler, FromPool):
        known = {prompt: belief.now(version, drawing.config.difficulty) for prompt, belief in memory.difficulty.items()}
        ready = {p: s for p, s in memory.parts.items() if drawing.may_offer(s, state, version)}
        view = View(
            known,
            drawing.config.difficulty,
            frozenset(place.prompt for place in state.open.values()),
            ready,
            version,
            drawing.random(version),
        )
        places += [place for place in rank_pool(sampler, view) if place.prompt not in set(first)]
        places, next_prompt = places[: drawing.horizon], 0
    elif drawing.config.reuse is not None:
        more = max(drawing.horizon - len(places), 0)
        places += [Place(prompt=prompt) for prompt in range(next_prompt, next_prompt + more)]
        next_prompt += more
    places = interleave(places, state, memory, drawing, version)
    return state.model_copy(update=_queue(places, state, memory, version) | {"next_prompt": next_prompt})


def _queue(places: list[Place], state: Curriculum, memory: Memory, version: int) -> dict[str, object]:
    named = {index: place.source for index, place in enumerate(places) if place.source is not None}
    alive = {source.ticket for source in (*memory.kept, *memory.parts.values())}
    offered = {ticket: at for ticket, at in state.offered.items() if ticket in alive}
    return {
        "returned": tuple(place.prompt for place in places),
        "samples": {index: place.samples for index, place in enumerate(places) if place.samples},
        "sources": {index: source for index, source in named.items() if not places[index].is_copy},
        "copies": {index: source for index, source in named.items() if places[index].is_copy},
        "difficulty": memory.difficulty,
        "kept": tuple(memory.kept),
        "successes": memory.successes,
        "parts": memory.parts,
        "offered": offered | {source.ticket: version for source in named.values()},
    }
