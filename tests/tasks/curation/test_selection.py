"""Selections by reward: high-contrast pairs, and as many failures as passes."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_contracts.config import BalanceRule, ContrastRule, CurateConfig
from data_contracts.records import Joined
from tasks.curation.chain import judge, verdict_of
from tasks.curation.duplicates import Recent
from tasks.curation.group import Group
from tasks.curation.selection import balance, contrast
from tests.tasks.curation.build_group import BATCH, different, group_of

REWARDS = st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=16).map(np.array)


@given(rewards=REWARDS, keep=st.floats(0.01, 1))
def test_the_pairs_that_differ_most_stay(rewards: np.ndarray, keep: float) -> None:
    kept = contrast(rewards, ContrastRule(keep=keep))
    pairs = rewards.size // 2
    assert kept.sum() == 2 * int(np.ceil(keep * pairs))
    if kept.any() and not kept.all():
        middle = rewards[~kept]
        assert rewards[kept].max() >= middle.max()
        assert rewards[kept].min() <= middle.min()
    if kept.any() and rewards.min() < rewards.max():
        assert rewards[kept].min() < rewards[kept].max(), "what was to be learned from is still there"


@given(rewards=REWARDS)
def test_where_few_pass_all_of_them_stay_and_as_many_others(rewards: np.ndarray) -> None:
    kept, passed = balance(rewards, BalanceRule()), rewards >= 0.5
    assert kept[passed].all()
    few = 0 < 2 * passed.sum() < rewards.size
    assert kept[~passed].sum() == (passed.sum() if few else (~passed).sum())


def group(rewards: list[float], joined: list[float] = ()) -> Group:  # pyright: ignore[reportArgumentType]
    changes: dict[int, dict[str, Any]] = {i: {"reward": reward} for i, reward in enumerate(rewards)}
    made = group_of(different(len(rewards)), changes)
    if not joined:
        return made
    earlier = Joined(
        ticket=9, batch=BATCH, rows=tuple(range(len(joined))), rewards=tuple(joined), oldest_version=0, max_age=4
    )
    return Group(made.ref.model_copy(update={"joined": (earlier,)}), made.rows, made.places)


def test_a_selection_chooses_among_joined_rows_too() -> None:
    config = CurateConfig.model_validate({"rules": [{"type": "balance"}]})
    outcome = judge(group([0.0, 1.0], joined=[0.0, 0.0, 0.0, 0.0]), config, Recent(()))
    verdict = verdict_of(outcome, BATCH)
    assert verdict.accepted
    assert verdict.group is not None
    assert verdict.group.left_out == ()
    assert verdict.group.joined == (), "the earlier samples were not needed"
    outcome = judge(group([1.0, 1.0], joined=[0.0, 0.0, 0.0, 0.0, 0.0]), config, Recent(()))
    assert outcome.kept.ref.joined[0].rows == (0, 1)


def test_rows_of_earlier_tickets_count_for_what_a_group_needs() -> None:
    config = CurateConfig.model_validate({"min_samples": 4, "drop_zero_variance": True})
    assert judge(group([0.0, 0.0]), config, Recent(())).why.startswith("too_few_good_rows")
    assert judge(group([0.0, 0.0], joined=[0.0, 0.0]), config, Recent(())).why == "zero_variance"
    verdict = verdict_of(judge(group([0.0, 0.0], joined=[0.0, 1.0]), config, Recent(())), BATCH)
    assert verdict.accepted
    assert verdict.reward_mean == 0.25


def test_low_contrast_rows_are_left_out_and_counted() -> None:
    config = CurateConfig.model_validate({"rules": [{"type": "contrast", "keep": 0.5}]})
    verdict = verdict_of(judge(group([1.0, 0.6, 0.4, 0.0]), config, Recent(())), BATCH)
    assert verdict.group is not None
    assert verdict.group.left_out == (1, 2)
    assert verdict.metrics["left_out/contrast"] == 2.0
