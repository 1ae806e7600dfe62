"""Which prompt a ticket gets, with and without returned ones."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.curriculum import (
    Curriculum,
    Handed,
    advance,
    claimed_since_commit,
    prompt_number,
    returned_since_commit,
)
from data_contracts.errors import ProtocolError
from data_contracts.protocol import Rules, RunState, decide_claim, decide_refuse, decide_start
from data_contracts.records import BatchRef, Commit, Consumed, Curated, GroupRef, PolicyRef, Verdict


def hand(first: int, end: int, curriculum: int = 0) -> list[Handed]:
    return [Handed(n, curriculum) for n in range(first, end)]


def test_without_returns_a_ticket_gets_the_prompt_of_its_number():
    assert [prompt_number(n, None) for n in range(4)] == [0, 1, 2, 3]
    assert [prompt_number(n, Curriculum()) for n in range(4)] == [0, 1, 2, 3]
    state = advance(None, hand(0, 5), [], {0: None})
    assert state == Curriculum(base_ticket=5, next_prompt=5)
    assert state.is_plain
    assert advance(state, [], [], {}) == state


def test_returned_prompts_go_first_and_the_others_follow_without_a_gap():
    state = advance(None, hand(0, 5), hand(1, 3), {0: None})
    assert state == Curriculum(base_ticket=5, next_prompt=5, returned=(1, 2))
    assert not state.is_plain
    assert [prompt_number(n, state) for n in range(5, 9)] == [1, 2, 5, 6]
    later = advance(state, hand(5, 6, 1), [], {1: state})
    assert later == Curriculum(base_ticket=6, next_prompt=5, returned=(2,))
    last = advance(later, hand(6, 9, 2), [], {2: later})
    assert last == Curriculum(base_ticket=9, next_prompt=7)
    assert not last.is_plain, "two tickets were spent without a new prompt"
    assert prompt_number(9, last) == 7


def test_a_prompt_that_is_dropped_again_is_returned_again_behind_those_that_wait():
    state = Curriculum(base_ticket=5, next_prompt=5, returned=(1, 2, 3))
    again = advance(state, hand(5, 6, 1), hand(5, 6, 1), {1: state})
    assert again.returned == (2, 3, 1)


def test_a_claim_under_an_older_state_loses_no_prompt():
    old = None
    new = advance(old, hand(0, 4), hand(0, 1), {0: old})
    assert new == Curriculum(base_ticket=4, next_prompt=4, returned=(0,))
    claimed = [Handed(4, 0), Handed(5, 1)]  # the first of them did not know that prompt 0 had come back
    state = advance(new, claimed, [], {0: old, 1: new})
    assert [prompt_number(4, old), prompt_number(5, new)] == [4, 4]
    assert state == Curriculum(base_ticket=6, next_prompt=5, returned=(0,))


def test_prompts_that_an_older_state_passed_over_are_put_back():
    state = Curriculum(base_ticket=4, next_prompt=4, returned=(0,))
    assert advance(state, [Handed(4, 0), Handed(5, 0)], [], {0: None}).returned == (0,)
    assert advance(state, [Handed(4, 1), Handed(5, 0)], [], {0: None, 1: state}).returned == (4,)


def test_a_state_does_not_speak_of_earlier_tickets():
    with pytest.raises(ProtocolError, match="ticket 3: its curriculum state begins at ticket 4"):
        prompt_number(3, Curriculum(base_ticket=4, next_prompt=4))


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lag=st.integers(0, 3),
    dropped=st.floats(0, 0.9),
)
def test_no_prompt_is_ever_lost_and_without_lag_none_is_handed_out_twice(seed, lag, dropped):
    rnd = random.Random(seed)
    states: list[Curriculum | None] = [None]
    next_ticket, open_tickets, prompts = 0, [], {}
    returned_to_queue: set[int] = set()
    for _ in range(rnd.randint(1, 12)):
        newest = len(states) - 1
        claimed = []
        for _ in range(rnd.randint(0, 5)):
            version = max(0, newest - rnd.randint(0, lag))
            claimed.append(Handed(next_ticket, version))
            prompts[next_ticket] = prompt_number(next_ticket, states[version])
            next_ticket += 1
        open_tickets += claimed
        back = [h for h in open_tickets if rnd.random() < dropped]
        open_tickets = [h for h in open_tickets if h not in back]
        returned_to_queue |= {h.ticket for h in back}
        states.append(advance(states[-1], claimed, back, dict(enumerate(states))))
        kept = Counter(prompts[n] for n in prompts if n not in returned_to_queue)
        state = states[-1]
        assert state is not None
        assert set(kept) | set(state.returned) >= set(range(state.next_prompt))
        assert len(set(state.returned)) == len(state.returned)
        if lag == 0:
            assert sorted([*kept.elements(), *state.returned]) == list(range(state.next_prompt))
        assert prompt_number(next_ticket + 100, state) >= state.next_prompt


# --- read from the protocol's state ---

WEIGHTS = PolicyRef(kind="full", objects=(), digest="", dtype="float32", num_parameters=0)


def commit(state: RunState, *tickets: int) -> None:
    version = state.version + 1
    batch = BatchRef(key="", num_bytes=1, sha256="", num_rows=1)
    groups = [GroupRef(ticket=n, attempt=0, first_row=0, num_rows=1) for n in tickets]
    record = Commit(
        writer="trainer",
        version=version,
        status="trained" if version else "initial",
        consumed=tuple(Consumed(ticket=g.ticket, attempt=0, batch=batch, group=g) for g in groups),
        weights=WEIGHTS,
        checkpoint_version=0,
        positions={**state.next} if version else {},
        num_trained=version,
        num_tokens=0,
    )
    state.apply("commit", version, record)


def refuse(state: RunState, ticket: int, reason: str) -> None:
    record = decide_refuse(state, "trainer", [ticket], reason)
    state.apply("refused", state.next["refused"], record)


def test_claims_and_drops_are_those_that_the_newest_commits_trainer_had_not_seen():
    state = RunState(Rules(groups_per_step=1, steps=9, max_staleness=8, claim_block=4))
    commit(state)
    state.apply("refused", 0, decide_start(state, "trainer"))
    state.apply("claim", 0, decide_claim(state, "w", version=0, curriculum=0))
    for ticket, reason in [(0, "dropped"), (1, "unreadable"), (2, "contract")]:
        refuse(state, ticket, reason)
    assert claimed_since_commit(state) == hand(0, 4)
    assert returned_since_commit(state) == hand(0, 2), "a broken promise is not the prompt's bad luck"
    commit(state, 3)
    assert claimed_since_commit(state) == returned_since_commit(state) == []
    state.apply("claim", 1, decide_claim(state, "w", version=1, curriculum=1))
    refuse(state, 5, "timeout")
    assert claimed_since_commit(state) == hand(4, 8, 1)
    assert returned_since_commit(state) == [Handed(5, 1)]


def test_the_prompt_of_a_ticket_that_was_trained_after_all_is_not_returned():
    state = RunState(Rules(groups_per_step=1, steps=9, max_staleness=8, claim_block=2))
    commit(state)
    state.apply("refused", 0, decide_start(state, "trainer"))
    state.apply("claim", 0, decide_claim(state, "w", version=0, curriculum=0))
    refuse(state, 0, "unreadable")
    assert returned_since_commit(state) == [Handed(0, 0)]
    record = Curated(writer="c", verdicts=(Verdict(ticket=0, accepted=True),), covers={}, num_accepted=1, num_refused=0)
    state.apply("curated", 0, record)
    zombie = state.next["refused"]
    state.next["refused"] = 0  # the trainer of this commit had not seen the refusal
    commit(state, 0)
    state.next["refused"] = zombie
    assert returned_since_commit(state) == []
