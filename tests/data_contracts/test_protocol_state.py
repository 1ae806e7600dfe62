"""The fold: what it refuses, what it forgets, what it keeps."""

import json
import math

import pytest

from data_contracts.errors import ProtocolError
from data_contracts.protocol_state import LOGS, RunState
from data_contracts.protocol_ticket import Rules
from data_contracts.records import (
    BatchRef,
    Claim,
    Commit,
    Consumed,
    Curated,
    GroupRef,
    PolicyRef,
    Refused,
    Verdict,
)

RULES = Rules(groups_per_step=1, steps=5, max_staleness=2)
WEIGHTS = PolicyRef(kind="full", objects=(), digest="", dtype="float32", num_parameters=0)
BATCH = BatchRef(key="batch", num_bytes=1, sha256="", num_rows=1)


def claim(*tickets: int, **fields) -> Claim:
    fields = {"kind": "claim", "attempt": 0, "version": 0, "curriculum": 0, "deadline": 2, **fields}
    return Claim(writer="worker", tickets=tickets, **{"next_ticket": max(tickets, default=-1) + 1, **fields})


def group(ticket: int) -> GroupRef:
    return GroupRef(ticket=ticket, attempt=0, first_row=0, num_rows=1, oldest_version=0)


def curated(accepted: tuple[int, ...] = (), refused: tuple[int, ...] = (), **fields) -> Curated:
    verdicts = [Verdict(ticket=n, accepted=True, batch=BATCH, group=group(n)) for n in accepted]
    verdicts += [Verdict(ticket=n, accepted=False, reason="taste") for n in refused]
    fields = {"covers": {}, "num_accepted": 0, "num_refused": 0, **fields}
    return Curated(writer="curator", verdicts=tuple(verdicts), **fields)


def refused(*tickets: int, **fields) -> Refused:
    fields = {"writer": "trainer", "reason": "unreadable", "commit": 0, "num_refused": 0, **fields}
    return Refused(tickets=tickets, **fields)


def start(writer: str = "trainer", commit: int = 0) -> Refused:
    return refused(writer=writer, reason="start", commit=commit)


def commit(version: int, *tickets: int, seen: tuple[int, int, int] = (0, 0, 0), **fields) -> Commit:
    consumed = tuple(Consumed(ticket=n, attempt=0, batch=BATCH, group=group(n)) for n in tickets)
    positions = {} if version == 0 else dict(zip(LOGS, (*seen, version), strict=True))
    fields = {"status": "trained" if version else "initial", "num_trained": version, **fields}
    return Commit(
        writer="trainer",
        version=version,
        consumed=consumed,
        positions=positions,
        weights=WEIGHTS,
        checkpoint_version=0,
        num_tokens=0,
        **fields,
    )


def fold(*records, rules: Rules = RULES) -> RunState:
    """Apply records of any logs in the given order."""
    state = RunState(rules)
    for record in records:
        log = {Claim: "claim", Curated: "curated", Refused: "refused", Commit: "commit"}[type(record)]
        state.apply(log, state.next[log], record)
    return state


# --- records that contradict each other ---


def test_records_are_applied_in_order():
    state = fold(commit(0), claim(0))
    with pytest.raises(ProtocolError, match="log claim: expected record 1, got 0"):
        state.apply("claim", 0, claim(0))
    with pytest.raises(ProtocolError, match="log claim: expected record 1, got 2"):
        state.apply("claim", 2, claim(1))
    with pytest.raises(ProtocolError, match="log claim: record 1: expected Claim, got Commit"):
        state.apply("claim", 1, commit(1))
    assert state == fold(commit(0), claim(0)), "what was refused has changed nothing"


@pytest.mark.parametrize(
    "record",
    [
        claim(2),
        claim(0),
        claim(1, 3, next_ticket=4),
        claim(1, attempt=1),
        claim(1, next_ticket=3),
        claim(next_ticket=1),
    ],
    ids=["gap", "again", "hole", "attempt", "next", "none"],
)
def test_a_claim_takes_the_next_tickets_and_no_others(record):
    with pytest.raises(ProtocolError, match=r"record 1 claims .* but 1 is the next free ticket"):
        fold(commit(0), claim(0), record)


@pytest.mark.parametrize("kind", ["reclaim", "rebase", "give_up"])
def test_nobody_continues_a_ticket_that_was_never_issued(kind):
    with pytest.raises(ProtocolError, match="but 1 is the next free one"):
        fold(commit(0), claim(0), claim(1, kind=kind, attempt=1, next_ticket=1))
    with pytest.raises(ProtocolError, match="but 1 is the next free one"):
        fold(commit(0), claim(0), claim(0, kind=kind, attempt=1, next_ticket=2))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (commit(2, 0), "commit 1: says version 2"),
        (commit(1, 0, status="initial"), "commit 1: says version 1 and status initial"),
        (commit(1), r"commit 1: expected 1 different tickets, got \[\]"),
        (commit(1, 0, 1), r"commit 1: expected 1 different tickets, got \[0, 1\]"),
        (commit(1, 0, num_trained=2), "commit 1: expected num_trained 1, got 2"),
    ],
)
def test_a_commit_that_is_not_the_next_step_is_refused(record, message):
    with pytest.raises(ProtocolError, match=message):
        fold(commit(0), claim(0, 1), curated((0, 1)), record)


def test_the_first_commit_is_the_initial_one():
    with pytest.raises(ProtocolError, match="commit 0: says version 0 and status trained"):
        fold(commit(0, status="trained"))


def test_no_commit_follows_the_last_step():
    rules = Rules(groups_per_step=1, steps=1, max_staleness=0)
    with pytest.raises(ProtocolError, match="commit 2: the run has 1 steps"):
        fold(commit(0), claim(0), claim(1), commit(1, 0), commit(2, 1), rules=rules)


def test_a_ticket_is_trained_at_most_once():
    begin = (commit(0), claim(0, 1, 2, 3), start(), curated((0, 1, 2, 3)), commit(1, 0, seen=(1, 1, 1)))
    with pytest.raises(ProtocolError, match="commit 2: ticket 0 was settled before"):
        fold(*begin, commit(2, 0, seen=(1, 1, 1)))
    begin = (*begin, commit(2, 1, seen=(1, 1, 1)), commit(3, 2, seen=(1, 1, 1)))
    assert 0 not in fold(*begin).tickets
    with pytest.raises(ProtocolError, match="commit 4: ticket 0 was settled before"):
        fold(*begin, commit(4, 0, seen=(1, 1, 1)))


def test_what_curation_refused_is_never_trained():
    with pytest.raises(ProtocolError, match="commit 1: ticket 0 was settled before"):
        fold(commit(0), claim(0), curated(refused=(0,)), commit(1, 0))
    with pytest.raises(ProtocolError, match="ticket 0: trained by commit 1, refused by curation"):
        fold(commit(0), claim(0), commit(1, 0), curated(refused=(0,)))


def test_a_commit_knows_at_least_what_the_one_before_it_knew():
    begin = (commit(0), claim(0, 1), start(), curated((0, 1)), commit(1, 0, seen=(1, 1, 1)))
    with pytest.raises(ProtocolError, match="commit 2: its trainer had applied 0 records of refused"):
        fold(*begin, commit(2, 1, seen=(1, 1, 0)))


def test_a_refusal_knows_at_least_the_commits_that_the_one_before_it_knew():
    begin = (commit(0), start(commit=0), commit(1, 0), start("second", commit=1))
    with pytest.raises(ProtocolError, match="record 2 knew commit 0, the one before it 1"):
        fold(*begin, start("third", commit=0))


# --- first words and totals ---


def test_a_first_verdict_is_never_undone():
    state = fold(commit(0), claim(0, 1), curated((0,), (1,)), curated((1,), (0,)))
    assert state.tickets[0].is_accepted
    assert state.tickets[1].is_refused
    assert state.account() == (2, 0, 1, 1)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_a_ticket_refused_by_both_counts_once_in_whatever_order_one_learns_of_it(order):
    facts = [claim(0, 1), curated((1,), (0,)), start()]
    state = fold(commit(0), *(facts[i] for i in order), refused(0))
    assert state.account() == (2, 0, 1, 1)
    assert state == fold(commit(0), *facts, refused(0))


def test_a_view_that_knows_more_of_a_ticket_than_its_claim_lags_behind():
    state = fold(commit(0), curated((3,)))
    assert state.behind() == ["claim"]
    assert state.account() == (0, 0, 0, 0)
    state.apply("claim", 0, claim(0, 1, 2))
    assert state.behind() == ["claim"]
    state.apply("claim", 1, claim(3))
    assert state.behind() == []
    assert [t.number for t in state.in_flight() if t.is_accepted] == [3]


def test_totals_come_from_the_newest_records():
    state = fold(
        commit(0),
        claim(0, 1),
        start(),
        curated((0,), num_accepted=1, num_refused=0, covers={"a": 2}),
        curated((), (1,), num_accepted=1, num_refused=1, covers={"b": 1}),
        refused(0, num_refused=1),
    )
    assert (state.num_accepted_by_curation, state.num_refused_by_curation, state.num_refused_by_trainers) == (1, 1, 1)
    assert state.covers == {"a": 2, "b": 1}


def test_what_is_covered_is_never_uncovered():
    state = fold(commit(0), curated(covers={"a": 2}), curated(covers={"a": 1, "b": 1}))
    assert state.covers == {"a": 2, "b": 1}


def test_a_ticket_is_given_up_by_its_newest_attempt_only():
    begin = (commit(0), claim(0), claim(0, kind="reclaim", attempt=1, next_ticket=1))
    assert not fold(*begin, claim(0, kind="give_up", attempt=0, next_ticket=1)).tickets[0].given_up
    state = fold(*begin, claim(0, kind="give_up", attempt=1, next_ticket=1))
    assert state.tickets[0].given_up
    state.apply("claim", 3, claim(0, kind="reclaim", attempt=2, next_ticket=1))
    assert state.tickets[0].attempt == 1, "nobody takes over what was given up"


# --- forgetting ---


def test_a_view_that_learns_of_the_claims_last_comes_to_the_same():
    rest = (start(), curated((0, 1), (2,)), commit(1, 0, seen=(1, 1, 1)), commit(2, 1, seen=(1, 1, 1)))
    last, first = fold(commit(0), *rest, claim(0, 1, 2)), fold(commit(0), claim(0, 1, 2), *rest)
    assert last == first
    assert last.account() == (3, 2, 1, 0)
    assert list(last.tickets) == [1]


def test_a_trained_ticket_is_kept_until_no_refusal_can_follow():
    begin = (commit(0), claim(0, 1), start(), curated((0, 1)), commit(1, 0, seen=(1, 1, 1)))
    assert 0 in fold(*begin).tickets
    ahead = fold(*begin, commit(2, 1, seen=(1, 1, 2)))
    assert 0 in ahead.tickets, "the next trainer has seen a refusal that this view has not"
    assert ahead.behind() == ["refused"]
    ahead.apply("refused", 1, start("second", commit=1))
    assert 0 not in ahead.tickets


def test_a_refused_ticket_is_kept_until_no_commit_can_follow():
    begin = (commit(0), claim(0, 1, 2), start(), curated((1, 2)), refused(0))
    assert 0 in fold(*begin).tickets
    assert 0 in fold(*begin, commit(1, 1, seen=(1, 1, 1))).tickets, "that trainer had not seen the refusal"
    assert 0 not in fold(*begin, commit(1, 1, seen=(1, 1, 2))).tickets


def test_what_curation_refused_is_kept_until_the_next_commit():
    begin = (commit(0), claim(0, 1), start(), curated((1,), (0,)))
    assert 0 in fold(*begin).tickets
    assert 0 not in fold(*begin, commit(1, 1, seen=(1, 1, 1))).tickets


def test_later_words_on_a_forgotten_ticket_change_nothing():
    state = fold(commit(0), claim(0, 1, 2), start(), curated((1, 2)), refused(0), commit(1, 1, seen=(1, 1, 2)))
    before = state.account()
    assert 0 not in state.tickets
    state.apply("curated", 1, curated((0,)))
    state.apply("refused", 2, refused(0, commit=1))
    state.apply("claim", 1, claim(0, kind="reclaim", attempt=1, next_ticket=3))
    assert state.account() == before
    assert 0 not in state.tickets


# --- snapshots ---


def full_state() -> RunState:
    return fold(
        commit(0),
        claim(0, 1, 2, 3, 4),
        claim(3, kind="reclaim", attempt=1, next_ticket=5),
        claim(4, kind="give_up", next_ticket=5),
        start(),
        curated((0, 1), (2,), covers={"worker": 3}, num_accepted=2, num_refused=1),
        refused(3, num_refused=1),
        commit(1, 0, seen=(1, 1, 1)),
        claim(5, version=1, curriculum=1),
        refused(7, commit=1),
    )


def test_a_snapshot_is_json_and_says_everything():
    state = full_state()
    again = RunState.from_snapshot(RULES, json.loads(json.dumps(state.snapshot())))
    assert again == state
    assert again.tickets == state.tickets
    for record in (claim(6, 7), commit(2, 1, seen=(4, 1, 3)), curated((), (5,))):
        log = {Claim: "claim", Curated: "curated", Commit: "commit"}[type(record)]
        for each in (state, again):
            each.apply(log, each.next[log], record)
    assert again == state
    assert again.account() == state.account() == (8, 2, 4, 2)


def test_a_snapshot_knows_what_is_still_to_be_waited_for():
    begin = (commit(0), claim(0, 1), start(), curated((0, 1)), commit(1, 0, seen=(1, 1, 1)))
    ahead = fold(*begin, commit(2, 1, seen=(1, 1, 2)))
    again = RunState.from_snapshot(RULES, json.loads(json.dumps(ahead.snapshot())))
    for state in (ahead, again):
        state.apply("refused", 1, start("second", commit=1))
    assert 0 not in again.tickets
    assert again == ahead


def test_a_snapshot_shares_nothing_with_the_state():
    state = full_state()
    value = state.snapshot()
    before = json.dumps(value)
    state.apply("curated", 1, curated((), (5,), covers={"worker": 9}))
    state.apply("claim", 4, claim(5, kind="reclaim", attempt=1, version=1, next_ticket=6))
    assert json.dumps(value) == before
    again = RunState.from_snapshot(RULES, value)
    again.apply("claim", 4, claim(5, kind="reclaim", attempt=1, version=1, next_ticket=6))
    assert json.dumps(value) == before


def test_a_snapshot_keeps_numbers_that_are_not_finite():
    verdict = Verdict(ticket=0, accepted=True, batch=BATCH, group=group(0), metrics={"loss": math.nan})
    record = Curated(writer="c", verdicts=(verdict,), covers={}, num_accepted=1, num_refused=0)
    state = fold(commit(0), claim(0), record)
    text = json.dumps(state.snapshot(), allow_nan=False)
    again = RunState.from_snapshot(RULES, json.loads(text))
    assert again == state
    kept = again.tickets[0].verdict
    assert kept is not None and math.isnan(kept.metrics["loss"])


def test_a_snapshot_of_another_run_or_format_is_refused():
    value = full_state().snapshot()
    with pytest.raises(ProtocolError, match="snapshot: expected format 1 and rules"):
        RunState.from_snapshot(Rules(groups_per_step=1, steps=6, max_staleness=2), value)
    with pytest.raises(ProtocolError, match="got format 2"):
        RunState.from_snapshot(RULES, {**value, "format": 2})


def test_states_are_equal_when_they_say_the_same():
    assert full_state() == full_state()
    assert full_state() != fold(commit(0))
    assert full_state() != "a state"
