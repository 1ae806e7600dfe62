"""Which samples go into which update, and into which forward pass of it.

Legend: n sampled tokens of a microbatch.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.packing import Packed, microbatches, pack
from models.step import StepData


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Samples of one forward pass."""

    members: list[int]
    """Samples, by index in the step."""
    at: Tensor
    """[n] places of their tokens in the step's flat arrays."""
    packed: Packed


@dataclass(frozen=True, slots=True)
class Update:
    """Samples of one optimizer update."""

    parts: list[Microbatch]
    num_samples: int
    """Samples of its groups, those without a token in the loss included."""
    num_groups: int

    @property
    def at(self) -> Tensor:
        """Places of all its tokens in the step's flat arrays."""
        return torch.cat([part.at for part in self.parts])


def plan_updates(data: StepData, *, inner_updates: int, tokens_per_microbatch: int) -> list[Update]:
    """Split the step's groups over the updates and each update into microbatches; empty updates drop out."""
    bounds = np.linspace(0, data.num_groups, inner_updates + 1).round().astype(int)
    in_loss = torch.zeros(len(data.samples), dtype=torch.bool)
    in_loss[data.sequence[data.mask]] = True
    plan = []
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        inside = (data.group >= int(start)) & (data.group < int(stop))
        chosen = torch.nonzero(inside & in_loss)[:, 0].tolist()
        parts = microbatches([data.samples[i] for i in chosen], tokens_per_microbatch)
        members = [[chosen[i] for i in part] for part in parts]
        packed = [Microbatch(m, data.tokens_of(m), pack([data.samples[i] for i in m])) for m in members]
        plan += [Update(packed, int(inside.sum()), int(stop - start))] if packed else []
    return plan
