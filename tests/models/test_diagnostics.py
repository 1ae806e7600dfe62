import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from data_contracts.algorithm import AlgorithmConfig
from data_contracts.metrics import check_names
from models.diagnostics import (
    effective_sample_size,
    lag_metrics,
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
    ratio = (old[mask] - rollout[mask]).exp()
    assert got["policy/mismatch_ratio"] == pytest.approx(max(ratio.max().item(), 1 / ratio.min().item()))


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


def test_more_of_the_mismatch_matches_the_reference(reference):
    expected = reference("diag.mismatch")["expected"]
    got = ratio_metrics(*padded(reference), 3)
    for name, key in {
        "second_moment": "M2",
        "chi2_token": "chi2_token",
        "chi2_sequence": "chi2_seq",
        "ratio_above": "fraction_high",
        "ratio_below": "fraction_low",
        "log_ppl_gap": "log_ppl_diff",
        "ppl_ratio": "ppl_ratio",
    }.items():
        assert got[f"policy/{name}"] == pytest.approx(expected[key], rel=1e-6), name


def test_lag_buckets_equal_a_loop(make_groups):
    """Ages 0, 1, 2 and 3, 4 to 7, ... by the token; rewards by the sample's oldest token."""
    ages = [[0, 0, 3], [1, 6], [2, 2], [9]]
    groups = [
        [
            replace(
                s,
                response_ids=np.ones(len(age), np.int32),
                action_mask=np.ones(len(age), bool),
                behavior_logprobs=np.full(len(age), -1.0, np.float32),
                policy_versions=np.array([12 - a for a in age]),
                reward=float(len(age)),
            )
            for s, age in zip(group, ages[2 * i : 2 * i + 2], strict=True)
        ]
        for i, group in enumerate(make_groups(2, 2))
    ]
    data = step_data(groups, AlgorithmConfig(), version=12, max_staleness=8)
    flat = [a for age in ages for a in age]
    logp = data.behavior + torch.arange(len(flat)) / 10
    cut = torch.arange(len(flat)) % 2 == 0
    got = lag_metrics(data, logp, data.mask, cut)

    def name(age):
        low = 1 << (age.bit_length() - 1) if age else 0
        return str(low) if low < 2 else f"{low}-{2 * low - 1}"

    for bucket in {name(a) for a in flat if a <= 8}:
        own = [i for i, a in enumerate(flat) if name(a) == bucket and a <= 8]
        ratios = [math.exp(i / 10) for i in own]
        assert got[f"lag/tokens/{bucket}"] == len(own)
        assert got[f"lag/ratio_mean/{bucket}"] == pytest.approx(sum(ratios) / len(own), rel=1e-5)
        assert got[f"lag/ratio_max/{bucket}"] == pytest.approx(max(ratios), rel=1e-5)
        assert got[f"lag/kl/{bucket}"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / len(own), rel=1e-4)
        assert got[f"lag/clip_fraction/{bucket}"] == sum(i % 2 == 0 for i in own) / len(own)
    assert "lag/tokens/8-15" not in got  # too old for the loss
    rewards = {n: v for n, v in got.items() if n.startswith("lag/reward/")}
    assert rewards == {"lag/reward/2-3": 2.5, "lag/reward/4-7": 2.0, "lag/reward/8-15": 1.0}


def test_everything_measured_is_declared_and_finite(make_groups):
    data = step_data(make_groups(3, 3, version=2), AlgorithmConfig(), version=2, max_staleness=0)
    logp = data.behavior - 0.1
    metrics, histograms = measure(data, logp, logp, data.behavior, torch.ones_like(logp), torch.zeros_like(data.mask))
    check_names(metrics, histograms)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["policy/mismatch_k1"] == pytest.approx(0.1)
    assert metrics["policy/kl_proximal"] == pytest.approx(math.exp(-0.1) - 1 + 0.1, rel=1e-4)


def test_a_step_without_samples_can_be_measured():
    data = step_data([], AlgorithmConfig(), version=0, max_staleness=0)
    nothing = torch.zeros(0)
    metrics, _ = measure(data, nothing, nothing, nothing, nothing, nothing.bool())
    assert metrics["train/tokens"] == 0.0
