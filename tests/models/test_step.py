from dataclasses import replace

import numpy as np
import pytest

from data_contracts.algorithm import AlgorithmConfig, Gdpo
from data_contracts.metrics import check_names
from models.diagnostics import staleness_metrics
from models.step import step_data


def test_only_sampled_tokens_count(make_groups):
    groups = make_groups(2, 3)
    data = step_data(groups, AlgorithmConfig(), version=0, max_staleness=0)
    acted = [int(s.action_mask.sum()) for group in groups for s in group]
    assert np.diff(data.offsets).tolist() == acted
    assert data.mask.all()
    assert not data.behavior.isnan().any()
    assert data.sequence.bincount().tolist() == acted


@pytest.mark.parametrize(("bound", "kept"), [(0, [3]), (1, [2, 3]), (3, [0, 2, 3]), (None, [0, 2, 3])])
def test_tokens_older_than_the_bound_leave_the_loss(make_groups, bound, kept):
    sample = replace(
        make_groups(1, 1)[0][0],
        response_ids=np.arange(4),
        action_mask=np.array([True, False, True, True]),
        behavior_logprobs=np.array([-1, np.nan, -1, -1], np.float32),
        policy_versions=np.array([0, -1, 2, 3]),
    )
    data = step_data([[sample]], AlgorithmConfig(), version=3, max_staleness=bound)
    assert data.versions[data.mask].tolist() == kept
    assert len(data.versions) == 3


def test_a_sample_may_have_an_age_bound_of_its_own(make_groups):
    ((fresh, reused, stale),) = make_groups(1, 3)
    reused, stale = replace(reused, max_age=3), replace(stale, max_age=2)
    fresh = replace(fresh, policy_versions=np.where(fresh.action_mask, 3, -1))
    data = step_data([[fresh, reused, stale]], AlgorithmConfig(), version=3, max_staleness=0)
    assert data.mask[data.sequence < 2].all()
    assert not data.mask[data.sequence == 2].any()
    metrics, histograms = staleness_metrics(data)
    assert (metrics["staleness/max"], metrics["reuse/age_max"]) == (0.0, 3.0)
    assert metrics["reuse/tokens"] == reused.action_mask.sum()
    assert set(histograms["staleness/tokens"]) == {"0"}
    check_names(metrics, histograms)


def test_truncated_responses_can_be_masked_but_their_rewards_count(make_groups):
    groups = make_groups(1, 3)
    groups[0] = [replace(s, reward=r) for s, r in zip(groups[0], (1.0, 0.0, 0.0), strict=True)]
    groups[0][0] = replace(groups[0][0], finish_reason="length")
    data = step_data(groups, AlgorithmConfig(truncated="mask"), version=0, max_staleness=0)
    assert not data.mask[data.sequence == 0].any()
    assert data.mask[data.sequence != 0].all()
    assert (data.advantages[data.sequence == 1] < 0).all()


def test_a_token_batch_renumbers_its_samples(make_groups):
    data = step_data(make_groups(2, 3), AlgorithmConfig(), version=0, max_staleness=0)
    at = data.tokens_of([4, 1])
    values = data.behavior[at]
    batch = data.token_batch([4, 1], at, values, values, values)
    assert batch.num_sequences == 2
    assert batch.sequence.unique_consecutive().tolist() == [0, 1]
    assert batch.rewards.tolist() == data.rewards[[4, 1]].tolist()
    assert (data.sequence[at] == 4).sum() == (batch.sequence == 0).sum()


def test_reward_components_reach_the_advantage(make_groups):
    groups = [[replace(s, components={"a": float(i == 0)}) for i, s in enumerate(g)] for g in make_groups(2, 3)]
    data = step_data(groups, AlgorithmConfig(advantage=Gdpo()), version=0, max_staleness=0)
    assert data.advantages[0] > 0 > data.advantages[-1]
