"""Trust regions between the proximal and the current policy: pure functions from tokens to token losses.

Every loss is minimized. It returns one loss for each token, not yet weighted, masked or summed; importance
weights, aggregation and regularizers come after it. Legend: S sequences, N tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from data_contracts.algorithm import Cispo, DppoTv, Gmpo, Gspo, M2po, PpoClip, Reinforce, Sao, Sapo, Topr, Vespo
from models.tokens import MAX_LOG_RATIO, TokenBatch, log_ratio, select, sequence_mean, sequence_sum


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of each token, and where the trust region bounded the gradient."""

    loss: Tensor
    """[N], finite outside the mask."""
    cut_low: Tensor
    """[N] bool, True where the ratio was too small."""
    cut_high: Tensor
    """[N] bool, True where the ratio was too large."""


def ppo_clip(batch: TokenBatch, cfg: PpoClip) -> TokenLoss:
    """Return max(-A r, -A clip(r, 1 - low, 1 + high)), and with dual_clip at most -A dual_clip where A < 0."""
    advantages, log = _advantages_and_log_ratio(batch)
    token = clipped(advantages, log.exp(), 1 - cfg.clip_low, 1 + cfg.clip_high)
    if cfg.dual_clip is None:
        return token
    ceiling = -advantages * cfg.dual_clip
    above = (advantages < 0) & (token.loss > ceiling)
    return TokenLoss(torch.where(above, ceiling, token.loss), token.cut_low, token.cut_high | above)


def clipped(advantages: Tensor, ratio: Tensor, low: float, high: float) -> TokenLoss:
    """Return the pessimistic one of the plain and the clipped surrogate."""
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    return TokenLoss(loss, (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0))


def reinforce(batch: TokenBatch, cfg: Reinforce) -> TokenLoss:
    """Return -A logp."""
    del cfg
    nowhere = torch.zeros_like(batch.mask)
    return TokenLoss(_likelihood(batch, torch.ones_like(batch.advantages)), nowhere, nowhere)


def gspo(batch: TokenBatch, cfg: Gspo) -> TokenLoss:
    """Return the clipped surrogate of s = exp(mean log r) of the token's sequence.

    Value of s, gradient through the token's own log-probability (the token form), log s at most 10.
    """
    advantages, log = _advantages_and_log_ratio(batch)
    mean = sequence_mean(log, batch.mask, batch.sequence, batch.num_sequences)[batch.sequence].detach()
    own = select(batch.mask, batch.logp)
    ratio = (mean + own - own.detach()).clamp(max=10.0).exp()
    return clipped(advantages, ratio, 1 - cfg.clip_low, 1 + cfg.clip_high)


def cispo(batch: TokenBatch, cfg: Cispo) -> TokenLoss:
    """Return -sg[clip(r, 1 - low, 1 + high)] A logp."""
    _, log = _advantages_and_log_ratio(batch)
    ratio = log.detach().exp()
    weight = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return TokenLoss(_likelihood(batch, weight), ratio < 1 - cfg.clip_low, ratio > 1 + cfg.clip_high)


def sapo(batch: TokenBatch, cfg: Sapo) -> TokenLoss:
    """Return -A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A; the slope at r = 1 is that of -A r."""
    advantages, log = _advantages_and_log_ratio(batch)
    tau = torch.where(advantages > 0, cfg.tau_positive, cfg.tau_negative)
    nowhere = torch.zeros_like(batch.mask)
    return TokenLoss(-advantages * 4 / tau * torch.sigmoid(tau * (log.exp() - 1)), nowhere, nowhere)


def gmpo(batch: TokenBatch, cfg: Gmpo) -> TokenLoss:
    """Return -A exp(mean d') of the token's sequence, d' the log-ratio clipped where that lowers the objective."""
    advantages, log = _advantages_and_log_ratio(batch)
    sign = advantages.sign()
    bounded = sign * torch.minimum(sign * log, sign * log.clamp(-cfg.clip, cfg.clip))
    ratio = sequence_mean(bounded, batch.mask, batch.sequence, batch.num_sequences).exp()[batch.sequence]
    return TokenLoss(-advantages * ratio, (log < -cfg.clip) & (advantages < 0), (log > cfg.clip) & (advantages > 0))


def topr(batch: TokenBatch, cfg: Topr) -> TokenLoss:
    """Return -A logp for samples with a positive raw reward, else -sg[min(r, 1)] A logp."""
    del cfg
    _, log = _advantages_and_log_ratio(batch)
    good = batch.rewards[batch.sequence] > 0
    ratio = log.detach().exp()
    weight = torch.where(good, torch.ones_like(ratio), ratio.clamp(max=1.0))
    return TokenLoss(_likelihood(batch, weight), torch.zeros_like(good), ~good & (ratio > 1))


def m2po(batch: TokenBatch, cfg: M2po) -> TokenLoss:
    """Return the clipped surrogate with the margins of `m2po_margins`."""
    advantages, log = _advantages_and_log_ratio(batch)
    low, high = m2po_margins(log.detach()[batch.mask], advantages[batch.mask], cfg)
    return clipped(advantages, log.exp(), 1 - low, 1 + high)


def m2po_margins(log: Tensor, advantages: Tensor, cfg: M2po) -> tuple[float, float]:
    """Return how far below and above 1 a ratio may go.

    Harmful tokens have moved in the direction of their advantage. While the mean of their squared log-ratios
    is within the budget nothing is clipped; else the margins are those of the largest log-ratio tau that can
    be left if all above it are cut down to it, with floors.
    """
    harmful = ((advantages > 0) & (log > 0)) | ((advantages < 0) & (log < 0))
    moments = (log[harmful].double() ** 2).sort().values
    count = len(moments)
    if not count or moments.mean() <= cfg.budget:
        return 1.0, 99999.0
    left = torch.arange(count - 1, -1, -1, dtype=torch.float64, device=moments.device)
    over = torch.nonzero(moments * left + moments.cumsum(0) >= cfg.budget * count)[:, 0]
    first = int(over[0]) if over.numel() else count - 1
    # a hair less, so that the token that gave tau lies outside
    tau = math.sqrt(max(moments[first - 1].item() - 1e-12, 0.0)) if first else 0.0
    return max(1 - math.exp(-tau), cfg.floor_low), max(math.exp(tau) - 1, cfg.floor_high)


def sao(batch: TokenBatch, cfg: Sao) -> TokenLoss:
    """Return -sg[w] A logp, w = r to the behavior policy strictly between 1 - low and 1 + high, else 0."""
    ratio = log_ratio(batch.logp, batch.behavior, batch.mask).detach().exp()
    low, high = ratio <= 1 - cfg.clip_low, ratio >= 1 + cfg.clip_high
    weight = torch.where(low | high, torch.zeros_like(ratio), ratio)
    return TokenLoss(_likelihood(batch, weight), low, high)


def dppo_tv(batch: TokenBatch, cfg: DppoTv) -> TokenLoss:
    """Return -keep A r + c log^2 r, r to the behavior policy, keep by the change of probability along A."""
    advantages = select(batch.mask, batch.advantages)
    log = log_ratio(batch.logp, batch.behavior, batch.mask)
    moved = select(batch.mask, batch.logp.detach().exp() - batch.behavior.exp())
    high, low = (advantages > 0) & (moved > cfg.limit), (advantages <= 0) & (moved < -cfg.limit)
    return TokenLoss(-select(~(high | low), advantages * log.exp()) + cfg.kl_coefficient * log**2, low, high)


def vespo(batch: TokenBatch, cfg: Vespo) -> TokenLoss:
    """Return -sg[exp(l + k log W - l W)] A logp, W the product of the sequence's ratios to the behavior policy."""
    log = log_ratio(batch.logp, batch.behavior, batch.mask).detach()
    total = sequence_sum(log, batch.mask, batch.sequence, batch.num_sequences)
    total = total.clamp(math.log(1e-8), MAX_LOG_RATIO)[batch.sequence]
    positive = select(batch.mask, batch.advantages) >= 0
    power = torch.where(positive, cfg.power_positive, cfg.power_negative)
    decay = torch.where(positive, cfg.decay_positive, cfg.decay_negative)
    nowhere = torch.zeros_like(batch.mask)
    return TokenLoss(_likelihood(batch, (decay + power * total - decay * total.exp()).exp()), nowhere, nowhere)


def _advantages_and_log_ratio(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return advantages and the log-ratio of current to proximal policy [N], 0 outside the mask."""
    return select(batch.mask, batch.advantages), log_ratio(batch.logp, batch.proximal.detach(), batch.mask)


def _likelihood(batch: TokenBatch, weight: Tensor) -> Tensor:
    """Return -weight A logp [N]; the weight is a constant."""
    return -weight.detach() * select(batch.mask, batch.advantages) * select(batch.mask, batch.logp)


LOSSES: dict[type, Callable[..., TokenLoss]] = {
    PpoClip: ppo_clip,
    Reinforce: reinforce,
    Gspo: gspo,
    Cispo: cispo,
    Sapo: sapo,
    Gmpo: gmpo,
    Topr: topr,
    M2po: m2po,
    Sao: sao,
    DppoTv: dppo_tv,
    Vespo: vespo,
}
