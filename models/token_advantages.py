"""Advantages that differ from token to token of a response: by value, by turn, by branch. No gradient flows here.

Legend: S sequences, N tokens.
"""

import torch
from torch import Tensor

from data_contracts.algorithm import FrozenValue, Gae, Tree, TurnReturns, Turns
from models.outcomes import Outcomes, deviation, divide, whiten
from models.structure import Branch, branches_of
from models.values import gae as estimate
from models.values import token_rewards, traces


def gae(outcomes: Outcomes, cfg: Gae) -> Tensor:
    """Return generalized advantages [N], perhaps whitened over the tokens in the loss; 0 before values are known."""
    if outcomes.values is None:
        return torch.zeros(len(outcomes.mask), dtype=torch.float64)
    mask, sequence = outcomes.mask, outcomes.sequence
    rewards = token_rewards(outcomes.raw_rewards, outcomes.penalty, mask, sequence)
    trace = traces(cfg, mask, sequence, len(outcomes.raw_rewards))
    raw = estimate(rewards, outcomes.values, mask, sequence, discount=cfg.discount, trace=trace)
    return whiten(raw, mask, eps=cfg.eps) if cfg.whiten else raw


def frozen_value(outcomes: Outcomes, cfg: FrozenValue) -> Tensor:
    """Return the value of each token [N], perhaps whitened over the tokens in the loss; 0 before values are known."""
    if outcomes.values is None:
        return torch.zeros(len(outcomes.mask), dtype=torch.float64)
    values = torch.where(outcomes.mask, outcomes.values.double(), 0.0)
    return whiten(values, outcomes.mask, eps=cfg.eps) if cfg.whiten else values


def turns(outcomes: Outcomes, cfg: Turns) -> Tensor:
    """Return (r - mean) / (std + eps) of each group, std with n, by a constant or the number of turns [N]."""
    centered = outcomes.centered()
    std = (outcomes.group_sum(centered**2)[outcomes.group] / outcomes.group_size()).sqrt()
    advantages = divide(centered, std + cfg.eps)
    if cfg.divide_by is not None:
        return outcomes.to_tokens(advantages / cfg.divide_by)
    turn = outcomes.standing().turns(outcomes.sequence)
    count = torch.zeros_like(outcomes.group).scatter_reduce(0, outcomes.sequence, turn + 1, "amax")
    return outcomes.to_tokens(advantages / count.clamp(min=1))


def turn_returns(outcomes: Outcomes, cfg: TurnReturns) -> Tensor:
    """Return the discounted rewards from each token's turn on, relative to the group's samples that have it [N].

    A turn that only one sample of a group has is compared with nothing: 0.
    """
    sequence, turn = outcomes.sequence, outcomes.standing().turns(outcomes.sequence)
    num_turns = int(turn.max()) + 1 if len(turn) else 1
    has = torch.zeros(len(outcomes.rewards), num_turns, dtype=torch.bool)
    has[sequence, turn] = True
    returns = _turn_rewards(outcomes, has)
    for number in range(num_turns - 2, -1, -1):
        returns[:, number] += cfg.discount * returns[:, number + 1]
    columns = [_among(outcomes, returns[:, number], has[:, number], cfg) for number in range(num_turns)]
    return torch.stack(columns, 1)[sequence, turn]


def _turn_rewards(outcomes: Outcomes, has: Tensor) -> Tensor:
    """Return the reward of each turn [S, turns]: its component, and for the last one what is left of the reward."""
    given = torch.zeros(has.shape, dtype=torch.float64)
    for number in range(has.shape[1]):
        values = outcomes.components.get(f"turn/{number}")
        if values is not None:
            given[:, number] = torch.where(has[:, number] & ~values.isnan(), values, 0.0)
    last = has.sum(1).clamp(min=1) - 1
    given[torch.arange(len(last)), last] += outcomes.rewards - given.sum(1)
    return given


def _among(outcomes: Outcomes, values: Tensor, chosen: Tensor, cfg: TurnReturns) -> Tensor:
    """Return value - mean [S] over the chosen samples of each group, perhaps by their deviation; 0 for the others."""
    count = outcomes.group_sum(chosen.double()).clamp(min=1)[outcomes.group]
    mean = outcomes.group_sum(torch.where(chosen, values, 0.0))[outcomes.group] / count
    # the others take the place of one of the chosen, so that equal values are found equal to the last bit
    some = torch.zeros(outcomes.num_groups, dtype=values.dtype)
    some[outcomes.group[chosen]] = values[chosen]
    equal = outcomes.is_constant(torch.where(chosen, values, some[outcomes.group]))
    centered = torch.where(chosen & ~equal, values - mean, 0.0)
    if not cfg.normalize:
        return centered
    std = (outcomes.group_sum(centered**2)[outcomes.group] / (count - 1).clamp(min=1)).sqrt()
    return divide(centered, std + cfg.eps)


def tree(outcomes: Outcomes, cfg: Tree) -> Tensor:
    """Return (value - mean) / (std + eps) of each token's branch among those it is compared with [N], cut off.

    The standard deviation is that with n-1; a branch that stands alone, or among equals, gets 0.
    """
    structure = outcomes.standing()
    members: list[list[int]] = [[] for _ in range(outcomes.num_groups)]
    for i, group in enumerate(outcomes.group.tolist()):
        members[group].append(i)
    bounds = torch.searchsorted(outcomes.sequence, torch.arange(len(outcomes.rewards) + 1)).tolist()
    advantages = torch.zeros(len(outcomes.mask), dtype=torch.float64)
    for group in members:
        found = branches_of(group, structure, outcomes.rewards)
        for branch, advantage in zip(found, _standings(found, cfg), strict=True):
            own = slice(bounds[branch.sample], bounds[branch.sample + 1])
            # from left to right: the next branch of the sample overwrites its part
            advantages[own][structure.position[own] >= branch.start] = advantage
    return advantages


def _standings(branches: list[Branch], cfg: Tree) -> list[float]:
    """Return how each branch stands among those of its depth, or among its siblings."""
    compared: dict[int, list[int]] = {}
    for number, branch in enumerate(branches):
        compared.setdefault(branch.depth if cfg.among == "depth" else branch.before, []).append(number)
    found = [0.0] * len(branches)
    for numbers in compared.values():
        values = torch.tensor([branches[number].value for number in numbers], dtype=torch.float64)
        std = deviation(values)
        if std < cfg.least_std or (values == values[0]).all():
            continue
        scaled = ((values - values.mean()) / (std + cfg.eps)).clamp(-cfg.largest, cfg.largest)
        for number, value in zip(numbers, scaled.tolist(), strict=True):
            found[number] = value
    return found
