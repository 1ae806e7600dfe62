"""The rewarded samples of a step, as advantages see them, and arithmetic over groups.

Legend: S sequences, N tokens, K groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.structure import Structure
from models.tokens import sequence_lengths, sequence_sum


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
    structure: Structure | None = None
    """Turns and branches; None takes every response for one turn on a branch of its own."""
    token_scores: Tensor | None = None
    """[N] float64, see models/scores.py, times squared importance weights; None where nobody measured them."""
    behavior: Tensor | None = None
    """[N] nats, as recorded when the token was sampled; None takes all for equal."""
    greedy: Tensor | None = None
    """[S] bool, True for greedy responses; None for nowhere."""

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

    def standing(self) -> Structure:
        """Return turns and branches: those known, or one turn of every response and no branches."""
        if self.structure is not None:
            return self.structure
        lengths = sequence_lengths(torch.ones_like(self.mask), self.sequence, len(self.raw_rewards))
        starts = (lengths.cumsum(0) - lengths)[self.sequence]
        nobody = torch.zeros_like(self.group)
        return Structure(torch.arange(len(starts)) - starts, nobody - 1, nobody)


def whiten(values: Tensor, counted: Tensor, *, eps: float) -> Tensor:
    """Return values [N] minus the mean, by the root of the variance (n-1) plus eps, of those counted."""
    chosen = values[counted]
    if chosen.numel() < 2 or (chosen == chosen[0]).all():
        return torch.zeros_like(values)
    return (values - chosen.mean()) / (chosen.var() + eps).sqrt()


def deviation(values: Tensor) -> Tensor:
    """Return the standard deviation (n-1) of values [n]; 0 for fewer than two."""
    return values.std() if values.numel() > 1 else torch.zeros((), dtype=values.dtype)


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the quotient, and 0 where the numerator is 0 whatever the denominator."""
    nothing = numerator == 0
    quotient = numerator / torch.where(nothing, torch.ones_like(numerator), denominator)
    return torch.where(nothing, torch.zeros_like(quotient), quotient)
