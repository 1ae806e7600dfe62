"""Advantages that differ from token to token of a response: by value, by turn, by branch. No gradient flows here.

Legend: S sequences, N tokens.
"""

import torch
from torch import Tensor

from data_contracts.algorithm import FrozenValue, Gae, Otb, Remax, Tree, TurnReturns, Turns
from models.outcomes import Outcomes, deviation, divide, whiten
from models.structure import Branch, Structure, branches_of
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


def otb(outcomes: Outcomes, cfg: Otb) -> Tensor:
    """Return the reward from each token on, minus the baseline of its group at its place in the response [N].

    b = sum W G / (sum W + 1e-8) over the group's samples that have a token in the loss there, G what they still earn
    and W the scores of their tokens up to there; where all earn the same the advantage is exactly 0. A group of one
    has baseline 0. Where nobody measured scores they are all 1.
    """
    del cfg
    mask, sequence = outcomes.mask, outcomes.sequence
    earned = _earned(outcomes)
    nothing = torch.zeros_like(earned)
    scores = torch.ones_like(earned) if outcomes.token_scores is None else outcomes.token_scores
    scores = torch.where(mask, scores, nothing)
    upto = torch.cat([torch.zeros(1, dtype=scores.dtype), scores]).cumsum(0)
    first = torch.searchsorted(sequence, torch.arange(len(outcomes.raw_rewards)))
    weight = (upto[1:] - upto[first][sequence])[mask]
    group, position = outcomes.to_tokens(outcomes.group)[mask], outcomes.standing().position[mask]
    places, at = torch.unique(torch.stack([group, position]), dim=1, return_inverse=True)
    own, empty = earned[mask], torch.zeros(places.shape[1], dtype=torch.float64)
    baseline = empty.index_add(0, at, weight * own) / (empty.index_add(0, at, weight) + 1e-8)
    low = torch.full_like(empty, torch.inf).scatter_reduce(0, at, own, "amin")
    high = torch.full_like(empty, -torch.inf).scatter_reduce(0, at, own, "amax")
    advantages = torch.where((low == high)[at], 0.0, own - baseline[at])
    alone = outcomes.to_tokens(outcomes.group_size() == 1)[mask]
    return nothing.masked_scatter(mask, torch.where(alone, own, advantages))


def remax(outcomes: Outcomes, cfg: Remax) -> Tensor:
    """Return the reward from each token on, minus that of the group's greedy response [N].

    Where a group has none (it failed, or was left out), 0; so do the tokens of greedy responses.
    """
    del cfg
    if outcomes.greedy is None:
        return torch.zeros(len(outcomes.mask), dtype=torch.float64)
    count = outcomes.group_sum(outcomes.greedy.double())
    total = outcomes.group_sum(torch.where(outcomes.greedy, outcomes.raw_rewards, 0.0))
    baseline = outcomes.to_tokens((total / count.clamp(min=1))[outcomes.group])
    compared = outcomes.mask & outcomes.to_tokens(count[outcomes.group] > 0)
    return torch.where(compared, _earned(outcomes) - baseline, 0.0)


def _earned(outcomes: Outcomes) -> Tensor:
    """Return what is still earned from each token in the loss on, penalties taken off [N], 0 for the others."""
    rewards = token_rewards(outcomes.raw_rewards, outcomes.penalty, outcomes.mask, outcomes.sequence)
    values = torch.zeros_like(rewards)
    return estimate(rewards, values, outcomes.mask, outcomes.sequence, discount=1.0, trace=1.0)


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
        if cfg.fusion == "likelihood":
            _weigh_by_likelihood(found, [_mean_logp(outcomes, structure, bounds, found, i) for i in range(len(found))])
        for branch, advantage in zip(found, _standings(found, cfg), strict=True):
            own = slice(bounds[branch.sample], bounds[branch.sample + 1])
            # from left to right: the next branch of the sample overwrites its part
            advantages[own][structure.position[own] >= branch.start] = advantage
    return advantages


def _mean_logp(outcomes: Outcomes, structure: Structure, bounds: list[int], found: list[Branch], number: int) -> float:
    """Return the mean log-probability of a branch's own tokens; 0 where it has none, or nothing is recorded."""
    branch = found[number]
    own = slice(bounds[branch.sample], bounds[branch.sample + 1])
    inside = structure.position[own] >= branch.start
    if number + 1 < len(found) and found[number + 1].sample == branch.sample:
        inside &= structure.position[own] < found[number + 1].start
    if outcomes.behavior is None or not inside.any():
        return 0.0
    return outcomes.behavior[own][inside].double().mean().item()


def _weigh_by_likelihood(branches: list[Branch], logp: list[float]) -> None:
    """Give each branch the mean value of those that go on from it, weighed by the softmax of their log-probability."""
    after: dict[int, list[int]] = {}
    for number, branch in enumerate(branches):
        after.setdefault(branch.before, []).append(number)
    for number in range(len(branches) - 1, -1, -1):  # what goes on from a branch stands behind it
        if following := after.get(number):
            share = torch.tensor([logp[i] for i in following], dtype=torch.float64).softmax(0)
            value = sum(float(w) * branches[i].value for w, i in zip(share, following, strict=True))
            branches[number].rewards = [value]


def _pruned(branches: list[Branch], cfg: Tree) -> set[int]:
    """Return the last branches of each split that do not count."""
    inner = {branch.before for branch in branches}
    splits: dict[int, list[int]] = {}
    for number, branch in enumerate(branches):
        if number not in inner:
            splits.setdefault(branch.before, []).append(number)
    gone: set[int] = set()
    for numbers in splits.values():
        ranked = sorted(numbers, key=lambda i: -branches[i].value)
        count = max(1, int(len(ranked) * cfg.keep_share))
        worst = count // 2 if cfg.keep == "best_and_worst" else 0
        gone |= set(ranked[count - worst : len(ranked) - worst])
    return gone


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
    for number in _pruned(branches, cfg):
        found[number] = 0.0
    return found
