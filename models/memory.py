"""What a trainer remembers from step to step beside weights and optimizer: other weights, and entropies.

All of it goes into checkpoints, except the reference, which is what the trainer was made with. Nothing here is
changed in place, so a state that was taken before a step is the way back.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from data_contracts.algorithm import (
    AdaptiveEntropy,
    AlgorithmConfig,
    EwmaProximal,
    FrozenValue,
    KlPenalty,
    SlowFastUpdate,
    SnapshotProximal,
)
from data_contracts.errors import ContractError

Named = Mapping[str, Tensor]

PREFIX = "memory/"
"""Begins the names of these tensors in a checkpoint."""


@dataclass(frozen=True, slots=True)
class State:
    """Everything that is remembered."""

    average: Named = field(default_factory=dict)
    """Weights averaged over updates, float32 by name; empty when nobody asks for them."""
    mass: float = 1.0
    """Sum of the weights of that average."""
    snapshots: Mapping[int, Named] = field(default_factory=dict)
    """Weights by version, in the model's format."""
    entropies: tuple[float, ...] = ()
    """Mean entropy of the last steps (nats), oldest first."""
    coefficient: float = 0.0
    """Coefficient of the adaptive entropy bonus (loss per nat)."""


class Memory:
    """Follows the weights of one trainer."""

    def __init__(self, parameters: Named, masters: Named, algorithm: AlgorithmConfig) -> None:
        self._parameters, self._masters = parameters, masters
        self._proximal, self._update = algorithm.proximal, algorithm.update
        self._bonus = next((r for r in algorithm.regularizers if isinstance(r, AdaptiveEntropy)), None)
        is_near = any(isinstance(r, KlPenalty) and r.towards == "reference" for r in algorithm.regularizers)
        is_judge = isinstance(algorithm.advantage, FrozenValue) and algorithm.advantage.value.trunk == "policy"
        self.compares_with_reference = bool(is_near or algorithm.loss.uses_reference or algorithm.reward_kl)
        """Whether log-probabilities under version 0 are asked for."""
        self.reference = _copy(parameters) if self.compares_with_reference or is_judge else None
        """Weights of version 0, or None when nobody asks for them."""
        average = _copy(masters) if isinstance(self._proximal, EwmaProximal) else {}
        self.state = State(average=average)

    def begin_step(self, version: int) -> None:
        """Take the weights of the step's start."""
        if isinstance(self._proximal, SnapshotProximal):
            kept = {v: w for v, w in self.state.snapshots.items() if version - self._proximal.lag <= v < version}
            self.state = replace(self.state, snapshots={**kept, version: _copy(self._parameters)})

    def after_update(self) -> None:
        """Take the weights after an optimizer update: average <- average d W / W' + new / W', W' = d W + 1."""
        if isinstance(self._proximal, EwmaProximal):
            before = self._proximal.decay * self.state.mass
            mass = before + 1
            average = {
                name: (old * (before / mass)).add_(self._masters[name].detach(), alpha=1 / mass)
                for name, old in self.state.average.items()
            }
            self.state = replace(self.state, average=average, mass=mass)

    def after_step(self, entropy: float) -> None:
        """Take the mean entropy of a step that trained (nats)."""
        window = self._update.window if isinstance(self._update, SlowFastUpdate) else 1
        coefficient = self.state.coefficient
        if self._bonus is not None:
            change = self._bonus.change if entropy <= self._bonus.target else -self._bonus.change
            coefficient = min(max(coefficient + change, 0.0), self._bonus.largest)
        if self._bonus is not None or isinstance(self._update, SlowFastUpdate):
            entropies = (*self.state.entropies, entropy)[-window:]
            self.state = replace(self.state, entropies=entropies, coefficient=coefficient)

    @property
    def proximal(self) -> Named | None:
        """The weights of the proximal policy, when they are others than those of the step's start."""
        if isinstance(self._proximal, EwmaProximal):
            return self.state.average
        if isinstance(self._proximal, SnapshotProximal):
            return self.state.snapshots[min(self.state.snapshots)]
        return None

    @property
    def entropy_coefficient(self) -> float:
        """What an adaptive entropy bonus counts in this step: 0 unless the last entropy was at most the target."""
        entropies = self.state.entropies
        if self._bonus is None or not entropies or entropies[-1] > self._bonus.target:
            return 0.0
        return self.state.coefficient

    @property
    def entropy_is_unusual(self) -> bool:
        """Whether the last step's entropy lies far from those before it."""
        *usual, last = self.state.entropies or (0.0,)
        if not isinstance(self._update, SlowFastUpdate) or len(usual) < 2:
            return False
        values = torch.tensor(usual, dtype=torch.float64)
        return bool((last - values.mean()).abs() >= self._update.limit * values.std().clamp(min=1e-12))

    @contextmanager
    def standing_in(self, weights: Named) -> Iterator[None]:
        """Have the model compute with other weights meanwhile; its own come back untouched."""
        own = {name: parameter.data for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.data = weights[name].to(parameter.dtype)
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = own[name]

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds of this, by name."""
        found = {f"{PREFIX}average/{name}": tensor for name, tensor in self.state.average.items()}
        for version, weights in self.state.snapshots.items():
            found |= {f"{PREFIX}snapshot/{version}/{name}": tensor for name, tensor in weights.items()}
        return found

    def scalars(self) -> dict[str, Any]:
        """Return the numbers beside the tensors, JSON-able; empty when nothing is remembered."""
        state = self.state
        if not (state.average or state.snapshots or state.entropies):
            return {}
        return {"mass": state.mass, "entropies": list(state.entropies), "coefficient": state.coefficient}

    def load(self, tensors: Named, scalars: Mapping[str, Any]) -> None:
        """Take over what `tensors` and `scalars` returned.

        Raises:
            ContractError: an average is missing, or of another model.
        """
        average: dict[str, Tensor] = {}
        snapshots: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kind, _, rest = name.removeprefix(PREFIX).partition("/")
            if kind == "average":
                average[rest] = tensor.clone()
            else:
                version, _, parameter = rest.partition("/")
                snapshots.setdefault(int(version), {})[parameter] = tensor.clone()
        for held in (*([average] if self.state.average else []), *snapshots.values()):
            if held.keys() != self._parameters.keys():
                raise ContractError("checkpoint: expected kept weights for every parameter of this model")
        self.state = State(
            average=average,
            mass=float(scalars.get("mass", 1.0)),
            snapshots=snapshots,
            entropies=tuple(float(value) for value in scalars.get("entropies", ())),
            coefficient=float(scalars.get("coefficient", 0.0)),
        )


def _copy(weights: Named) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}
