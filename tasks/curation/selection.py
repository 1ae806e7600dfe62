"""Selections: which responses of a group are trained on, by their rewards alone. Pure functions.

Unlike a rule, a selection finds no fault with the rows that leave; it sees the rows of earlier tickets too that the
group was joined with.
"""

import numpy as np

from data_contracts.config import BalanceRule, ContrastRule


def contrast(rewards: np.ndarray, config: ContrastRule) -> np.ndarray:
    """Return [N] bool: the responses of the pairs that differ most.

    Shuffle-R1 (arXiv 2508.05612): the i-th best is paired with the i-th worst; of the pairs the `keep` share with the
    largest difference stay. As pairs are sorted by their difference already, these are the best and the worst ones.

    >>> contrast(np.array([0.0, 1.0, 0.5, 0.2]), ContrastRule(keep=0.5)).tolist()
    [True, True, False, False]
    """
    order = np.argsort(-rewards, kind="stable")
    pairs = rewards.size // 2
    count = int(np.ceil(config.keep * pairs))
    kept = np.zeros(rewards.size, bool)
    kept[order[:count]] = True
    kept[order[rewards.size - count :]] = count > 0
    return kept


def balance(rewards: np.ndarray, config: BalanceRule) -> np.ndarray:
    """Return [N] bool: all that passed and, where these are fewer than half, as many of the others.

    The first failures stay, in the order of the rows. A group in which none or at least half has passed stays whole.

    >>> balance(np.array([0.0, 0.0, 1.0, 0.0, 0.0]), BalanceRule()).tolist()
    [True, False, True, False, False]
    """
    passed = rewards >= config.solved_at
    count = int(passed.sum())
    if count == 0 or 2 * count >= rewards.size:
        return np.ones(rewards.size, bool)
    kept = passed.copy()
    kept[np.flatnonzero(~passed)[: max(int(count * config.per_pass), 1)]] = True
    return kept
