"""A group goes through the configured rules in order; every row or group that leaves does so with a reason."""

from typing import Any, get_args

import numpy as np
import pytest

from data_contracts import config as configs
from data_contracts.config import CurateConfig
from data_contracts.errors import ConfigError
from tasks.curation.chain import RULES, SELECTIONS, judge, verdict_of
from tasks.curation.duplicates import Recent
from tasks.curation.group import Group
from tests.tasks.curation.build_group import BATCH, different, group_of


def send(group: Group, *rules: dict[str, Any], **fields: Any):
    config = CurateConfig.model_validate({"rules": rules, **fields})
    return judge(group, config, Recent(config.rules))


def odd_rewards(group: Group, least: float) -> np.ndarray:
    return group.of(group.rows.reward) < least


def one_too_many(group: Group) -> np.ndarray:
    return np.ones(group.places.size + 1, bool)


def test_every_configurable_rule_has_a_function() -> None:
    union, _ = get_args(configs.CurateRule)
    assert set(get_args(union)) == set(RULES) | set(SELECTIONS)


def test_a_group_that_breaks_no_rule_is_accepted_whole() -> None:
    outcome = send(group_of(different(4)), {"type": "repetition"}, {"type": "duplicates"}, {"type": "length"})
    verdict = verdict_of(outcome, BATCH)
    assert (verdict.accepted, verdict.reason, verdict.reward_mean) == (True, "", 0.5)
    assert verdict.group is not None
    assert verdict.group.left_out == ()


def test_rows_are_left_out_by_each_rule_in_turn_and_counted_by_rule() -> None:
    responses = different(5)
    responses[1] = [7] * 40
    responses[3] = responses[0]
    group = group_of(responses, {4: {"finish_reason": "length"}})
    rules = [{"type": "repetition"}, {"type": "duplicates"}, {"type": "truncation"}]
    verdict = verdict_of(send(group, *rules), BATCH)
    assert verdict.accepted
    assert verdict.group is not None
    assert verdict.group.left_out == (1, 3, 4)
    assert verdict.reward_mean == 0.0  # rows 0 and 2
    assert verdict.metrics == {
        "good_rows": 2.0, "left_out/repetition": 1.0, "left_out/duplicates": 1.0, "left_out/truncation": 1.0,
    }  # fmt: skip


def test_a_group_left_with_too_few_rows_is_refused_and_says_what_took_them() -> None:
    group = group_of(different(3), {0: {"finish_reason": "length"}, 1: {"finish_reason": "length"}})
    outcome = send(group, {"type": "truncation"})
    assert outcome.why == "too_few_good_rows: expected at least 2, got 1, 2 left out by truncation"
    assert not verdict_of(outcome, BATCH).accepted


@pytest.mark.parametrize(("max_share", "is_refused"), [(0.0, True), (0.25, False), (0.24, True)])
def test_a_rule_that_refuses_does_so_beyond_its_share_of_rows(max_share: float, is_refused: bool) -> None:
    group = group_of(different(4), {2: {"finish_reason": "length"}})
    outcome = send(group, {"type": "truncation", "then": "refuse", "max_share": max_share})
    assert bool(outcome.why) is is_refused
    assert outcome.kept.places.size == 4


def test_failed_rows_are_never_judged_and_too_few_good_ones_refuse_the_group() -> None:
    failed = {"finish_reason": "error", "error": "out of memory", "reward": float("nan"), "reward_error": "no response"}
    group = group_of(different(3), {0: failed, 1: failed})
    assert group.places.tolist() == [2]
    assert send(group).why == "too_few_good_rows: expected at least 2, got 1"
    assert send(group, min_samples=1).why == ""


def test_equal_rewards_are_refused_only_when_asked_for() -> None:
    group = group_of(different(2), {1: {"reward": 0.0}})
    assert send(group).why == ""
    assert send(group, drop_zero_variance=True).why == "zero_variance"
    assert send(group_of(different(2)), drop_zero_variance=True).why == ""


def test_leaving_rows_out_can_take_the_variance_away() -> None:
    group = group_of(different(3), {1: {"finish_reason": "length"}})
    assert send(group, {"type": "truncation"}, drop_zero_variance=True).why == "zero_variance"


def test_a_rule_of_ones_own_marks_rows() -> None:
    path = f"{__name__}:odd_rewards"
    outcome = send(group_of(different(4)), {"type": "custom", "path": path, "parameters": {"least": 0.5}})
    assert outcome.left_out == {"custom": [0, 2]}


@pytest.mark.parametrize(
    ("path", "says"), [("no.such:rule", "cannot be imported"), (f"{__name__}:one_too_many", "expected 4 bools")]
)
def test_a_rule_of_ones_own_that_is_missing_or_wrong_is_named(path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        send(group_of(different(4)), {"type": "custom", "path": path})
