"""Trust regions between the proximal and the current policy: pure functions from tokens to token losses.

Every loss is minimized. It returns one loss for each token, not yet weighted, masked or summed; importance
weights, aggregation and regularizers come after it. Legend: S sequences, N tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from data_contracts.algorithm import PpoClip, Reinforce
from models.tokens import TokenBatch, log_ratio, select


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of each token, and where the trust region cut the gradient."""

    loss: Tensor
    """[N], 0 outside the mask."""
    cut_low: Tensor
    """[N] bool, True where the ratio was too small."""
    cut_high: Tensor
    """[N] bool, True where the ratio was too large."""


def ppo_clip(batch: TokenBatch, cfg: PpoClip) -> TokenLoss:
    """Return max(-A r, -A clip(r, 1 - low, 1 + high)), and with dual_clip at most -A dual_clip where A < 0."""
    advantages = select(batch.mask, batch.advantages)
    ratio = log_ratio(batch.logp, batch.proximal.detach(), batch.mask).exp()
    bounded = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * bounded)
    cut_low = (ratio < 1 - cfg.clip_low) & (advantages < 0)
    cut_high = (ratio > 1 + cfg.clip_high) & (advantages > 0)
    if cfg.dual_clip is not None:
        ceiling = -advantages * cfg.dual_clip
        cut_high = cut_high | ((advantages < 0) & (loss > ceiling))
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    return TokenLoss(select(batch.mask, loss), cut_low & batch.mask, cut_high & batch.mask)


def reinforce(batch: TokenBatch, cfg: Reinforce) -> TokenLoss:
    """Return -A logp."""
    del cfg
    loss = -select(batch.mask, batch.advantages) * select(batch.mask, batch.logp)
    nowhere = torch.zeros_like(batch.mask)
    return TokenLoss(loss, nowhere, nowhere)


LOSSES: dict[type, Callable[..., TokenLoss]] = {
    PpoClip: ppo_clip,
    Reinforce: reinforce,
}
