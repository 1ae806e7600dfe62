"""Between the behavior and the proximal policy: where the proximal one comes from, weights, and filters.

All of them are constants: no gradient flows through them.

Legend: S sequences, N tokens.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from data_contracts.algorithm import (
    AdaptiveWeights,
    BehaviorProximal,
    EwmaProximal,
    FailureVeto,
    InterpolatedProximal,
    KlMaskedWeights,
    MaskedWeights,
    MomentMaskedWeights,
    NoWeights,
    OffContextWeights,
    OffPolicySequenceMask,
    RecomputedProximal,
    SnapshotProximal,
    TopEntropy,
    TruncatedWeights,
    Veto,
)
from models.regularizers import kl_estimate
from models.tokens import (
    MAX_LOG_RATIO,
    TokenBatch,
    before,
    log_ratio,
    select,
    sequence_lengths,
    sequence_mean,
    sequence_sum,
    to_rows,
)


def none(batch: TokenBatch, cfg: NoWeights) -> tuple[Tensor, Tensor]:
    """Return weights of 1 and the mask as it is."""
    del cfg
    return torch.ones_like(batch.behavior), batch.mask


def truncated(batch: TokenBatch, cfg: TruncatedWeights) -> tuple[Tensor, Tensor]:
    """Return the ratio between floor and cap by token or sequence, perhaps by the update's mean; the mask as it is."""
    weights = ratio_of(batch, cfg.level).clamp(cfg.floor, cfg.cap)
    if not cfg.normalize or not batch.mask.any():
        return weights, batch.mask
    if cfg.level == "token":
        return weights / weights[batch.mask].mean(), batch.mask
    each = sequence_mean(weights, batch.mask, batch.sequence, batch.num_sequences)
    counted = sequence_lengths(batch.mask, batch.sequence, batch.num_sequences) > 0
    return weights / each[counted].mean(), batch.mask


def masked(batch: TokenBatch, cfg: MaskedWeights) -> tuple[Tensor, Tensor]:
    """Return the ratio by token or sequence, and the mask without what lies outside the band.

    The number of tokens that a mean divides by stays that before the masking.
    """
    ratio = ratio_of(batch, cfg.level)
    kept = batch.mask & (ratio >= cfg.low) & (ratio <= cfg.high)
    return ratio if cfg.weight == "ratio" else torch.ones_like(ratio), kept


def kl_masked(batch: TokenBatch, cfg: KlMaskedWeights) -> tuple[Tensor, Tensor]:
    """Return the ratio or 1 by token, and the mask without what diverges too far."""
    log = log_ratio(batch.proximal.detach(), batch.behavior, batch.mask)
    found = kl_estimate(-log, cfg.estimator)
    if cfg.over == "sum":
        found = sequence_sum(found, batch.mask, batch.sequence, batch.num_sequences)[batch.sequence]
    elif cfg.over == "mean":
        found = sequence_mean(found, batch.mask, batch.sequence, batch.num_sequences)[batch.sequence]
    elif cfg.over == "max":
        lowest = torch.full((batch.num_sequences,), -math.inf, dtype=found.dtype, device=found.device)
        inside = torch.where(batch.mask, found, torch.full_like(found, -math.inf))
        found = lowest.scatter_reduce(0, batch.sequence, inside, "amax")[batch.sequence]
    kept = batch.mask & (found <= cfg.high)
    if cfg.low is not None:
        kept &= found >= cfg.low
    return log.exp() if cfg.weight == "ratio" else torch.ones_like(log), kept


def moment_masked(batch: TokenBatch, cfg: MomentMaskedWeights) -> tuple[Tensor, Tensor]:
    """Return the ratio or 1 by token, and the mask without the largest log-ratios."""
    log = log_ratio(batch.proximal.detach(), batch.behavior, batch.mask)
    places = torch.nonzero(batch.mask)[:, 0]
    moments, order = (log[places].double() ** 2).sort(stable=True)
    means = moments.cumsum(0) / torch.arange(1, len(moments) + 1, device=moments.device)
    number = max(int((means < cfg.limit).sum()), 1)  # means of ever larger values rise
    kept = torch.zeros_like(batch.mask)
    kept[places[order[:number]]] = True
    return log.exp() if cfg.weight == "ratio" else torch.ones_like(batch.behavior), kept


def off_context(batch: TokenBatch, cfg: OffContextWeights) -> tuple[Tensor, Tensor]:
    """Return the ratio between low and high where the prompt held guidance, else 1, and the mask as it is.

    The behavior policy saw the guidance and the proximal one did not, so their ratio holds what the guidance did.
    """
    if batch.guided is None:
        return torch.ones_like(batch.behavior), batch.mask
    ratio = ratio_of(batch, cfg.level).clamp(cfg.low, cfg.high)
    return torch.where(batch.guided[batch.sequence] & batch.mask, ratio, torch.ones_like(ratio)), batch.mask


def adaptive(batch: TokenBatch, cfg: AdaptiveWeights) -> tuple[Tensor, Tensor]:
    """Return 1 + a (ratio - 1) by token, and the mask as it is; see `adaptive_share` for a."""
    ratio = ratio_of(batch, "token")
    return 1 + adaptive_share(ratio[batch.mask], cfg) * (ratio - 1), batch.mask


def adaptive_share(ratio: Tensor, cfg: AdaptiveWeights) -> float:
    """Return how much of the correction to apply, from the ratios [n] of an update: between 0 and 1.

    clip(KL / kl_full, 0, 1) ESS / (1 + variance): KL is k3, ESS the effective sample size per token, and the variance
    that of the ratio by its squared mean. A severe mismatch asks for it, unreliable weights speak against it.
    """
    if not ratio.numel():
        return 0.0
    ratio = ratio.double()
    kl = (ratio - 1 - ratio.log()).mean()
    spread = (ratio**2).mean() / ratio.mean() ** 2
    return float((kl / cfg.kl_full).clamp(0, 1) / spread / spread)


def ratio_of(batch: TokenBatch, level: str) -> Tensor:
    """Return proximal over behavior probability for each token [N]: its own, its sequence's product, or mean."""
    log = log_ratio(batch.proximal.detach(), batch.behavior, batch.mask)
    if level == "sequence":
        total = sequence_sum(log, batch.mask, batch.sequence, batch.num_sequences)
        log = total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[batch.sequence]
    elif level == "geometric":
        log = sequence_mean(log, batch.mask, batch.sequence, batch.num_sequences)[batch.sequence]
    return log.exp()


def behavior_proximal(batch: TokenBatch, cfg: BehaviorProximal) -> Tensor:
    """Return the recorded log-probabilities [N]."""
    del cfg
    return batch.behavior


def recomputed_proximal(batch: TokenBatch, cfg: RecomputedProximal) -> Tensor:
    """Return the log-probabilities [N] under the weights of the step's start."""
    del cfg
    return batch.start


def interpolated_proximal(batch: TokenBatch, cfg: InterpolatedProximal) -> Tensor:
    """Return a mix of behavior and current log-probability [N]; the older the token the more of the current.

    The current one has the weight (v - 1 - v_token) / (v - v_token), 0 for tokens of this version, where v is
    the version at the step's start.
    """
    age = batch.version - batch.versions
    share = torch.where((batch.versions >= 0) & (age > 0), (age - 1) / age.clamp(min=1), 0.0).clamp(0, 1)
    share = share.to(batch.behavior.dtype)
    behavior, current = select(batch.mask, batch.behavior), select(batch.mask, batch.logp.detach())
    if cfg.space == "log":
        return behavior + share * (current - behavior)
    return ((1 - share) * behavior.exp() + share * current.exp() + 1e-10).log()


def off_policy_sequence(batch: TokenBatch, cfg: OffPolicySequenceMask) -> Tensor:
    """Return which tokens [N] stay: those with A >= 0, or mean of log behavior - log current at most delta."""
    log = log_ratio(batch.behavior, batch.logp.detach(), batch.mask)
    drift = sequence_mean(log, batch.mask, batch.sequence, batch.num_sequences)[batch.sequence]
    return batch.mask & ((batch.advantages >= 0) | (drift <= cfg.delta))


def veto(batch: TokenBatch, cfg: Veto) -> Tensor:
    """Return which tokens [N] stay: those of sequences without a ratio to the behavior policy below the threshold."""
    log = log_ratio(batch.logp.detach(), batch.behavior, batch.mask)
    vetoed = (log < math.log(cfg.threshold)).long()
    hits = torch.zeros(batch.num_sequences, dtype=torch.int64, device=log.device).index_add(0, batch.sequence, vetoed)
    return batch.mask & (hits == 0)[batch.sequence]


def anchor_proximal(batch: TokenBatch, cfg: EwmaProximal | SnapshotProximal) -> Tensor:
    """Return the log-probabilities [N] under the averaged or earlier weights that the trainer keeps."""
    del cfg
    return batch.anchor


def failure_veto(batch: TokenBatch, cfg: FailureVeto) -> Tensor:
    """Return which tokens [N] stay: those not behind a ratio to the behavior policy above the threshold where A < 0."""
    ratio = log_ratio(batch.logp.detach(), batch.behavior, batch.mask)
    hit = (ratio > math.log(cfg.threshold)) & (select(batch.mask, batch.advantages) < 0)
    hits, column = to_rows(hit.to(ratio.dtype), batch.mask, batch.sequence, batch.num_sequences, 0.0)
    return batch.mask & (before(hits.cumsum(1), batch.sequence, column, 0.0) == 0)


def top_entropy(batch: TokenBatch, cfg: TopEntropy) -> Tensor:
    """Return which tokens [N] stay: those whose entropy is among the largest of the update."""
    entropy = batch.entropy.detach()[batch.mask]
    if not len(entropy):
        return batch.mask
    number = max(math.ceil(cfg.share * len(entropy)), 1)
    least = entropy.topk(number).values[-1]
    return batch.mask & (batch.entropy.detach() >= least)


PROXIMALS: dict[type, Callable[..., Tensor]] = {
    BehaviorProximal: behavior_proximal,
    RecomputedProximal: recomputed_proximal,
    InterpolatedProximal: interpolated_proximal,
    EwmaProximal: anchor_proximal,
    SnapshotProximal: anchor_proximal,
}

WEIGHTS: dict[type, Callable[..., tuple[Tensor, Tensor]]] = {
    NoWeights: none,
    TruncatedWeights: truncated,
    MaskedWeights: masked,
    KlMaskedWeights: kl_masked,
    MomentMaskedWeights: moment_masked,
    AdaptiveWeights: adaptive,
    OffContextWeights: off_context,
}

FILTERS: dict[type, Callable[..., Tensor]] = {
    OffPolicySequenceMask: off_policy_sequence,
    Veto: veto,
    FailureVeto: failure_veto,
    TopEntropy: top_entropy,
}
