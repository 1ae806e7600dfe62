"""From rewards to advantages, per group of samples of one prompt. No gradient flows through here.

Legend: S sequences, N tokens, K groups.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from data_contracts.algorithm import Grpo, Rloo


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The rewarded samples of a step."""

    rewards: Tensor
    """[S] float64."""
    group: Tensor
    """[S] int64, 0 to num_groups - 1."""
    num_groups: int
    mask: Tensor
    """[N] bool, True where the token is in the loss."""
    sequence: Tensor
    """[N] int64, index of the token's sample."""

    def group_sum(self, values: Tensor) -> Tensor:
        """Return the sum [K] of values [S] over each group."""
        return torch.zeros(self.num_groups, dtype=values.dtype).index_add(0, self.group, values)

    def group_mean(self, values: Tensor) -> Tensor:
        """Return for each sample the mean [S] over its group."""
        size = self.group_sum(torch.ones_like(values))
        return (self.group_sum(values) / size)[self.group]

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
    centered = outcomes.rewards - outcomes.group_mean(outcomes.rewards)
    centered = torch.where(outcomes.is_constant(outcomes.rewards), torch.zeros_like(centered), centered)
    if cfg.std == "none":
        return outcomes.to_tokens(centered)
    if cfg.std == "batch":
        std = outcomes.rewards.std() if outcomes.rewards.numel() > 1 else torch.zeros((), dtype=centered.dtype)
        return outcomes.to_tokens(centered / (std + cfg.eps)) if std > 0 else outcomes.to_tokens(centered)
    size = outcomes.group_sum(torch.ones_like(centered))
    freedom = (size - 1 if cfg.std == "unbiased" else size).clamp(min=1)
    std = (outcomes.group_sum(centered**2) / freedom).sqrt()[outcomes.group]
    scaled = centered / (std + cfg.eps)
    return outcomes.to_tokens(torch.where(centered == 0, torch.zeros_like(scaled), scaled))


def rloo(outcomes: Outcomes, cfg: Rloo) -> Tensor:
    """Return the reward minus the mean of the group's other samples [N]; 0 for a group of one."""
    del cfg
    size = outcomes.group_sum(torch.ones_like(outcomes.rewards))[outcomes.group]
    centered = outcomes.rewards - outcomes.group_mean(outcomes.rewards)
    centered = torch.where(outcomes.is_constant(outcomes.rewards), torch.zeros_like(centered), centered)
    return outcomes.to_tokens(centered * size / (size - 1).clamp(min=1))


ADVANTAGES: dict[type, Callable[..., Tensor]] = {
    Grpo: grpo,
    Rloo: rloo,
}
