"""The tokens of a batch as flat tensors, and sums over its sequences.

N sampled tokens of S sequences, one after the other without padding. `sequence` says which sequence a token
belongs to. Tokens outside `mask` carry arbitrary values (NaN included): everything here selects, nothing
multiplies by a mask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus or minus this before they are exponentiated."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What a loss may look at. Only `logp` and `entropy` carry a gradient."""

    logp: Tensor
    """[N] nats, under the current weights."""
    proximal: Tensor
    """[N] nats, under the proximal policy."""
    start: Tensor
    """[N] nats, under the weights of the step's start; NaN where nobody computed it."""
    anchor: Tensor
    """[N] nats, under the averaged or earlier weights that the trainer keeps; NaN where nobody computed it."""
    reference: Tensor
    """[N] nats, under version 0; NaN where nobody computed it."""
    behavior: Tensor
    """[N] nats, as recorded when the token was sampled."""
    advantages: Tensor
    """[N] in units of reward, or of its standard deviation."""
    mask: Tensor
    """[N] bool, True where the token is in the loss."""
    sequence: Tensor
    """[N] int64, index of the token's sequence."""
    num_sequences: int
    """S, sequences without any token included."""
    rewards: Tensor
    """[S] raw rewards."""
    group: Tensor
    """[S] int64, 0 to num_groups - 1."""
    num_groups: int
    """Groups of the whole update, those without a token in the loss included."""
    versions: Tensor
    """[N] int64, version of the weights that sampled the token."""
    version: int
    """Version of the weights at the start of the step."""
    entropy: Tensor
    """[N] nats, of the distribution that the token was drawn from."""
    entropy_coefficient: float = 0.0
    """Present coefficient of an adaptive entropy bonus (loss per nat)."""
    guided: Tensor | None = None
    """[S] bool, True where the behavior policy had guidance in its prompt; None for nowhere."""


def select(mask: Tensor, values: Tensor) -> Tensor:
    """Return `values` where `mask`, else 0; neither value nor gradient of the rest can leak."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """Return the clamped difference of two log-probabilities [N], 0 outside the mask."""
    return (select(mask, numerator) - select(mask, denominator)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sum(values: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Return the sum [S] over each sequence's tokens in the mask."""
    total = torch.zeros(num_sequences, dtype=values.dtype, device=values.device)
    return total.index_add(0, sequence, select(mask, values))


def sequence_lengths(mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Return the number [S] of each sequence's tokens in the mask, as int64."""
    return torch.zeros(num_sequences, dtype=torch.int64, device=mask.device).index_add(0, sequence, mask.long())


def sequence_mean(values: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Return the mean [S] over each sequence's tokens in the mask, 0 for a sequence without any."""
    lengths = sequence_lengths(mask, sequence, num_sequences).clamp(min=1)
    return sequence_sum(values, mask, sequence, num_sequences) / lengths


def to_rows(values: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int, fill: float) -> tuple[Tensor, Tensor]:
    """Return a table [S, L] of each sequence's tokens from left to right, and the column [N] of each token.

    Tokens outside the mask and places behind a sequence's end hold `fill`. A sequence's tokens stand together.
    """
    every = torch.ones_like(mask)
    lengths = sequence_lengths(every, sequence, num_sequences)
    starts = lengths.cumsum(0) - lengths
    order = torch.argsort(sequence, stable=True)
    column = torch.empty_like(sequence)
    column[order] = torch.arange(len(sequence), device=sequence.device) - starts[sequence[order]]
    longest = max(int(lengths.max()), 1) if num_sequences else 1
    rows = torch.full((num_sequences, longest), fill, dtype=values.dtype, device=values.device)
    filler = torch.full_like(values, fill)
    return rows.index_put((sequence, column), torch.where(mask, values, filler)), column


def before(table: Tensor, sequence: Tensor, column: Tensor, first: float) -> Tensor:
    """Return for each token [N] what a table [S, L] holds one column to the left; `first` in the first column."""
    left = table[sequence, (column - 1).clamp(min=0)]
    return torch.where(column > 0, left, torch.full_like(left, first))
