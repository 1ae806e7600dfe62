"""From token losses to one number, with denominators of the whole update so that microbatches add up.

Legend: S sequences, N tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from data_contracts.algorithm import ConstantNorm, SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean
from models.tokens import TokenBatch, select, sequence_mean


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the whole optimizer update, all its microbatches together."""

    num_tokens: int
    """Tokens in the loss, before importance weights drop any."""
    num_nonempty: int
    """Sequences with at least one token in the loss."""
    num_sequences: int
    """Sequences."""


def token_mean(loss: Tensor, batch: TokenBatch, cfg: TokenMean, totals: Totals) -> Tensor:
    """Return the sum over tokens by the number of tokens."""
    del cfg
    return select(batch.mask, loss).sum() / max(totals.num_tokens, 1)


def seq_mean_token_mean(loss: Tensor, batch: TokenBatch, cfg: SequenceMeanTokenMean, totals: Totals) -> Tensor:
    """Return the sum over sequences of their token means, by the number of sequences."""
    means = sequence_mean(loss, batch.mask, batch.sequence, batch.num_sequences)
    return means.sum() / max(totals.num_sequences if cfg.count_empty else totals.num_nonempty, 1)


def seq_mean_token_sum(loss: Tensor, batch: TokenBatch, cfg: SequenceMeanTokenSum, totals: Totals) -> Tensor:
    """Return the sum over tokens by the number of sequences."""
    count = totals.num_sequences if cfg.count_empty else totals.num_nonempty
    return select(batch.mask, loss).sum() / max(count, 1)


def constant_norm(loss: Tensor, batch: TokenBatch, cfg: ConstantNorm, totals: Totals) -> Tensor:
    """Return the sum over tokens by the number of sequences times the constant length."""
    return select(batch.mask, loss).sum() / (max(totals.num_sequences, 1) * cfg.length)


def totals_of(mask: Tensor, sequence: Tensor, num_sequences: int) -> Totals:
    """Count tokens and sequences of one update."""
    nonempty = torch.unique(sequence[mask]).numel()
    return Totals(num_tokens=int(mask.sum()), num_nonempty=nonempty, num_sequences=num_sequences)


AGGREGATIONS: dict[type, Callable[..., Tensor]] = {
    TokenMean: token_mean,
    SequenceMeanTokenMean: seq_mean_token_mean,
    SequenceMeanTokenSum: seq_mean_token_sum,
    ConstantNorm: constant_norm,
}
