"""Which samples go into which update, and into which forward pass of it, by which rank.

Legend: n sampled tokens of a microbatch.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.packing import Packed, even_microbatches, pack
from models.step import StepData


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Samples of one forward pass."""

    members: list[int]
    """Samples, by index in the step."""
    at: Tensor
    """[n] places of their tokens in the step's flat arrays."""
    packed: Packed
    counts: bool = True
    """Whether the result is used; otherwise it repeats another rank's, so that all ranks do as many."""


@dataclass(frozen=True, slots=True)
class Update:
    """Samples of one optimizer update."""

    members: list[int]
    """Samples with a token in the loss, microbatch by microbatch, of all ranks."""
    at: Tensor
    """Places of all their tokens in the step's flat arrays."""
    parts: list[Microbatch]
    """Those of this rank."""
    num_samples: int
    """Samples of its groups, those without a token in the loss included, greedy ones left out."""
    num_groups: int

    @property
    def is_one_part(self) -> bool:
        """Whether a single microbatch holds all of it."""
        return len(self.members) == len(self.parts[0].members)


def plan_updates(
    data: StepData, *, inner_updates: int, tokens_per_microbatch: int, rank: int = 0, num_ranks: int = 1
) -> list[Update]:
    """Split the step's groups over the updates and each update into microbatches; empty updates drop out.

    All ranks get as many microbatches: where there is none left, the last is repeated and does not count.
    """
    bounds = np.linspace(0, data.num_groups, inner_updates + 1).round().astype(int)
    in_loss = torch.zeros(len(data.samples), dtype=torch.bool)
    in_loss[data.sequence[data.mask]] = True
    plan, sampled = [], torch.ones_like(in_loss) if data.greedy is None else ~data.greedy
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        inside = (data.group >= int(start)) & (data.group < int(stop))
        chosen = torch.nonzero(inside & in_loss)[:, 0].tolist()
        if not chosen:
            continue
        batches = even_microbatches([data.samples[i] for i in chosen], tokens_per_microbatch, num_ranks)
        batches = [[chosen[i] for i in batch] for batch in batches]
        members = [i for batch in batches for i in batch]
        own = range(rank, len(batches) + (-len(batches)) % num_ranks, num_ranks)
        parts = [_microbatch(data, batches[min(i, len(batches) - 1)], i < len(batches)) for i in own]
        plan.append(Update(members, data.tokens_of(members), parts, int((inside & sampled).sum()), int(stop - start)))
    return plan


def _microbatch(data: StepData, members: list[int], counts: bool) -> Microbatch:
    return Microbatch(members, data.tokens_of(members), pack([data.samples[i] for i in members]), counts)
