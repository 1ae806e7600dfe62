"""From rewards to advantages, per group of samples of one prompt. No gradient flows through here.

Advantages that differ within a response stand in token_advantages.py. Legend: S sequences, N tokens, K groups.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from data_contracts.algorithm import (
    AsymRe,
    Ddca,
    FrozenValue,
    Gae,
    Gd2po,
    Gdpo,
    Gpg,
    Grpo,
    MaxRl,
    McGrpo,
    Opo,
    Opob,
    Otb,
    PassAtK,
    ReinforcePlusPlus,
    Remax,
    Rloo,
    Tree,
    TurnReturns,
    Turns,
)
from data_contracts.errors import ContractError
from models.outcomes import Outcomes, deviation, divide, whiten
from models.token_advantages import frozen_value, gae, otb, remax, tree, turn_returns, turns

__all__ = ["ADVANTAGES", "Outcomes"]


def grpo(outcomes: Outcomes, cfg: Grpo) -> Tensor:
    """Return (r - mean) / (std + eps) of each group [N]; exactly 0 where a group's rewards are all equal.

    A group of one sample has nothing to be compared with: 0.
    """
    centered = outcomes.centered()
    if cfg.std == "none":
        return outcomes.to_tokens(centered)
    if cfg.std == "batch":
        std = deviation(outcomes.rewards)
    else:
        freedom = outcomes.group_size() - (1 if cfg.std == "unbiased" else 0)
        std = (outcomes.group_sum(centered**2)[outcomes.group] / freedom.clamp(min=1)).sqrt()
    return outcomes.to_tokens(divide(centered, std + cfg.eps))


def rloo(outcomes: Outcomes, cfg: Rloo) -> Tensor:
    """Return the reward minus the mean of the group's other samples [N]; 0 for a group of one."""
    del cfg
    size = outcomes.group_size()
    return outcomes.to_tokens(outcomes.centered() * size / (size - 1).clamp(min=1))


def reinforce_pp(outcomes: Outcomes, cfg: ReinforcePlusPlus) -> Tensor:
    """Return the reward (minus the group's mean) whitened over the tokens in the loss [N].

    Rewards count for every token of their response (discount 1), tokens behind tool output included.
    """
    values = outcomes.to_tokens(outcomes.centered() if cfg.group_baseline else outcomes.rewards)
    return whiten(values, outcomes.mask, eps=cfg.eps)


def opo(outcomes: Outcomes, cfg: Opo) -> Tensor:
    """Return r - sum(length r) / sum(length) of each group [N]; the raw reward for a group of one."""
    del cfg
    lengths = outcomes.lengths
    total = outcomes.group_sum(lengths)[outcomes.group]
    baseline = divide(outcomes.group_sum(lengths * outcomes.rewards)[outcomes.group], total)
    alone = outcomes.group_size() == 1
    advantages = torch.where(alone, outcomes.rewards, outcomes.rewards - baseline)
    return outcomes.to_tokens(
        torch.where(outcomes.is_constant(outcomes.rewards) & ~alone, torch.zeros_like(advantages), advantages)
    )


def maxrl(outcomes: Outcomes, cfg: MaxRl) -> Tensor:
    """Return (r - mean) / mean of each group [N]; 0 where the mean is not positive."""
    del cfg
    mean = outcomes.group_mean(outcomes.rewards)
    return outcomes.to_tokens(torch.where(mean > 0, divide(outcomes.centered(), mean), torch.zeros_like(mean)))


def mc_grpo(outcomes: Outcomes, cfg: McGrpo) -> Tensor:
    """Return (r - median) / (MAD + eps) of each group [N], with lower medians.

    The median sample has advantage 0; it stays in the denominators of an aggregation.
    """
    advantages = torch.zeros_like(outcomes.rewards)
    for group in range(outcomes.num_groups):
        members = outcomes.group == group
        offset = outcomes.rewards[members] - outcomes.rewards[members].median()
        scaled = offset / (offset.abs().median() + cfg.eps)
        active = int((scaled.abs() > 1e-6).sum())
        advantages[members] = scaled * (len(offset) / active) if cfg.rescale and active else scaled
    return outcomes.to_tokens(advantages)


def gdpo(outcomes: Outcomes, cfg: Gdpo) -> Tensor:
    """Return the sum of components, each normalized in its group, normalized over the step [N].

    Raises:
        ContractError: there are no components, or one that the config names is missing everywhere.
    """
    parts = torch.stack(list(_normalized_components(outcomes, cfg, "gdpo")))
    total, flat = parts.sum(0), (outcomes.group_sum((parts != 0).any(0).double()) == 0)[outcomes.group]
    normalized = (total - total.mean()) / (deviation(total) + cfg.eps)
    return outcomes.to_tokens(torch.where(flat, torch.zeros_like(normalized), normalized))


def _normalized_components(outcomes: Outcomes, cfg: Gdpo | Gd2po, name: str) -> Iterator[Tensor]:
    """Yield (value - mean) / (std + eps) of each group [S], times its weight, by component; 0 where unknown."""
    missing = sorted(cfg.component_weights.keys() - outcomes.components.keys())
    if not outcomes.components or missing:
        raise ContractError(
            f"advantage {name}: expected reward components {missing or 'of any name'}, got "
            f"{sorted(outcomes.components)}; correct component_weights or let the env report them"
        )
    for component, values in outcomes.components.items():
        known = ~values.isnan()
        values = torch.where(known, values, torch.zeros_like(values))
        count = outcomes.group_sum(known.double())[outcomes.group]
        centered = torch.where(known, values - divide(outcomes.group_sum(values)[outcomes.group], count), 0.0)
        centered = torch.where(outcomes.is_constant(values), torch.zeros_like(centered), centered)
        std = (outcomes.group_sum(centered**2)[outcomes.group] / (count - 1).clamp(min=1)).sqrt()
        yield cfg.component_weights.get(component, 1.0) * centered / (std + cfg.eps)


def gd2po(outcomes: Outcomes, cfg: Gd2po) -> Tensor:
    """Return the sum of normalized components without disagreeing samples, whitened over the tokens kept [N].

    A sample disagrees when it has components above 0 and below 0; with drop weak it is dropped only if they nearly
    cancel. Sums are scaled by the share of the group that is kept, before whitening.

    Raises:
        ContractError: there are no components, or one that the config names is missing everywhere.
    """
    parts = torch.stack(list(_normalized_components(outcomes, cfg, "gd2po")))
    total, size = parts.sum(0), parts.abs().sum(0)
    dropped = (parts > 1e-8).any(0) & (parts < -1e-8).any(0)
    if cfg.drop == "weak":
        dropped &= total.abs() / (size + 1e-8) < cfg.threshold
    kept_share = outcomes.group_mean((~dropped).double())
    counted = ~dropped[outcomes.sequence]
    values = whiten(outcomes.to_tokens(total * kept_share), outcomes.mask & counted, eps=1e-8)
    return torch.where(counted, values, torch.zeros_like(values))


def ddca(outcomes: Outcomes, cfg: Ddca) -> Tensor:
    """Return accuracy relative to the group plus beta times length relative to its right answers [N].

    Lengths are standardized over the group's right answers (n) and squashed; the shorter the better; wrong answers
    have no part in it, and the part is scaled by the share of right answers.
    """
    right = outcomes.rewards > cfg.right_above
    size, num_right = outcomes.group_size(), outcomes.group_sum(right.double())[outcomes.group]
    lengths = outcomes.lengths
    centered = torch.where(right, lengths - _mean_over(outcomes, lengths, right), 0.0)
    spread = (outcomes.group_sum(centered**2)[outcomes.group] / num_right.clamp(min=1)).sqrt().clamp(min=1e-8)
    squashed = torch.sigmoid((centered / (spread + 1e-8)).clamp(-20, 20))
    accuracy = outcomes.centered()
    if cfg.baseline == "mean":
        std = (outcomes.group_sum(accuracy**2)[outcomes.group] / size).sqrt()
        accuracy = divide(accuracy, std + 1e-8)
        others = _mean_over(outcomes, squashed, right)
    else:
        accuracy = accuracy * size / (size - 1).clamp(min=1)
        total = outcomes.group_sum(torch.where(right, squashed, 0.0))[outcomes.group]
        others = (total - squashed) / (num_right - 1).clamp(min=1)
    shorter = torch.where(right & (num_right > 1), -(squashed - others) * num_right / size, 0.0)
    return outcomes.to_tokens(accuracy + cfg.beta * shorter)


def pass_at_k(outcomes: Outcomes, cfg: PassAtK) -> Tensor:
    """Return (best - second best) / (std + eps) for the first best sample of each group, 0 for the others [N]."""
    advantages = torch.zeros_like(outcomes.rewards)
    for group in range(outcomes.num_groups):
        members = torch.nonzero(outcomes.group == group)[:, 0]
        if len(members) < 2:
            continue
        rewards = outcomes.rewards[members]
        first, second = rewards.topk(2).values
        scale = rewards.std() + cfg.eps if cfg.normalize else 1.0
        advantages[members[rewards.argmax()]] = divide(first - second, torch.as_tensor(scale))
    return outcomes.to_tokens(advantages)


def asymre(outcomes: Outcomes, cfg: AsymRe) -> Tensor:
    """Return r - (mean + shift) of each group [N]."""
    return outcomes.to_tokens(outcomes.centered() - cfg.shift)


def gpg(outcomes: Outcomes, cfg: Gpg) -> Tensor:
    """Return (samples / samples with a reward other than 0) (r - mean) [N]."""
    del cfg
    scale = len(outcomes.rewards) / max(int((outcomes.rewards != 0).sum()), 1)
    return outcomes.to_tokens(scale * outcomes.centered())


def opob(outcomes: Outcomes, cfg: Opob) -> Tensor:
    """Return (r - b) / std of each group [N], b = sum W r / (sum W + 1e-8), W the score weights; 0 without contrast.

    Where gradients were not measured all weights are equal.
    """
    weights = torch.ones_like(outcomes.rewards) if outcomes.score_weights is None else outcomes.score_weights
    if cfg.by_length:
        weights = weights / outcomes.lengths.clamp(min=1) ** 2
    total = outcomes.group_sum(weights)[outcomes.group]
    baseline = outcomes.group_sum(weights * outcomes.rewards)[outcomes.group] / (total + 1e-8)
    std = (outcomes.group_sum(outcomes.centered() ** 2)[outcomes.group] / outcomes.group_size()).sqrt()
    advantages = outcomes.rewards - baseline
    if cfg.normalize:
        advantages = torch.where(std > 1e-8, advantages / std.clamp(min=1e-8), advantages)
    return outcomes.to_tokens(
        torch.where(outcomes.is_constant(outcomes.rewards), torch.zeros_like(advantages), advantages)
    )


def _mean_over(outcomes: Outcomes, values: Tensor, chosen: Tensor) -> Tensor:
    """Return for each sample the mean [S] over the chosen samples of its group, 0 where there are none."""
    count = outcomes.group_sum(chosen.double())
    total = outcomes.group_sum(torch.where(chosen, values, torch.zeros_like(values)))
    return (total / count.clamp(min=1))[outcomes.group]


ADVANTAGES: dict[type, Callable[..., Tensor]] = {
    Grpo: grpo,
    Rloo: rloo,
    ReinforcePlusPlus: reinforce_pp,
    Opo: opo,
    Opob: opob,
    Otb: otb,
    Remax: remax,
    MaxRl: maxrl,
    McGrpo: mc_grpo,
    Gdpo: gdpo,
    Gd2po: gd2po,
    Ddca: ddca,
    AsymRe: asymre,
    Gpg: gpg,
    Gae: gae,
    FrozenValue: frozen_value,
    PassAtK: pass_at_k,
    Turns: turns,
    TurnReturns: turn_returns,
    Tree: tree,
}
