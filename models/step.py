"""The tokens of one training step, flat, with what is fixed before the first forward pass.

Legend: S samples, N sampled tokens (one after the other, sample by sample), K groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from data_contracts.algorithm import AlgorithmConfig
from models.advantages import ADVANTAGES, Outcomes
from models.samples import Sample
from models.structure import Structure, structure_of
from models.tokens import TokenBatch


@dataclass(frozen=True, slots=True)
class StepData:
    """Samples of a step and their sampled tokens; only these tokens can be in the loss."""

    samples: tuple[Sample, ...]
    offsets: np.ndarray
    """[S + 1] int64: sample i owns tokens offsets[i] to offsets[i + 1]."""
    group: Tensor
    """[S] int64, 0 to num_groups - 1."""
    num_groups: int
    rewards: Tensor
    """[S] float64."""
    behavior: Tensor
    """[N] float32 nats."""
    versions: Tensor
    """[N] int64."""
    fresh: Tensor
    """[N] bool, False where the token is too old for the loss."""
    mask: Tensor
    """[N] bool, True where the token is in the loss."""
    sequence: Tensor
    """[N] int64, index of the token's sample."""
    advantages: Tensor
    """[N] float32."""
    version: int
    """Version of the weights at the start of the step."""
    components: Mapping[str, Tensor] = field(default_factory=dict)
    """[S] float64 by name of the reward component, NaN for a sample that lacks it."""
    penalty: Tensor | None = None
    """[N] float64 to be taken off the rewards token by token; None takes nothing."""
    values: Tensor | None = None
    """[N] float32 by the value model at the step's start; None where there is none."""
    score_weights: Tensor | None = None
    """[S] float64, see models/scores.py; None where nobody measured gradients."""
    token_scores: Tensor | None = None
    """[N] float64, see models/scores.py, times squared importance weights; None where nobody measured them."""
    structure: Structure | None = None
    """Turns and branches."""
    guided: Tensor | None = None
    """[S] bool, True where the behavior policy had guidance in its prompt; None for nowhere."""
    greedy: Tensor | None = None
    """[S] bool, True for greedy responses, none of whose tokens is in the loss; None for nowhere."""
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[S] response tokens, of whatever origin."""
    is_truncated: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    """[S] True where the limit on a response cut it off."""
    is_reused: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    """[S] True where the sample has been trained before, under a bound of its own on the age of its tokens."""

    def tokens_of(self, members: Sequence[int]) -> Tensor:
        """Return the places [n] in the flat arrays of all tokens of some samples, in the order of the samples."""
        ranges = [np.arange(self.offsets[i], self.offsets[i + 1]) for i in members]
        return torch.from_numpy(np.concatenate(ranges) if ranges else np.zeros(0, np.int64))

    def token_batch(
        self,
        members: Sequence[int],
        at: Tensor,
        logp: Tensor,
        start: Tensor,
        entropy: Tensor,
        *,
        anchor: Tensor | None = None,
        reference: Tensor | None = None,
        num_groups: int | None = None,
        entropy_coefficient: float = 0.0,
    ) -> TokenBatch:
        """Return what a loss sees of some samples, the behavior policy in the place of the proximal one.

        Args:
            members: the samples, by index.
            at: `tokens_of(members)`.
            logp: [n] under the current weights.
            start: [n] under the weights of the step's start, NaN where unknown.
            entropy: [n].
            anchor: [n] under the averaged or earlier weights, None where unknown.
            reference: [n] under version 0, None where unknown.
            num_groups: of the whole update; None takes those of the step.
            entropy_coefficient: of an adaptive entropy bonus.
        """
        device = logp.device
        chosen = torch.tensor(members, dtype=torch.int64)
        local = torch.zeros(len(self.samples), dtype=torch.int64)
        local[chosen] = torch.arange(len(members))
        groups = torch.zeros(self.num_groups, dtype=torch.int64)
        groups[self.group[chosen]] = 1
        group = (groups.cumsum(0) - 1)[self.group[chosen]]
        unknown = torch.full_like(start, torch.nan)
        behavior = self.behavior[at].to(device)
        return TokenBatch(
            logp=logp,
            proximal=behavior,
            start=start.to(device),
            anchor=(unknown if anchor is None else anchor).to(device),
            reference=(unknown if reference is None else reference).to(device),
            behavior=behavior,
            advantages=self.advantages[at].to(device),
            mask=self.mask[at].to(device),
            sequence=local[self.sequence[at]].to(device),
            num_sequences=len(members),
            rewards=self.rewards[chosen].float().to(device),
            group=group.to(device),
            num_groups=self.num_groups if num_groups is None else num_groups,
            versions=self.versions[at].to(device),
            version=self.version,
            entropy=entropy,
            entropy_coefficient=entropy_coefficient,
            guided=None if self.guided is None else self.guided[chosen].to(device),
        )

    def knowing(self, algorithm: AlgorithmConfig, **found: Tensor) -> "StepData":
        """Return the step with what was found of it, and the advantages that follow.

        Args:
            algorithm: says how.
            found: `penalty`, `values`, `score_weights` or `token_scores`.
        """
        known = replace(self, **found)
        return replace(known, advantages=_advantages(known, algorithm))


def step_data(
    groups: Sequence[Sequence[Sample]], algorithm: AlgorithmConfig, *, version: int, max_staleness: int | None
) -> StepData:
    """Flatten groups, decide which tokens are in the loss, and compute advantages.

    A token is in the loss when the policy sampled it at most `max_staleness` versions before `version`, or as many as
    its sample's own bound says (and, with `truncated` mask, when its response was not cut off). Greedy responses are
    not in the loss.
    """
    samples = tuple(sample for group in groups for sample in group)
    acted = [np.asarray(s.action_mask, bool) for s in samples]
    counts = np.array([int(a.sum()) for a in acted], np.int64)
    sequence = torch.from_numpy(np.repeat(np.arange(len(samples)), counts))
    versions = torch.from_numpy(_flat([s.policy_versions for s in samples], acted, np.int64))
    fresh = torch.ones_like(versions, dtype=torch.bool)
    is_reused = np.array([s.max_age is not None for s in samples], bool)
    is_truncated = np.array([s.finish_reason == "length" for s in samples], bool)
    if max_staleness is not None or is_reused.any():
        run_bound = version if max_staleness is None else max_staleness
        bounds = torch.tensor([run_bound if s.max_age is None else s.max_age for s in samples], dtype=torch.int64)
        fresh = version - versions <= bounds[sequence]
    mask = fresh
    if algorithm.truncated == "mask":
        mask = fresh & ~torch.from_numpy(is_truncated)[sequence]
    greedy = torch.tensor([s.is_greedy for s in samples], dtype=torch.bool)
    if greedy.any():
        mask = mask & ~greedy[sequence]
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    group = torch.from_numpy(np.repeat(np.arange(len(groups)), [len(g) for g in groups]))
    guided = torch.tensor([s.is_guided for s in samples], dtype=torch.bool)
    data = StepData(
        samples=samples,
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        group=group,
        num_groups=len(groups),
        rewards=rewards,
        behavior=torch.from_numpy(_flat([s.behavior_logprobs for s in samples], acted, np.float32)),
        versions=versions,
        fresh=fresh,
        mask=mask,
        sequence=sequence,
        advantages=torch.zeros(len(sequence)),
        version=version,
        components=_components(samples),
        structure=structure_of(samples, group, torch.from_numpy(_positions(acted))),
        guided=guided if guided.any() else None,
        greedy=greedy if greedy.any() else None,
        lengths=np.array([len(s.response_ids) for s in samples], np.int64),
        is_truncated=is_truncated,
        is_reused=is_reused,
    )
    return replace(data, advantages=_advantages(data, algorithm))


def _advantages(data: StepData, algorithm: AlgorithmConfig) -> Tensor:
    outcomes = Outcomes(
        data.rewards,
        data.group,
        data.num_groups,
        data.mask,
        data.sequence,
        data.components,
        data.score_weights,
        data.penalty,
        data.values,
        data.structure,
        data.token_scores,
        data.behavior,
        data.greedy,
    )
    return ADVANTAGES[type(algorithm.advantage)](outcomes, algorithm.advantage).float()


def _components(samples: Sequence[Sample]) -> dict[str, Tensor]:
    names = sorted({name for sample in samples for name in sample.components})
    return {
        name: torch.tensor([s.components.get(name, float("nan")) for s in samples], dtype=torch.float64)
        for name in names
    }


def _positions(acted: list[np.ndarray]) -> np.ndarray:
    """Return the place of every sampled token in its response."""
    return np.concatenate([np.flatnonzero(mask) for mask in acted]) if acted else np.zeros(0, np.int64)


def _flat(arrays: list[np.ndarray], acted: list[np.ndarray], dtype: type) -> np.ndarray:
    parts = [np.asarray(array)[mask] for array, mask in zip(arrays, acted, strict=True)]
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
