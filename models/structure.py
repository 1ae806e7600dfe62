"""What a response is made of: turns, and branches that it shares with other samples of its group.

Legend: S samples, N sampled tokens (one after the other, sample by sample), E branches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.samples import Sample


@dataclass(frozen=True, slots=True)
class Structure:
    """Where tokens stand in their responses, and responses in their groups."""

    position: Tensor
    """[N] int64, place of the token in its response."""
    parent: Tensor
    """[S] int64, the sample of the step whose response this one shares the beginning of; -1 for none."""
    branch_at: Tensor
    """[S] int64, leading response tokens that it shares; 0 without a parent."""

    def turns(self, sequence: Tensor) -> Tensor:
        """Return the turn [N] that each token belongs to, from 0: tokens without a gap between them are one turn."""
        if not len(sequence):
            return torch.zeros_like(sequence)
        starts = torch.ones_like(sequence, dtype=torch.bool)
        same = sequence[1:] == sequence[:-1]
        starts[1:] = ~(same & (self.position[1:] == self.position[:-1] + 1))
        count = starts.long().cumsum(0)
        first = torch.ones_like(starts)
        first[1:] = ~same
        return count - count[first][sequence_index(sequence)]


def sequence_index(sequence: Tensor) -> Tensor:
    """Return for each token which of the sequences that have one it belongs to, counted from 0."""
    return torch.unique_consecutive(sequence, return_inverse=True)[1]


def structure_of(samples: Sequence[Sample], group: Tensor, positions: Tensor) -> Structure:
    """Find the sample of the step from which every other one branched off, itself having sampled the token before.

    A parent that is not in the step (it failed, or was left out) counts for none.

    Args:
        samples: of the step; a parent stands before its branches.
        group: [S].
        positions: [N] of sampled tokens in their responses.
    """
    by_name: dict[tuple[int, int, int], int] = {}
    parents, shared = [], []
    for i, (sample, number) in enumerate(zip(samples, group.tolist(), strict=True)):
        parent = by_name.get((number, sample.ticket, sample.branch_of), -1)
        while parent >= 0 and sample.branch_at <= shared[parent]:
            parent = parents[parent]
        parents.append(parent)
        shared.append(sample.branch_at if parent >= 0 else 0)
        by_name[number, sample.ticket, sample.sample] = i
    return Structure(positions, torch.tensor(parents, dtype=torch.int64), torch.tensor(shared, dtype=torch.int64))


@dataclass(slots=True)
class Branch:
    """A stretch of one sample's response between two places where samples branch off."""

    sample: int
    start: int
    """First response token."""
    depth: int
    """Branchings before it, and one."""
    before: int
    """The branch that it goes on from; -1 for the prompt."""
    rewards: list[float] = field(default_factory=list)
    """Of the samples that share it."""

    @property
    def value(self) -> float:
        """Mean reward of the samples that share it."""
        return sum(self.rewards) / len(self.rewards)


def branches_of(members: Sequence[int], structure: Structure, rewards: Tensor) -> list[Branch]:
    """Cut the responses of one group into branches.

    Args:
        members: samples of the group; a parent stands before its branches.
        structure: of the step.
        rewards: [S].

    Returns:
        Branches, those of a sample together and from left to right.
    """
    parent, shared = structure.parent.tolist(), structure.branch_at.tolist()
    children: dict[int, list[int]] = {}
    for i in members:
        children.setdefault(parent[i], []).append(i)
    found: list[Branch] = []
    of_sample: dict[int, list[int]] = {}
    for i in members:
        cuts = sorted({shared[i], *(shared[c] for c in children.get(i, []) if shared[c] > shared[i])})
        before, depth = -1, 1
        if parent[i] >= 0:
            before = [b for b in of_sample[parent[i]] if found[b].start < shared[i]][-1]
            depth = found[before].depth + 1
        of_sample[i] = []
        for start in cuts:
            found.append(Branch(i, start, depth, before))
            before, depth = len(found) - 1, depth + 1
            of_sample[i].append(before)
    for i in members:  # a sample's reward counts for every branch from the prompt to its end
        at = of_sample[i][-1]
        while at >= 0:
            found[at].rewards.append(float(rewards[i]))
            at = found[at].before
    return found
