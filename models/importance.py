"""Between the behavior and the proximal policy: where the proximal one comes from, weights, and filters.

All of them are constants: no gradient flows through them.

Legend: S sequences, N tokens.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from data_contracts.algorithm import (
    BehaviorProximal,
    InterpolatedProximal,
    MaskedWeights,
    NoWeights,
    OffPolicySequenceMask,
    RecomputedProximal,
    TruncatedWeights,
    Veto,
)
from models.tokens import MAX_LOG_RATIO, TokenBatch, log_ratio, select, sequence_mean, sequence_sum


def none(batch: TokenBatch, cfg: NoWeights) -> tuple[Tensor, Tensor]:
    """Return weights of 1 and the mask as it is."""
    del cfg
    return torch.ones_like(batch.behavior), batch.mask


def truncated(batch: TokenBatch, cfg: TruncatedWeights) -> tuple[Tensor, Tensor]:
    """Return min(ratio, cap) by token or sequence, and the mask as it is."""
    return ratio_of(batch, cfg.level).clamp(max=cfg.cap), batch.mask


def masked(batch: TokenBatch, cfg: MaskedWeights) -> tuple[Tensor, Tensor]:
    """Return the ratio by token or sequence, and the mask without what lies outside the band.

    The number of tokens that a mean divides by stays that before the masking.
    """
    ratio = ratio_of(batch, cfg.level)
    return ratio, batch.mask & (ratio >= cfg.low) & (ratio <= cfg.high)


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


PROXIMALS: dict[type, Callable[..., Tensor]] = {
    BehaviorProximal: behavior_proximal,
    RecomputedProximal: recomputed_proximal,
    InterpolatedProximal: interpolated_proximal,
}

WEIGHTS: dict[type, Callable[..., tuple[Tensor, Tensor]]] = {
    NoWeights: none,
    TruncatedWeights: truncated,
    MaskedWeights: masked,
}

FILTERS: dict[type, Callable[..., Tensor]] = {
    OffPolicySequenceMask: off_policy_sequence,
    Veto: veto,
}
