"""Weights that correct from the behavior to the proximal policy. Constants: no gradient flows through them.

Legend: S sequences, N tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from data_contracts.algorithm import MaskedWeights, NoWeights, TruncatedWeights
from models.tokens import MAX_LOG_RATIO, TokenBatch, log_ratio, sequence_mean, sequence_sum


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


WEIGHTS: dict[type, Callable[..., tuple[Tensor, Tensor]]] = {
    NoWeights: none,
    TruncatedWeights: truncated,
    MaskedWeights: masked,
}
