"""What is measured of every step, whatever the algorithm: pure functions of flat tensors.

Legend: S samples, N tokens. Names of metrics are declared in data_contracts/metrics.py.
"""

import numpy as np
import torch
from torch import Tensor

from data_contracts.metrics import check_names
from models.regularizers import kl_estimate
from models.step import StepData
from models.tokens import MAX_LOG_RATIO, log_ratio, sequence_lengths, sequence_mean, sequence_sum

Metrics = dict[str, float]

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
    if not mask.any():
        return {}
    log = log_ratio(logp, behavior, mask).double()
    ratio = log.exp()[mask]
    low, middle, high = np.quantile(ratio.numpy(), (0.05, 0.5, 0.95)).tolist()  # torch.quantile ends at 2^24 elements
    products = sequence_sum(log, mask, sequence, num_sequences).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    present = sequence_lengths(mask, sequence, num_sequences) > 0
    products = products[present]
    gap = -sequence_mean(log, mask, sequence, num_sequences)[present]
    return {
        "policy/ratio_mean": ratio.mean().item(),
        "policy/ratio_max": ratio.max().item(),
        "policy/ratio_min": ratio.min().item(),
        "policy/ratio_p05": low,
        "policy/ratio_p50": middle,
        "policy/ratio_p95": high,
        "policy/ess_token": effective_sample_size(ratio),
        "policy/ess_sequence": effective_sample_size(products),
        "policy/kl_behavior": kl_estimate(-log[mask], "k3").mean().item(),
        "policy/second_moment": (log[mask] ** 2).mean().item(),
        "policy/chi2_token": (ratio**2).mean().item() - 1,
        "policy/chi2_sequence": (products**2).mean().item() - 1,
        "policy/ratio_above": (ratio > FAR).double().mean().item(),
        "policy/ratio_below": (ratio < 1 / FAR).double().mean().item(),
        "policy/log_ppl_gap": gap.mean().item(),
        "policy/ppl_ratio": gap.exp().mean().item(),
    }


def lag_metrics(data: StepData, logp: Tensor, mask: Tensor, cut: Tensor) -> Metrics:
    """Measure the tokens [N] of the loss by age, in buckets 0, 1, 2-3, 4-7 and so on; rewards by the oldest token."""
    if not mask.any():
        return {}
    at = _bucket((data.version - data.versions)[mask])
    log = log_ratio(logp, data.behavior, mask).double()[mask]
    ratio = log.exp()
    count = torch.bincount(at)
    columns = {"ratio_mean": ratio, "kl": kl_estimate(-log, "k3"), "clip_fraction": cut[mask].double()}
    means = {name: torch.bincount(at, values) / count.clamp(min=1) for name, values in columns.items()}
    means["ratio_max"] = torch.zeros(len(count), dtype=torch.float64).scatter_reduce(0, at, ratio, "amax")
    metrics = _named("lag", means, count) | {
        f"lag/tokens/{_bucket_name(i)}": float(n) for i, n in enumerate(count) if n
    }
    oldest = torch.full((len(data.samples),), -1).scatter_reduce(0, data.sequence, data.version - data.versions, "amax")
    known = oldest >= 0
    of_sample = _bucket(oldest[known])
    samples = torch.bincount(of_sample)
    rewards = torch.bincount(of_sample, data.rewards[known]) / samples.clamp(min=1)
    return metrics | _named("lag", {"reward": rewards}, samples)


def _bucket(age: Tensor) -> Tensor:
    """Return the bucket of each age: 0 for 0, then one for every doubling; a negative age counts as 0."""
    return torch.where(age > 0, age.clamp(min=1).double().log2().floor().long() + 1, torch.zeros_like(age))


def _bucket_name(index: int) -> str:
    low, high = (1 << index) >> 1, (1 << index) - 1
    return str(low) if low >= high else f"{low}-{high}"


def _named(folder: str, columns: dict[str, Tensor], count: Tensor) -> Metrics:
    return {
        f"{folder}/{name}/{_bucket_name(index)}": values[index].item()
        for name, values in columns.items()
        for index in torch.nonzero(count)[:, 0].tolist()
    }


def mismatch_metrics(start_logp: Tensor, behavior: Tensor, same_version: Tensor) -> Metrics:
    """Compare sampler and trainer on tokens [N] that both computed under the same weights."""
    known = same_version & ~start_logp.isnan()
    if not known.any():
        return {"policy/mismatch_tokens": 0.0}
    # tokens were drawn from the behavior policy: k3 takes log behavior - log trainer
    difference = log_ratio(behavior, start_logp, known).double()[known]
    return {
        "policy/mismatch_tokens": float(known.sum()),
        "policy/mismatch_k1": difference.mean().item(),
        "policy/mismatch_k3": kl_estimate(difference, "k3").mean().item(),
        "policy/mismatch_ratio": difference.abs().max().exp().item(),
    }


def staleness_metrics(data: StepData) -> tuple[Metrics, dict[str, dict[str, float]]]:
    """Measure the age of every sampled token, in versions, at consumption."""
    age = data.version - data.versions
    if not age.numel():
        return {"staleness/excluded_tokens": 0.0}, {"staleness/tokens": {}, "staleness/samples": {}}
    oldest = torch.full((len(data.samples),), -1).scatter_reduce(0, data.sequence, age, "amax")
    is_reused = torch.tensor([sample.max_age is not None for sample in data.samples])[data.sequence]
    metrics: Metrics = {"staleness/excluded_tokens": float((~data.fresh).sum())}
    if is_reused.any():
        metrics["reuse/tokens"] = float((is_reused & data.fresh).sum())
        metrics["reuse/age_max"] = float(age[is_reused & data.fresh].max()) if metrics["reuse/tokens"] else 0.0
        metrics |= {"staleness/mean": 0.0, "staleness/max": 0.0, "staleness/p95": 0.0}
    offered = age[data.fresh & ~is_reused]
    if offered.numel():
        metrics |= {
            "staleness/mean": offered.double().mean().item(),
            "staleness/max": float(offered.max()),
            "staleness/p95": float(np.quantile(offered.numpy(), 0.95, method="higher")),
        }
    is_own = torch.tensor([sample.max_age is None for sample in data.samples]) & (oldest >= 0)
    return metrics, {"staleness/tokens": _count(age[~is_reused]), "staleness/samples": _count(oldest[is_own])}


def reward_metrics(data: StepData) -> Metrics:
    """Measure rewards, groups without contrast, and the mean of each named component."""
    rewards, size = data.rewards, max(len(data.samples), 1)
    low = torch.full((data.num_groups,), torch.inf, dtype=torch.float64).scatter_reduce(0, data.group, rewards, "amin")
    high = torch.full((data.num_groups,), -torch.inf, dtype=torch.float64).scatter_reduce(
        0, data.group, rewards, "amax"
    )
    metrics = {
        "reward/mean": rewards.sum().item() / size,
        "reward/std": ((rewards - rewards.mean()) ** 2).mean().sqrt().item() if len(data.samples) else 0.0,
        "reward/zero_variance_groups": (low == high).double().mean().item() if data.num_groups else 0.0,
    }
    named: dict[str, list[float]] = {}
    for sample in data.samples:
        for name, value in sample.components.items():
            named.setdefault(name, []).append(value)
    return metrics | {f"reward/component/{name.replace('/', '.')}": sum(v) / len(v) for name, v in named.items()}


def length_metrics(data: StepData) -> tuple[Metrics, dict[str, dict[str, float]]]:
    """Measure response lengths, by outcome relative to the group's mean reward, and truncation."""
    if not data.samples:
        return {}, {"length/tokens": {}}
    lengths = torch.tensor([len(s.response_ids) for s in data.samples], dtype=torch.float64)
    total = torch.zeros(data.num_groups, dtype=torch.float64).index_add(0, data.group, data.rewards)
    mean = (total / torch.bincount(data.group, minlength=data.num_groups))[data.group]
    truncated = sum(s.finish_reason == "length" for s in data.samples)
    metrics = {
        "length/mean": lengths.mean().item(),
        "length/max": lengths.max().item(),
        "length/truncated": truncated / len(data.samples),
    }
    for name, chosen in (("length/better", data.rewards > mean), ("length/worse", data.rewards < mean)):
        if chosen.any():
            metrics[name] = lengths[chosen].mean().item()
    ends = 2 ** lengths.clamp(min=1).log2().ceil().long()
    return metrics, {"length/tokens": _count(ends)}


def measure(
    data: StepData, logp: Tensor, start_logp: Tensor, proximal: Tensor, entropy: Tensor, cut: Tensor
) -> tuple[Metrics, dict[str, dict[str, float]]]:
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
    if mask.any():
        metrics["policy/kl_proximal"] = kl_estimate(log_ratio(proximal, logp, mask).double()[mask], "k3").mean().item()
        metrics["policy/entropy"] = entropy[mask].double().mean().item()
    metrics["train/tokens"] = float(mask.sum())
    metrics["train/samples"] = float(len(data.samples))
    metrics["train/groups"] = float(data.num_groups)
    check_names(metrics, histograms)
    return metrics, histograms


def _count(values: Tensor) -> dict[str, float]:
    found, counts = torch.unique(values, return_counts=True)
    return {str(int(v)): float(c) for v, c in zip(found, counts, strict=True)}
