"""Trust regions between the proximal and the current policy: pure functions from tokens to token losses.

Every loss is minimized. It returns one loss for each token, not yet weighted, masked or summed; importance
weights, aggregation and regularizers come after it. Legend: S sequences, N tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from data_contracts.losses import (
    AStarPo,
    Cispo,
    DppoTv,
    Drpo,
    Gmpo,
    Gspo,
    M2po,
    Mhpo,
    MinPro,
    PpoClip,
    PpoEwma,
    Reinforce,
    Sao,
    Sapo,
    Tbpo,
    Topr,
    Vespo,
)
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
    return clipped(advantages, _mean_ratio(batch, log), 1 - cfg.clip_low, 1 + cfg.clip_high)


def _mean_ratio(batch: TokenBatch, log: Tensor) -> Tensor:
    """Return exp of the sequence's mean log-ratio for each token [N], with the gradient of the token alone."""
    mean = sequence_mean(log, batch.mask, batch.sequence, batch.num_sequences)[batch.sequence].detach()
    own = select(batch.mask, batch.logp)
    return (mean + own - own.detach()).clamp(max=10.0).exp()


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
    """Return -A logp for samples with a positive raw reward, unless all are cut; else -sg[min(r, 1)] A logp."""
    _, log = _advantages_and_log_ratio(batch)
    good = (batch.rewards[batch.sequence] > 0) & (cfg.cut == "wrong")
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
    high, low = moved > cfg.limit, moved < -cfg.limit
    if cfg.sides == "along":
        high, low = high & (advantages > 0), low & (advantages <= 0)
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


def ppo_ewma(batch: TokenBatch, cfg: PpoEwma) -> TokenLoss:
    """Return max(-A r, -A c): r current over behavior, c the ratio to the proximal policy, clipped, times w.

    w is the proximal over the behavior policy. The behavior log-probability in both is at least log current - log cap,
    a constant.
    """
    advantages, log = _advantages_and_log_ratio(batch)
    now, proximal = select(batch.mask, batch.logp), select(batch.mask, batch.proximal.detach())
    behavior = torch.maximum(select(batch.mask, batch.behavior), now.detach() - math.log(cfg.cap))
    bounded = log.clamp(math.log(1 - cfg.clip), math.log(1 + cfg.clip))
    plain = (now - behavior).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    held = (bounded + proximal - behavior).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low, high = (log < math.log(1 - cfg.clip)) & (advantages < 0), (log > math.log(1 + cfg.clip)) & (advantages > 0)
    return TokenLoss(torch.maximum(-advantages * plain, -advantages * held), low, high)


def mhpo(batch: TokenBatch, cfg: Mhpo) -> TokenLoss:
    """Return -A exp(psi - sg[zeta]), psi = c tanh(log r / c), zeta growing with psi in both directions."""
    advantages, log = _advantages_and_log_ratio(batch)
    psi = cfg.bound * torch.tanh(log / cfg.bound)
    still = psi.detach()
    up, down = torch.nn.functional.softplus(still), torch.nn.functional.softplus(-still)
    zeta = (up / cfg.scale_high) ** cfg.power_high + (down / cfg.scale_low) ** cfg.power_low
    nowhere = torch.zeros_like(batch.mask)
    return TokenLoss(-advantages * (psi - zeta).exp(), nowhere, nowhere)


def tbpo(batch: TokenBatch, cfg: Tbpo) -> TokenLoss:
    """Return -A min(s, 1 + clip) where A > 0; -A s where A < 0 and s lies in the band, else 0.

    s is the geometric mean of the sequence's ratios, with the gradient of the token alone.
    """
    advantages, log = _advantages_and_log_ratio(batch)
    ratio = _mean_ratio(batch, log)
    good = clipped(advantages, ratio, 0.0, 1 + cfg.clip)
    low, high = ratio < 1 - cfg.clip, ratio > 1 + cfg.clip_bad
    bad = select(~(low | high), -advantages * ratio)
    is_bad = advantages < 0
    return TokenLoss(torch.where(is_bad, bad, good.loss), is_bad & low, torch.where(is_bad, high, good.cut_high))


def minpro(batch: TokenBatch, cfg: MinPro) -> TokenLoss:
    """Return -A r sg[m], m the smallest ratio among the sequence's tokens before this one, 1 for the first."""
    advantages, log = _advantages_and_log_ratio(batch)
    table, column = to_rows(log.detach(), batch.mask, batch.sequence, batch.num_sequences, math.inf)
    smallest = before(table.cummin(1).values, batch.sequence, column, math.inf)
    weight = torch.where(smallest.isinf(), torch.zeros_like(smallest), smallest).exp()
    if cfg.clip is None:
        nowhere = torch.zeros_like(batch.mask)
        return TokenLoss(-advantages * log.exp() * weight, nowhere, nowhere)
    token = clipped(advantages, log.exp(), 1 - cfg.clip, 1 + cfg.clip)
    return TokenLoss(token.loss * weight, token.cut_low, token.cut_high)


def drpo(batch: TokenBatch, cfg: Drpo) -> TokenLoss:
    """Return for every token the loss of the whole update, so that its mean over tokens is that loss.

    With s a sample's mean log-probability, over the groups that have right and wrong samples, K groups in all:
    -(1 / K) sum [ sum_right w s / sum_right w - tau log mean_wrong exp(s / tau) ] + sg[max(c (KL - limit), 0)] KL,
    w = exp((1 - length / max_length) / length_scale), KL the token mean of exp(d) - 1 - d, d log current - proximal.
    """
    _, log = _advantages_and_log_ratio(batch)
    lengths = sequence_lengths(batch.mask, batch.sequence, batch.num_sequences)
    right = batch.rewards > cfg.right_above
    score = sequence_mean(batch.logp, batch.mask, batch.sequence, batch.num_sequences)
    weight = -lengths.to(score.dtype) / cfg.max_length / cfg.length_scale
    good, any_right = _group_mean(batch, score, right & (lengths > 0), weight)
    # log mean exp: the weights are those of a softmax, the value is taken from their sum
    bad, any_wrong = _log_mean_exp(batch, score / cfg.tau, ~right & (lengths > 0))
    gained = select(any_right & any_wrong, good - cfg.tau * bad).sum() / max(batch.num_groups, 1)
    divergence = select(batch.mask, log.exp() - 1 - log).sum() / batch.mask.sum().clamp(min=1)
    hinge = (cfg.kl_strength * (divergence.detach() - cfg.kl_limit)).clamp(min=0)
    nowhere = torch.zeros_like(batch.mask)
    return TokenLoss((hinge * divergence - gained).expand(len(batch.mask)), nowhere, nowhere)


def a_star_po(batch: TokenBatch, cfg: AStarPo) -> TokenLoss:
    """Return for every token the loss of the whole update, so that its mean over tokens is that loss.

    The mean over sequences with a token of (b log(current / reference) - (r - V))^2, the log-ratio summed over the
    sequence, V = a log mean exp(r / a) over its group; a and b are the two temperatures.
    """
    log = log_ratio(batch.logp, batch.reference, batch.mask)
    total = sequence_sum(log, batch.mask, batch.sequence, batch.num_sequences)
    present = sequence_lengths(batch.mask, batch.sequence, batch.num_sequences) > 0
    best, _ = _log_mean_exp(batch, batch.rewards / cfg.value_temperature, torch.ones_like(present))
    wanted = batch.rewards - cfg.value_temperature * best[batch.group]
    loss = select(present, (cfg.policy_temperature * total - wanted) ** 2).sum() / present.sum().clamp(min=1)
    nowhere = torch.zeros_like(batch.mask)
    return TokenLoss(loss.expand(len(batch.mask)), nowhere, nowhere)


def _group_mean(batch: TokenBatch, values: Tensor, chosen: Tensor, log_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return each group's mean [K] of chosen values [S] weighted by exp(log_weight), and whether it has any."""
    largest = _group_max(batch, log_weight, chosen)
    weight = select(chosen, (select(chosen, log_weight) - largest[batch.group]).exp())
    total = torch.zeros_like(largest).index_add(0, batch.group, weight)
    mean = torch.zeros_like(largest).index_add(0, batch.group, weight * select(chosen, values))
    return mean / torch.where(total > 0, total, torch.ones_like(total)), total > 0


def _log_mean_exp(batch: TokenBatch, values: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return log mean exp [K] of each group's chosen values [S], and whether it has any."""
    largest = _group_max(batch, values.detach(), chosen)
    risen = select(chosen, (select(chosen, values) - select(chosen, largest[batch.group])).exp())
    count = torch.zeros_like(largest).index_add(0, batch.group, chosen.to(values.dtype))
    total = torch.zeros_like(largest).index_add(0, batch.group, risen)
    some = count > 0
    return torch.where(some, total / count.clamp(min=1), torch.ones_like(total)).log() + largest, some


def _group_max(batch: TokenBatch, values: Tensor, chosen: Tensor) -> Tensor:
    """Return each group's largest chosen value [K], 0 where there is none."""
    lowest = torch.full((batch.num_groups,), -math.inf, dtype=values.dtype, device=values.device)
    candidates = torch.where(chosen, values, torch.full_like(values, -math.inf))
    largest = lowest.scatter_reduce(0, batch.group, candidates, "amax")
    return torch.where(largest.isinf(), torch.zeros_like(largest), largest)


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
    PpoEwma: ppo_ewma,
    Mhpo: mhpo,
    Tbpo: tbpo,
    MinPro: minpro,
    AStarPo: a_star_po,
    Drpo: drpo,
}
