import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from data_contracts.algorithm import AlgorithmConfig
from data_contracts.metrics import check_names
from models.diagnostics import (
    effective_sample_size,
    length_metrics,
    measure,
    mismatch_metrics,
    ratio_metrics,
    reward_metrics,
    staleness_metrics,
)
from models.step import step_data


def padded(reference):
    inputs = reference("diag.mismatch")["inputs"]
    mask = torch.tensor(inputs["mask"]).bool().reshape(-1)
    old = torch.tensor(inputs["logp_old"], dtype=torch.float64).reshape(-1)
    rollout = torch.tensor(inputs["logp_rollout"], dtype=torch.float64).reshape(-1)
    return old, rollout, mask, torch.arange(3).repeat_interleave(4)


def test_ratio_metrics_match_the_reference(reference):
    expected = reference("diag.mismatch")["expected"]
    got = ratio_metrics(*padded(reference), 3)
    assert got["policy/ratio_mean"] == pytest.approx(expected["ratio_mean"])
    assert got["policy/ratio_max"] == pytest.approx(expected["ratio_max"])
    assert got["policy/ess_sequence"] == pytest.approx(expected["vcpo_seq_ess_ratio"])


def test_token_sample_size_matches_the_reference(reference):
    old, rollout, mask, _ = padded(reference)
    clamped = (old - rollout)[mask].exp().clamp(0.5, 2.0)
    want = reference("diag.mismatch")["expected"]["verl_token_ess"]
    assert effective_sample_size(clamped) == pytest.approx(want)


def test_mismatch_matches_the_reference(reference):
    old, rollout, mask, _ = padded(reference)
    expected = reference("diag.mismatch")["expected"]
    got = mismatch_metrics(old, rollout, mask)
    assert got["policy/mismatch_k1"] == pytest.approx(expected["kl_k1"])
    assert got["policy/mismatch_k3"] == pytest.approx(expected["kl_k3"])
    assert got["policy/mismatch_tokens"] == 9


def test_mismatch_is_measured_at_equal_version_only(reference):
    old, rollout, mask, _ = padded(reference)
    assert mismatch_metrics(old, rollout, torch.zeros_like(mask)) == {"policy/mismatch_tokens": 0.0}


@pytest.mark.parametrize(
    ("weights", "want"), [([1.0, 1.0, 1.0], 1.0), ([1.0, 1.0, 4.0], 36 / 54), ([0.0, 0.0, 5.0], 1 / 3), ([], 0.0)]
)
def test_sample_size_by_hand(weights, want):
    assert effective_sample_size(torch.tensor(weights)) == pytest.approx(want)


def test_staleness_counts_tokens_and_samples(make_groups, reference):
    case = reference("diag.mismatch")
    lags = np.array(case["inputs"]["version_lag"])
    sample = replace(
        make_groups(1, 1)[0][0],
        response_ids=np.ones(len(lags), int),
        action_mask=np.ones(len(lags), bool),
        behavior_logprobs=np.full(len(lags), -1.0, np.float32),
        policy_versions=9 - lags,
    )
    data = step_data([[sample]], AlgorithmConfig(), version=9, max_staleness=2)
    metrics, histograms = staleness_metrics(data)
    assert histograms == {
        "staleness/tokens": {"0": 2.0, "1": 3.0, "2": 1.0, "4": 1.0},
        "staleness/samples": {"4": 1.0},
    }
    assert metrics["staleness/excluded_tokens"] == 1.0
    assert metrics["staleness/max"] == 2.0
    assert metrics["staleness/mean"] == pytest.approx(5 / 6)


def test_rewards_and_lengths_by_hand(make_groups):
    groups = make_groups(2, 2, tools=False)
    lengths = [3, 5, 4, 4]
    rewards = [1.0, 0.0, 0.5, 0.5]
    samples = [
        replace(
            s,
            response_ids=np.ones(n, int),
            action_mask=np.ones(n, bool),
            behavior_logprobs=np.full(n, -1.0, np.float32),
            policy_versions=np.zeros(n, int),
            reward=r,
            finish_reason="length" if n == 5 else "stop",
            components={"exact": r},
        )
        for s, n, r in zip([s for g in groups for s in g], lengths, rewards, strict=True)
    ]
    data = step_data([samples[:2], samples[2:]], AlgorithmConfig(), version=0, max_staleness=0)
    got = reward_metrics(data)
    assert got["reward/mean"] == 0.5
    assert got["reward/std"] == pytest.approx(math.sqrt(0.125))
    assert got["reward/zero_variance_groups"] == 0.5
    assert got["reward/component/exact"] == 0.5
    metrics, histograms = length_metrics(data)
    assert (metrics["length/better"], metrics["length/worse"]) == (3.0, 5.0)
    assert metrics["length/truncated"] == 0.25
    assert histograms["length/tokens"] == {"4": 3.0, "8": 1.0}


def test_everything_measured_is_declared_and_finite(make_groups):
    data = step_data(make_groups(3, 3, version=2), AlgorithmConfig(), version=2, max_staleness=0)
    logp = data.behavior - 0.1
    metrics, histograms = measure(data, logp, logp, data.behavior, torch.ones_like(logp))
    check_names(metrics, histograms)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["policy/mismatch_k1"] == pytest.approx(0.1)
    assert metrics["policy/kl_proximal"] == pytest.approx(math.exp(-0.1) - 1 + 0.1, rel=1e-4)


def test_a_step_without_samples_can_be_measured():
    data = step_data([], AlgorithmConfig(), version=0, max_staleness=0)
    nothing = torch.zeros(0)
    metrics, _ = measure(data, nothing, nothing, nothing, nothing)
    assert metrics["train/tokens"] == 0.0
