"""Advantages and targets from values of tokens: generalized advantage estimation and temporal differences.

No gradient flows through here. Legend: S sequences, N tokens, L tokens of the longest sequence.
"""

import numpy as np
import torch
from torch import Tensor

from data_contracts.advantages import FrozenValue, Gae
from models.tokens import select, sequence_lengths


def token_rewards(rewards: Tensor, penalty: Tensor | None, mask: Tensor, sequence: Tensor) -> Tensor:
    """Return the reward of each token [N]: that of its sample on the last token in the mask, less its penalty.

    Args:
        rewards: [S] raw rewards.
        penalty: [N] taken off token by token; None takes nothing.
        mask: [N] bool.
        sequence: [N] int64; a sequence's tokens stand together.
    """
    places = torch.arange(len(sequence))
    last = torch.full((len(rewards),), -1).scatter_reduce(0, sequence[mask], places[mask], "amax")
    found = torch.zeros(len(sequence), dtype=torch.float64) if penalty is None else -select(mask, penalty.double())
    known = last >= 0
    return found.index_add(0, last[known], rewards[known].double())


def following(values: Tensor, sequence: Tensor) -> Tensor:
    """Return the value of each token's successor in its sequence, 0 for the last one; all [n], none left out."""
    after = torch.zeros_like(values)
    after[:-1] = torch.where(sequence[1:] == sequence[:-1], values[1:], torch.zeros_like(values[1:]))
    return after


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, sequence: Tensor, *, discount: float, trace: float | Tensor
) -> Tensor:
    """Return a_t = d_t + discount trace a_next, d_t = r_t + discount V_next - V_t, of the tokens in the mask, else 0.

    Tokens outside the mask are skipped: `next` is the next one inside, and V_next after the last one is 0.

    Args:
        rewards: [N] by token.
        values: [N] of the state in which the token was sampled.
        mask: [N] bool.
        sequence: [N] int64; a sequence's tokens stand together.
        discount: by token.
        trace: lambda, of all sequences or [S] of each.

    Returns:
        [N] float64.
    """
    own, value = sequence[mask], values[mask].double()
    delta = rewards[mask].double() + discount * following(value, own) - value
    lengths = torch.bincount(own) if len(own) else torch.zeros(1, dtype=torch.int64)
    column = torch.arange(len(own)) - (lengths.cumsum(0) - lengths)[own]
    table = np.zeros((int(lengths.max()), len(lengths)))
    table[column.numpy(), own.numpy()] = delta.numpy()
    decay = discount * (trace[: len(lengths)].double().numpy() if isinstance(trace, Tensor) else trace)
    for row in range(len(table) - 2, -1, -1):  # the places behind a sequence's end hold 0
        table[row] += decay * table[row + 1]
    found = torch.zeros(len(mask), dtype=torch.float64)
    found[mask] = torch.from_numpy(table[column.numpy(), own.numpy()])
    return found


def traces(cfg: Gae, mask: Tensor, sequence: Tensor, num_sequences: int) -> float | Tensor:
    """Return lambda of the advantages: one number, or by length [S]."""
    if cfg.trace_by_length is None:
        return cfg.trace
    lengths = sequence_lengths(mask, sequence, num_sequences).double()
    return (1 - 1 / (cfg.trace_by_length * lengths.clamp(min=1))).clamp(min=0)


def targets(
    cfg: Gae | FrozenValue, rewards: Tensor, values: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int
) -> Tensor:
    """Return what the value of each token should have been [N] float64: lambda-returns, or one step of bootstrap."""
    if isinstance(cfg, FrozenValue):
        found = torch.zeros(len(mask), dtype=torch.float64)
        found[mask] = rewards[mask] + cfg.discount * following(values[mask].double(), sequence[mask])
        return found
    trace = traces(cfg, mask, sequence, num_sequences) if cfg.return_trace is None else cfg.return_trace
    raw = gae(rewards, values, mask, sequence, discount=cfg.discount, trace=trace)
    return raw + select(mask, values.double())
