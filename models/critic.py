"""A value model: what reward the rest of a response will bring, token by token.

A small network on hidden states: those of the policy, of version 0, or of a trunk of its own. It has its own
parameters, optimizer, clip and checkpoint, no gradient of it reaches the policy, and no version publishes it: weights
and digests are the policy's alone. Values are computed anew at the start of every step by the weights and the value
model of that moment, and are not stored: a replay computes the same. Legend: N tokens, D features, W units.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, silu
from transformers.modeling_utils import PreTrainedModel

from data_contracts.algorithm import AlgorithmConfig, FrozenValue, Gae
from data_contracts.config import TrainConfig
from models.logprobs import head_of
from models.objective import NotFinite
from models.optimizer import Optimizer, Snapshot
from models.packed_attention import Packed
from models.packing import pack, packed_hidden
from models.plan import Microbatch, Update
from models.samples import Sample
from models.step import StepData
from models.values import targets, token_rewards

PREFIX = "critic/"
"""Begins the names of these tensors in a checkpoint."""


class Head(nn.Module):
    """One inner layer over normalized features; every value is 0 at first. The same start in every process."""

    def __init__(self, num_features: int, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.inner: nn.Parameter | None = None
        if width:
            self.inner = nn.Parameter(torch.randn(width, num_features, generator=generator) / num_features**0.5)
            self.inner_bias = nn.Parameter(torch.zeros(width))
        self.outer = nn.Parameter(torch.zeros(width or num_features))
        self.outer_bias = nn.Parameter(torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        """Return values [N] float32 of features [N, D]."""
        found = layer_norm(features.float(), features.shape[-1:])
        if self.inner is not None:
            found = silu(linear(found, self.inner, self.inner_bias))
        return found @ self.outer + self.outer_bias


class Critic:
    """The value model of one trainer, with its optimizer."""

    def __init__(self, algorithm: AlgorithmConfig, model: PreTrainedModel) -> None:
        """Start with values of 0; `algorithm` has a value model, `model` is version 0."""
        if algorithm.value is None:
            raise ValueError(f"advantage {algorithm.advantage.type!r} has no value model")
        self.cfg, self._advantage = algorithm.value, algorithm.advantage
        self.is_frozen_after_warmup = isinstance(algorithm.advantage, FrozenValue)
        self._trunk = copy.deepcopy(model) if self.cfg.trunk == "own" else None
        self._width = head_of(model).weight.shape[1]
        self._head = Head(self._width, self.cfg.width).to(model.device)
        parts = {"head": self._head} if self._trunk is None else {"head": self._head, "trunk": self._trunk}
        rate = TrainConfig(learning_rate=self.cfg.learning_rate, max_grad_norm=self.cfg.max_grad_norm)
        self._optimizer = Optimizer(nn.ModuleDict(parts), rate)
        self._seen = torch.empty(0)
        self._samples: Sequence[Sample] = ()
        self._packs: dict[tuple[int, ...], Packed] = {}

    @property
    def sees_policy(self) -> bool:
        """Whether values are made from hidden states of the policy as it is (those of version 0 are not)."""
        return self._trunk is None and not self.is_frozen_after_warmup

    @property
    def sees_version_0(self) -> bool:
        """Whether values are made from hidden states of version 0."""
        return self._trunk is None and self.is_frozen_after_warmup

    def is_alone(self, version: int) -> bool:
        """Whether in the step from `version` values learn and the policy stays."""
        return version < self.cfg.warmup_steps

    def begin_step(self, data: StepData, model: PreTrainedModel) -> None:
        """Forget the hidden states of the step before, and make room for those of this one's tokens."""
        shape = (len(data.mask) if self._trunk is None else 0, self._width)
        self._seen = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._samples, self._packs = data.samples, {}

    def see(self, at: Tensor, hidden: Tensor) -> None:
        """Take the hidden states [n, D] that values of the tokens at places [n] of the step are made from."""
        self._seen[at.to(self._seen.device)] = hidden

    @torch.no_grad()
    def look(self, model: PreTrainedModel, parts: Sequence[Microbatch]) -> None:
        """See all tokens of some parts under a model's present weights."""
        for part in parts:
            self.see(part.at, packed_hidden(model, self._packed(part)))

    @torch.no_grad()
    def values(self, parts: Sequence[Microbatch], num_tokens: int) -> Tensor:
        """Return values [N] float32 on the CPU; 0 for tokens that are in no part."""
        found = torch.zeros(num_tokens)
        for part in parts:
            found[part.at] = self._head(self._features(part)).cpu()
        return found

    def learn_step(self, data: StepData, plan: Sequence[Update]) -> dict[str, float]:
        """Learn from a step, in as many parts as the policy; return what there is to measure.

        Args:
            data: with the values of the step's start.
            plan: the policy's updates.

        Raises:
            NotFinite: a loss or its gradient is not finite.
        """
        if data.values is None or not isinstance(self._advantage, Gae | FrozenValue):
            return {}
        rewards = token_rewards(data.rewards, data.penalty, data.mask, data.sequence)
        wanted = targets(self._advantage, rewards, data.values, data.mask, data.sequence, len(data.samples))
        losses: list[float] = []
        if self.is_alone(data.version) or not self.is_frozen_after_warmup:
            for update in plan:
                losses += [self._learn(update, data.mask, wanted, data.values) for _ in range(self.cfg.updates)]
        return critic_metrics(data.values[data.mask], wanted[data.mask], losses)

    def _learn(self, update: Update, mask: Tensor, wanted: Tensor, old: Tensor) -> float:
        """Move the values of an update's tokens towards what is wanted [N]; return the loss before."""
        self._optimizer.clear_gradient()
        total, count = 0.0, max(int(mask[update.at].sum()), 1)
        for part in update.parts:
            inside = mask[part.at]
            at = part.at[inside]
            values = self._head(self._features(part))[inside.to(self._seen.device)]
            goal, start = (tensor[at].float().to(values.device) for tensor in (wanted, old))
            loss = value_loss(values, goal, start, self.cfg.clip, count)
            loss.backward()
            self._optimizer.collect_gradient()
            total += loss.item()
        norm = self._optimizer.clip_gradient()
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise NotFinite(f"value loss is {total} and its gradient norm {norm}")
        self._optimizer.update(self.cfg.learning_rate)
        self._optimizer.clear_gradient()
        return total

    def _features(self, part: Microbatch) -> Tensor:
        """Return what values of a microbatch's tokens are made from [n, D]."""
        if self._trunk is None:
            return self._seen[part.at.to(self._seen.device)]
        return packed_hidden(self._trunk, self._packed(part))

    def _packed(self, part: Microbatch) -> Packed:
        """Return a microbatch that asks for the states its tokens are sampled in, or that they lead to if judged."""
        if not self.is_frozen_after_warmup:
            return part.packed
        key = tuple(part.members)
        if key not in self._packs:
            self._packs[key] = pack([one_further(self._samples[i]) for i in part.members])
        return self._packs[key]

    def snapshot(self) -> Snapshot:
        """Copy everything that learning changes."""
        return self._optimizer.snapshot()

    def restore(self, before: Snapshot) -> None:
        """Go back, bit for bit."""
        self._optimizer.clear_gradient()
        self._optimizer.restore(before)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds of this, by name."""
        return {f"{PREFIX}{name}": tensor for name, tensor in self._optimizer.state()[0].items()}

    def scalars(self) -> dict[str, Any]:
        """Return the numbers beside the tensors, JSON-able."""
        return self._optimizer.state()[1]

    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Take over what `tensors` and `scalars` returned.

        Raises:
            ContractError: it is of another value model, or there is none.
        """
        self._optimizer.load({name.removeprefix(PREFIX): t for name, t in tensors.items()}, scalars)


def one_further(sample: Sample) -> Sample:
    """Return a sample that asks for the token behind each sampled one: that state knows what was sampled."""
    return replace(
        sample,
        response_ids=np.append(sample.response_ids, sample.response_ids[-1:]),
        action_mask=np.insert(sample.action_mask, 0, False),
    )


def value_loss(values: Tensor, targets: Tensor, old: Tensor, clip: float | None, count: int) -> Tensor:
    """Return half the squared error [n] by `count`; with a clip, that of the worse one of V and V kept near the old.

    The clipped error has no gradient once a value has moved further than `clip` towards its target: the larger one of
    (V - R)^2 and (clip(V, old - c, old + c) - R)^2.
    """
    error = (values - targets) ** 2
    if clip is not None:
        error = torch.maximum(error, (values.clamp(old - clip, old + clip) - targets) ** 2)
    return 0.5 * error.sum() / count


def explained_variance(values: Tensor, targets: Tensor) -> float:
    """Return 1 - var(target - value) / var(target) of tokens [n]; 0 where targets do not vary."""
    spread = targets.double().var(correction=0) if len(targets) else torch.zeros(())
    if not spread > 0:
        return 0.0
    return float(1 - (targets.double() - values.double()).var(correction=0) / spread)


def critic_metrics(values: Tensor, targets: Tensor, losses: Sequence[float]) -> dict[str, float]:
    """Measure values of the step's start against their targets, on the tokens [n] of the loss."""
    metrics = {"critic/loss": sum(losses) / len(losses)} if losses else {}
    if len(values):
        metrics |= {
            "critic/explained_variance": explained_variance(values, targets),
            "critic/value_mean": values.double().mean().item(),
            "critic/target_mean": targets.double().mean().item(),
        }
    return metrics
