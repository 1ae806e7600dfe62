import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from data_contracts.config import AdaptiveStaleness, RunConfig, StalenessConfig
from data_contracts.protocol import Rules, RunState, decide_claim, room
from data_contracts.protocol_limit import Adaptive, Limit, following_limit
from data_contracts.records import Commit, Consumed, PolicyRef, decode_record, encode_record

RULE = Adaptive("policy/ess_token", low=0.5, high=0.8, lowest=0)
WEIGHTS = PolicyRef(kind="full", objects=(), digest="", dtype="float32", num_parameters=0)


def fold(samples, maximum=4, rule=RULE):
    """Return the limits after commits 1, 2, ... that had these effective sample sizes."""
    limit, found = Limit(maximum, 0), []
    for version, ess in enumerate(samples, start=1):
        metrics = {} if ess is None else {"policy/ess_token": ess}
        limit = following_limit(limit, rule, maximum=maximum, version=version, metrics=metrics)
        found.append(limit.versions)
    return found


def test_bad_data_halve_the_limit_and_good_data_raise_it_by_one_after_a_change_had_time_to_show():
    assert fold([0.1] * 9) == [4, 4, 4, 4, 2, 2, 2, 1, 1]
    assert fold([0.1] * 5 + [0.9] * 8) == [4, 4, 4, 4, 2, 2, 2, 3, 3, 3, 3, 4, 4]
    assert fold([0.6] * 20) == [4] * 20
    assert fold([None] * 20) == [4] * 20


@given(
    samples=st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=60),
    maximum=st.integers(1, 300),
    lowest=st.integers(0, 300),
)
def test_the_limit_never_leaves_its_range(samples, maximum, lowest):
    lowest = min(lowest, maximum)
    rule = Adaptive("policy/ess_token", low=0.5, high=0.8, lowest=lowest)
    assert all(lowest <= limit <= maximum for limit in fold(samples, maximum, rule))


def commit(version, ess, rules):
    consumed = tuple(range((version - 1) * rules.groups_per_step, version * rules.groups_per_step)) if version else ()
    return Commit(
        writer="t", version=version, status="trained" if version else "initial", weights=WEIGHTS, checkpoint_version=0,
        consumed=tuple(make_consumed(n) for n in consumed), num_trained=version * rules.groups_per_step, num_tokens=0,
        positions={"claim": version}, metrics={"policy/ess_token": ess},
    )  # fmt: skip


def make_consumed(ticket):
    batch = {"key": "b", "num_bytes": 1, "sha256": "0", "num_rows": 1}
    group = {"ticket": ticket, "attempt": 0, "first_row": 0, "num_rows": 1}
    return Consumed.model_validate({"ticket": ticket, "attempt": 0, "batch": batch, "group": group})


def test_a_lower_limit_leaves_less_room_and_deadlines_as_they_were():
    rules = Rules(groups_per_step=2, steps=50, max_staleness=4, claim_block=2, adaptive=RULE)
    state = RunState(rules)
    for version in range(6):
        state.apply("commit", version, commit(version, 0.1, rules))
        claim = decide_claim(state, "w", version=version, curriculum=version) if not state.behind() else None
        state.apply("claim", version, claim or next_claim(state, version))
    assert state.effective_staleness == 2
    assert room(state, 5) == (5 + 2 + 1) * 2 - 12
    assert next_claim(state, 5).deadline == 5 + 4


def next_claim(state, version):
    first = state.next_ticket
    record = {"writer": "w", "kind": "claim", "tickets": (first, first + 1), "attempt": 0, "version": version,
              "curriculum": 0, "deadline": state.rules.deadline(version), "next_ticket": first + 2}  # fmt: skip
    from data_contracts.records import Claim

    return Claim.model_validate(record)


@given(samples=st.lists(st.floats(0, 1), min_size=1, max_size=30), cut=st.integers(0, 30))
def test_whoever_has_applied_the_same_commits_has_the_same_limit(samples, cut):
    rules = Rules(groups_per_step=1, steps=50, max_staleness=8, adaptive=RULE)
    one, other = RunState(rules), RunState(rules)
    for version, ess in enumerate(samples):
        record = commit(version, ess, rules)
        one.apply("commit", version, record)
        other.apply("commit", version, decode_record(Commit, encode_record(record)))
        if version == cut:
            other = RunState.from_snapshot(rules, json.loads(json.dumps(other.snapshot())))
    assert one.limit == other.limit


def test_a_run_that_does_not_adapt_keeps_the_snapshots_it_had():
    plain = RunState(Rules(groups_per_step=1, steps=5, max_staleness=2)).snapshot()
    assert "limit" not in plain
    assert "adaptive" not in plain["rules"]


def test_the_rules_come_from_the_config():
    adaptive = AdaptiveStaleness(low=0.3, high=0.6, lowest=1, metric="policy/ess_sequence")
    config = RunConfig(staleness=StalenessConfig(max_staleness=4, adaptive=adaptive))
    assert Rules.of(config).adaptive == Adaptive("policy/ess_sequence", 0.3, 0.6, 1)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_staleness": 0}, "no effect"),
        ({"max_staleness": "unbounded", "max_unsettled": 99}, "no effect"),
        ({"max_staleness": 2, "exact": True}, "one exact age"),
        ({"max_staleness": 2, "adaptive": {"lowest": 2}}, "no effect"),
        ({"max_staleness": 2, "adaptive": {"low": 0.9}}, "rise and fall"),
    ],
)
def test_a_limit_that_could_not_move_is_refused(fields, reason):
    with pytest.raises(ValidationError, match=reason):
        StalenessConfig.model_validate({"adaptive": {}, **fields})


def test_its_example_is_right():
    import doctest

    from data_contracts import protocol_limit

    assert doctest.testmod(protocol_limit).failed == 0
    assert Path(protocol_limit.__file__).name == "protocol_limit.py"
