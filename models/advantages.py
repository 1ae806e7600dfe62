"""From rewards to advantages, per group of samples of one prompt. No gradient flows through here.

Legend: S sequences, N tokens, K groups.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

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
    ReinforcePlusPlus,
    Rloo,
)
from data_contracts.errors import ContractError
from models.tokens import sequence_lengths, sequence_sum
from models.values import gae as estimate
from models.values import token_rewards, traces


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The rewarded samples of a step."""

    raw_rewards: Tensor
    """[S] float64, before any penalty."""
    group: Tensor
    """[S] int64, 0 to num_groups - 1."""
    num_groups: int
    mask: Tensor
    """[N] bool, True where the token is in the loss."""
    sequence: Tensor
    """[N] int64, index of the token's sample."""
    components: Mapping[str, Tensor] = field(default_factory=dict)
    """[S] float64 by name of the reward component, NaN for a sample that lacks it."""
    score_weights: Tensor | None = None
    """[S] float64, see models/scores.py; None where nobody measured gradients."""
    penalty: Tensor | None = None
    """[N] float64 to be taken off the rewards token by token; None takes nothing."""
    values: Tensor | None = None
    """[N] float32 in units of reward, from a value model; None where there is none, or not yet."""

    @property
    def rewards(self) -> Tensor:
        """Rewards less what is to be taken off them over their tokens, [S] float64."""
        if self.penalty is None:
            return self.raw_rewards
        return self.raw_rewards - sequence_sum(self.penalty, self.mask, self.sequence, len(self.raw_rewards))

    @property
    def lengths(self) -> Tensor:
        """Tokens in the loss of each sample, [S] float64."""
        return sequence_lengths(self.mask, self.sequence, len(self.rewards)).double()

    def group_sum(self, values: Tensor) -> Tensor:
        """Return the sum [K] of values [S] over each group."""
        return torch.zeros(self.num_groups, dtype=values.dtype).index_add(0, self.group, values)

    def group_size(self) -> Tensor:
        """Return for each sample the size [S] of its group, as float64."""
        return self.group_sum(torch.ones_like(self.rewards))[self.group]

    def group_mean(self, values: Tensor) -> Tensor:
        """Return for each sample the mean [S] over its group."""
        return self.group_sum(values)[self.group] / self.group_size()

    def centered(self) -> Tensor:
        """Return reward minus the group's mean [S]; exactly 0 where a group's rewards are all equal."""
        centered = self.rewards - self.group_mean(self.rewards)
        return torch.where(self.is_constant(self.rewards), torch.zeros_like(centered), centered)

    def is_constant(self, values: Tensor) -> Tensor:
        """Return for each sample whether its group's values are all equal, [S] bool, compared exactly."""
        low = torch.full((self.num_groups,), torch.inf, dtype=values.dtype)
        low = low.scatter_reduce(0, self.group, values, "amin")
        high = torch.full((self.num_groups,), -torch.inf, dtype=values.dtype)
        high = high.scatter_reduce(0, self.group, values, "amax")
        return (low == high)[self.group]

    def to_tokens(self, values: Tensor) -> Tensor:
        """Return values [S] repeated for each token, [N]."""
        return values[self.sequence]


def grpo(outcomes: Outcomes, cfg: Grpo) -> Tensor:
    """Return (r - mean) / (std + eps) of each group [N]; exactly 0 where a group's rewards are all equal.

    A group of one sample has nothing to be compared with: 0.
    """
    centered = outcomes.centered()
    if cfg.std == "none":
        return outcomes.to_tokens(centered)
    if cfg.std == "batch":
        std = _std(outcomes.rewards)
    else:
        freedom = outcomes.group_size() - (1 if cfg.std == "unbiased" else 0)
        std = (outcomes.group_sum(centered**2)[outcomes.group] / freedom.clamp(min=1)).sqrt()
    return outcomes.to_tokens(_divide(centered, std + cfg.eps))


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
    return _whiten(values, outcomes.mask, eps=cfg.eps)


def opo(outcomes: Outcomes, cfg: Opo) -> Tensor:
    """Return r - sum(length r) / sum(length) of each group [N]; the raw reward for a group of one."""
    del cfg
    lengths = outcomes.lengths
    total = outcomes.group_sum(lengths)[outcomes.group]
    baseline = _divide(outcomes.group_sum(lengths * outcomes.rewards)[outcomes.group], total)
    alone = outcomes.group_size() == 1
    advantages = torch.where(alone, outcomes.rewards, outcomes.rewards - baseline)
    return outcomes.to_tokens(
        torch.where(outcomes.is_constant(outcomes.rewards) & ~alone, torch.zeros_like(advantages), advantages)
    )


def maxrl(outcomes: Outcomes, cfg: MaxRl) -> Tensor:
    """Return (r - mean) / mean of each group [N]; 0 where the mean is not positive."""
    del cfg
    mean = outcomes.group_mean(outcomes.rewards)
    return outcomes.to_tokens(torch.where(mean > 0, _divide(outcomes.centered(), mean), torch.zeros_like(mean)))


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
    normalized = (total - total.mean()) / (_std(total) + cfg.eps)
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
        centered = torch.where(known, values - _divide(outcomes.group_sum(values)[outcomes.group], count), 0.0)
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
    values = _whiten(outcomes.to_tokens(total * kept_share), outcomes.mask & counted, eps=1e-8)
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
        accuracy = _divide(accuracy, std + 1e-8)
        others = _mean_over(outcomes, squashed, right)
    else:
        accuracy = accuracy * size / (size - 1).clamp(min=1)
        total = outcomes.group_sum(torch.where(right, squashed, 0.0))[outcomes.group]
        others = (total - squashed) / (num_right - 1).clamp(min=1)
    shorter = torch.where(right & (num_right > 1), -(squashed - others) * num_right / size, 0.0)
    return outcomes.to_tokens(accuracy + cfg.beta * shorter)


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
    total = outcomes.group_sum(weights)[outcomes.group]
    baseline = outcomes.group_sum(weights * outcomes.rewards)[outcomes.group] / (total + 1e-8)
    std = (outcomes.group_sum(outcomes.centered() ** 2)[outcomes.group] / outcomes.group_size()).sqrt()
    advantages = outcomes.rewards - baseline
    if cfg.normalize:
        advantages = torch.where(std > 1e-8, advantages / std.clamp(min=1e-8), advantages)
    return outcomes.to_tokens(
        torch.where(outcomes.is_constant(outcomes.rewards), torch.zeros_like(advantages), advantages)
    )


def gae(outcomes: Outcomes, cfg: Gae) -> Tensor:
    """Return generalized advantages [N], perhaps whitened over the tokens in the loss; 0 before values are known."""
    if outcomes.values is None:
        return torch.zeros(len(outcomes.mask), dtype=torch.float64)
    mask, sequence = outcomes.mask, outcomes.sequence
    rewards = token_rewards(outcomes.raw_rewards, outcomes.penalty, mask, sequence)
    trace = traces(cfg, mask, sequence, len(outcomes.raw_rewards))
    raw = estimate(rewards, outcomes.values, mask, sequence, discount=cfg.discount, trace=trace)
    return _whiten(raw, mask, eps=cfg.eps) if cfg.whiten else raw


def frozen_value(outcomes: Outcomes, cfg: FrozenValue) -> Tensor:
    """Return the value of each token [N], perhaps whitened over the tokens in the loss; 0 before values are known."""
    if outcomes.values is None:
        return torch.zeros(len(outcomes.mask), dtype=torch.float64)
    values = torch.where(outcomes.mask, outcomes.values.double(), 0.0)
    return _whiten(values, outcomes.mask, eps=cfg.eps) if cfg.whiten else values


def _whiten(values: Tensor, counted: Tensor, *, eps: float) -> Tensor:
    """Return values [N] minus the mean, by the root of the variance (n-1) plus eps, of those counted."""
    chosen = values[counted]
    if chosen.numel() < 2 or (chosen == chosen[0]).all():
        return torch.zeros_like(values)
    return (values - chosen.mean()) / (chosen.var() + eps).sqrt()


def _mean_over(outcomes: Outcomes, values: Tensor, chosen: Tensor) -> Tensor:
    """Return for each sample the mean [S] over the chosen samples of its group, 0 where there are none."""
    count = outcomes.group_sum(chosen.double())
    total = outcomes.group_sum(torch.where(chosen, values, torch.zeros_like(values)))
    return (total / count.clamp(min=1))[outcomes.group]


def _std(values: Tensor) -> Tensor:
    return values.std() if values.numel() > 1 else torch.zeros((), dtype=values.dtype)


def _divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the quotient, and 0 where the numerator is 0 whatever the denominator."""
    nothing = numerator == 0
    quotient = numerator / torch.where(nothing, torch.ones_like(numerator), denominator)
    return torch.where(nothing, torch.zeros_like(quotient), quotient)


ADVANTAGES: dict[type, Callable[..., Tensor]] = {
    Grpo: grpo,
    Rloo: rloo,
    ReinforcePlusPlus: reinforce_pp,
    Opo: opo,
    Opob: opob,
    MaxRl: maxrl,
    McGrpo: mc_grpo,
    Gdpo: gdpo,
    Gd2po: gd2po,
    Ddca: ddca,
    AsymRe: asymre,
    Gpg: gpg,
    Gae: gae,
    FrozenValue: frozen_value,
}
