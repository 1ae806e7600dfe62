"""What is measured of every step, whatever the algorithm: pure functions of flat tensors on the CPU.

Beside the forward and backward pass of a small step every operation here counts: they are numpy's, whose calls cost a
fraction of torch's. Legend: S samples, N tokens, n tokens of the loss. Names of metrics are declared in
data_contracts/metrics.py.
"""

import math

import numpy as np
from torch import Tensor

from data_contracts.metrics import check_names
from models.step import StepData
from models.tokens import MAX_LOG_RATIO, sequence_lengths, sequence_sum

Metrics = dict[str, float]
Histograms = dict[str, dict[str, float]]

FAR = 2.0
"""Ratios above this, and below its inverse, are counted."""


def effective_sample_size(weights: Tensor) -> float:
    """Return (sum w)^2 / (n sum w^2) of weights [n], in (0, 1]; 0 without any weight."""
    if not weights.numel() or not (weights != 0).any():
        return 0.0
    scaled = weights.double() / weights.max()
    return float(scaled.sum() ** 2 / (scaled.numel() * (scaled**2).sum()))


def sequence_sample_size(log: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int) -> float:
    """Return the effective sample size per sequence of the products of token ratios, from their logs [N]."""
    products = sequence_sum(log, mask, sequence, num_sequences).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return effective_sample_size(products[sequence_lengths(mask, sequence, num_sequences) > 0])


def ratio_metrics(logp: Tensor, behavior: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int) -> Metrics:
    """Measure current over behavior probability on the tokens [N] of the loss."""
    inside = mask.numpy()
    log = _log_ratio(logp, behavior, inside)
    if not len(log):
        return {}
    owner = sequence.numpy()[inside]
    lengths = np.bincount(owner, minlength=num_sequences)
    present = lengths > 0
    sums = np.bincount(owner, log, num_sequences)[present]
    gap = -sums / lengths[present]
    products = np.exp(sums.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    ratio = np.sort(np.exp(log))
    mean, square, square_of_products = _mean(ratio), _mean(ratio**2), _mean(products**2)
    return {
        "policy/ratio_mean": mean,
        "policy/ratio_max": float(ratio[-1]),
        "policy/ratio_min": float(ratio[0]),
        "policy/ratio_p05": _quantile(ratio, 0.05),
        "policy/ratio_p50": _quantile(ratio, 0.5),
        "policy/ratio_p95": _quantile(ratio, 0.95),
        "policy/ess_token": mean**2 / square,
        "policy/ess_sequence": _mean(products) ** 2 / square_of_products,
        "policy/kl_behavior": mean - 1 - _mean(log),
        "policy/second_moment": _mean(log**2),
        "policy/chi2_token": square - 1,
        "policy/chi2_sequence": square_of_products - 1,
        "policy/ratio_above": 1 - float(ratio.searchsorted(FAR, "right")) / len(ratio),
        "policy/ratio_below": float(ratio.searchsorted(1 / FAR, "left")) / len(ratio),
        "policy/log_ppl_gap": _mean(gap),
        "policy/ppl_ratio": _mean(np.exp(gap)),
    }


def lag_metrics(data: StepData, logp: Tensor, mask: Tensor, cut: Tensor) -> Metrics:
    """Measure the tokens [N] of the loss by age, in buckets 0, 1, 2-3, 4-7 and so on; rewards by the oldest token."""
    inside = mask.numpy()
    log = _log_ratio(logp, data.behavior, inside)
    if not len(log):
        return {}
    age = (data.version - data.versions).numpy()
    at, ratio = _bucket(age[inside]), np.exp(log)
    count = np.bincount(at)
    columns = {"ratio_mean": ratio, "kl": ratio - 1 - log, "clip_fraction": cut.numpy()[inside]}
    means = {name: np.bincount(at, values) / np.maximum(count, 1) for name, values in columns.items()}
    means["ratio_max"] = np.zeros(len(count))
    np.maximum.at(means["ratio_max"], at, ratio)
    means["tokens"] = count.astype(np.float64)
    oldest = _oldest(data, age)
    known = oldest >= 0
    of_sample = _bucket(oldest[known])
    samples = np.bincount(of_sample)
    rewards = np.bincount(of_sample, data.rewards.numpy()[known]) / np.maximum(samples, 1)
    return _named("lag", means, count) | _named("lag", {"reward": rewards}, samples)


def _oldest(data: StepData, age: np.ndarray) -> np.ndarray:
    """Return the age of each sample's oldest token [S], -1 where none is 0 or more."""
    oldest = np.full(len(data.samples), -1)
    np.maximum.at(oldest, data.sequence.numpy(), age)
    return oldest


def _bucket(age: np.ndarray) -> np.ndarray:
    """Return the bucket of each age: 0 for 0, then one for every doubling; a negative age counts as 0."""
    return np.frexp(np.maximum(age, 0).astype(np.float64))[1]


def _bucket_name(index: int) -> str:
    low, high = (1 << index) >> 1, (1 << index) - 1
    return str(low) if low >= high else f"{low}-{high}"


def _named(folder: str, columns: dict[str, np.ndarray], count: np.ndarray) -> Metrics:
    found = {index: _bucket_name(index) for index in np.flatnonzero(count).tolist()}
    return {
        f"{folder}/{name}/{bucket}": float(values[index])
        for name, values in columns.items()
        for index, bucket in found.items()
    }


def mismatch_metrics(start_logp: Tensor, behavior: Tensor, same_version: Tensor) -> Metrics:
    """Compare sampler and trainer on tokens [N] that both computed under the same weights."""
    known = same_version.numpy() & ~np.isnan(start_logp.numpy())
    # tokens were drawn from the behavior policy: k3 takes log behavior - log trainer
    difference = _log_ratio(behavior, start_logp, known)
    if not len(difference):
        return {"policy/mismatch_tokens": 0.0}
    mean = _mean(difference)
    return {
        "policy/mismatch_tokens": float(len(difference)),
        "policy/mismatch_k1": mean,
        "policy/mismatch_k3": _mean(np.exp(-difference)) - 1 + mean,
        "policy/mismatch_ratio": math.exp(np.abs(difference).max()),
    }


def staleness_metrics(data: StepData) -> tuple[Metrics, Histograms]:
    """Measure the age of every sampled token, in versions, at consumption."""
    age = (data.version - data.versions).numpy()
    if not age.size:
        return {"staleness/excluded_tokens": 0.0}, {"staleness/tokens": {}, "staleness/samples": {}}
    oldest, fresh = _oldest(data, age), data.fresh.numpy()
    metrics: Metrics = {"staleness/excluded_tokens": float(len(fresh) - fresh.sum())}
    own = ~data.is_reused
    if own.all():
        offered, counted = age[fresh], age
    else:
        is_own = own[data.sequence.numpy()]
        offered, counted = age[fresh & is_own], age[is_own]
        reused = age[fresh & ~is_own]
        metrics |= {"reuse/tokens": float(len(reused)), "reuse/age_max": float(reused.max(initial=0))}
        metrics |= {"staleness/mean": 0.0, "staleness/max": 0.0, "staleness/p95": 0.0}
    if offered.size:
        at = math.ceil(0.95 * (len(offered) - 1))
        metrics |= {
            "staleness/mean": _mean(offered),
            "staleness/max": float(offered.max()),
            "staleness/p95": float(np.partition(offered, at)[at]),
        }
    return metrics, {"staleness/tokens": _count(counted), "staleness/samples": _count(oldest[own & (oldest >= 0)])}


def reward_metrics(data: StepData) -> Metrics:
    """Measure rewards (without those of greedy responses), groups without contrast, and the mean of each component."""
    rewards, group = data.rewards.numpy(), data.group.numpy()
    if not rewards.size:
        return {"reward/mean": 0.0, "reward/std": 0.0, "reward/zero_variance_groups": 0.0}
    low, high = np.full(data.num_groups, np.inf), np.full(data.num_groups, -np.inf)
    np.minimum.at(low, group, rewards)
    np.maximum.at(high, group, rewards)
    sampled = rewards if data.greedy is None else rewards[~data.greedy.numpy()]
    metrics = {
        "reward/mean": _mean(sampled),
        "reward/std": float(sampled.std()) if len(sampled) else 0.0,
        "reward/zero_variance_groups": _mean(low == high),
    }
    named = {name: values.numpy() for name, values in data.components.items()}
    return metrics | {f"reward/component/{n.replace('/', '.')}": _mean(v[~np.isnan(v)]) for n, v in named.items()}


def length_metrics(data: StepData) -> tuple[Metrics, Histograms]:
    """Measure response lengths, by outcome relative to the group's mean reward, and truncation."""
    if not data.samples:
        return {}, {"length/tokens": {}}
    lengths, rewards, group = data.lengths, data.rewards.numpy(), data.group.numpy()
    mean = (np.bincount(group, rewards) / np.maximum(np.bincount(group), 1))[group]
    metrics = {
        "length/mean": _mean(lengths),
        "length/max": float(lengths.max()),
        "length/truncated": _mean(data.is_truncated),
    }
    for name, chosen in (("length/better", rewards > mean), ("length/worse", rewards < mean)):
        if chosen.any():
            metrics[name] = _mean(lengths[chosen])
    doublings = np.frexp(np.maximum(lengths - 1, 0).astype(np.float64))[1]
    return metrics, {"length/tokens": {str(1 << int(d)): n for d, n in _count(doublings).items()}}


@np.errstate(invalid="ignore", over="ignore")  # what is not finite has been reported by who trains on it
def measure(
    data: StepData, logp: Tensor, start_logp: Tensor, proximal: Tensor, entropy: Tensor, cut: Tensor
) -> tuple[Metrics, Histograms]:
    """Measure a whole step on the tokens [N] of `data`.

    Args:
        data: the step.
        logp: under the weights that the token's gradient was taken at; NaN where it was not computed.
        start_logp: under the weights of the step's start; NaN where it was not computed.
        proximal: under the proximal policy.
        entropy: of each token's distribution.
        cut: bool, where the trust region bounded the gradient.

    Raises:
        ContractError: a name is not declared.
    """
    mask = data.mask & ~logp.isnan()
    metrics, histograms = staleness_metrics(data)
    metrics |= ratio_metrics(logp, data.behavior, mask, data.sequence, len(data.samples))
    same = mask & (data.versions == data.version)
    if data.guided is not None:  # another prompt is no mismatch of kernels
        same &= ~data.guided[data.sequence]
    metrics |= mismatch_metrics(start_logp, data.behavior, same)
    metrics |= lag_metrics(data, logp, mask, cut)
    metrics |= reward_metrics(data)
    lengths, length_histogram = length_metrics(data)
    metrics |= lengths
    histograms |= length_histogram
    inside = mask.numpy()
    log = _log_ratio(logp, proximal, inside)
    if len(log):
        metrics["policy/kl_proximal"] = _mean(np.exp(log)) - 1 - _mean(log)
        metrics["policy/entropy"] = _mean(entropy.numpy()[inside].astype(np.float64))
    metrics["train/tokens"] = float(len(log))
    metrics["train/samples"] = float(len(data.samples))
    metrics["train/groups"] = float(data.num_groups)
    check_names(metrics, histograms)
    return metrics, histograms


def _log_ratio(numerator: Tensor, denominator: Tensor, inside: np.ndarray) -> np.ndarray:
    """Return the clamped difference of two log-probabilities on the tokens [n] inside, as float64."""
    difference = numerator.numpy()[inside] - denominator.numpy()[inside]
    return difference.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO).astype(np.float64)


def _mean(values: np.ndarray) -> float:
    """Return the mean; 0 of nothing."""
    return float(np.add.reduce(values, dtype=np.float64)) / max(len(values), 1)


def _quantile(ascending: np.ndarray, share: float) -> float:
    """Return a quantile between the two values next to it."""
    at = share * (len(ascending) - 1)
    low, high = ascending[math.floor(at)], ascending[math.ceil(at)]
    return float(low + (high - low) * (at - math.floor(at)))


def _count(values: np.ndarray) -> dict[str, float]:
    """Return how often each whole number occurs."""
    if not values.size:
        return {}
    least = int(values.min())
    counts = np.bincount(values - least)
    return {str(least + i): float(counts[i]) for i in np.flatnonzero(counts).tolist()}
