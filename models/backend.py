"""Where a trainer's model lives: whole in this process, or split over ranks that take every step together.

All ranks of a group are given the same samples and call the same methods in the same order; each does the forward and
backward passes of its own microbatches. Losses have the denominators of the whole update, so gradients add up over the
ranks as they do over microbatches. With one rank nothing of this is to be seen.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from data_contracts.config import TrainConfig
from models.optimizer import Optimizer
from models.packed_attention import Packed
from models.packing import packed_logprobs
from models.policy import Dtype, copy_weights


class Backend(Protocol):
    """What a trainer needs of it. Methods marked *together* are called by all ranks at the same place."""

    rank: int
    """Of this process, 0 to num_ranks - 1."""
    num_ranks: int
    parameters: Mapping[str, Tensor]
    """What forward passes compute with, by name: trainable parameters, or this rank's parts of them."""
    masters: Mapping[str, Tensor]
    """Float32 weights beside them, in the same shapes; the same tensors where the model computes in float32."""

    def logprobs(self, packed: Packed, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """Together: return log-probability and entropy [N] of this rank's tokens (see `packed_logprobs`)."""
        ...

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Together: add the gradient of what this rank's tokens add to the loss; `is_last` of the update."""
        ...

    def clear_gradient(self) -> None:
        """Forget the gradient."""
        ...

    def update(self, rate: float) -> float:
        """Together: move the weights along the clipped gradient; return its norm before clipping.

        With a norm that is not finite the weights are worth nothing afterwards: `restore` them.
        """
        ...

    def broken_gradients(self) -> list[str]:
        """Return the names of parameters whose gradient is not finite, where the gradient is still there."""
        ...

    def broken_weights(self) -> list[str]:
        """Together: return the names of parameters that are not finite."""
        ...

    def step_back(self, start: Mapping[str, Tensor], keep: float) -> None:
        """Move the weights to start + keep (now - start)."""
        ...

    def snapshot(self) -> Any:
        """Copy everything an update changes."""
        ...

    def restore(self, before: Any) -> None:
        """Together: go back to a snapshot, bit for bit."""
        ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Together: return (tensors, scalars) of a checkpoint; on other ranks than the first without tensors."""
        ...

    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Together: take over a checkpoint, whichever backend with however many ranks has written it."""
        ...

    def adopt(self, weights: Mapping[str, Tensor]) -> None:
        """Together: take over weights by name; a master whose rounded value is the same keeps its precision."""
        ...

    def weights(self, dtype: Dtype) -> dict[str, Tensor]:
        """Together: return a copy of all weights by state-dict name; on other ranks than the first nothing."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """Together: return the sum over all ranks."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Together: return a small value of every rank."""
        ...


class TorchBackend:
    """The whole model in this process."""

    rank = 0
    num_ranks = 1

    def __init__(self, model: PreTrainedModel, cfg: TrainConfig) -> None:
        self._model = model
        self._optimizer = Optimizer(model, cfg)
        self.parameters: Mapping[str, Tensor] = self._optimizer.parameters
        self.masters: Mapping[str, Tensor] = self._optimizer.masters
        self.clear_gradient = self._optimizer.clear_gradient
        self.broken_gradients, self.broken_weights = self._optimizer.broken_gradients, self._optimizer.broken_weights
        self.step_back, self.adopt = self._optimizer.step_back, self._optimizer.adopt
        self.snapshot, self.restore = self._optimizer.snapshot, self._optimizer.restore
        self.state, self.load = self._optimizer.state, self._optimizer.load

    def logprobs(self, packed: Packed, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy [N]."""
        return packed_logprobs(self._model, packed, entropy_grad=entropy_grad)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of a loss."""
        del is_last
        loss.backward()
        self._optimizer.collect_gradient()

    def update(self, rate: float) -> float:
        """Move the weights along the clipped gradient, unless its norm, which is returned, is not finite."""
        norm = self._optimizer.clip_gradient()
        if norm < float("inf"):
            self._optimizer.update(rate)
        return norm

    def weights(self, dtype: Dtype) -> dict[str, Tensor]:
        """Return a copy of all weights by state-dict name."""
        return copy_weights(self._model, dtype)

    def sum(self, values: Tensor) -> Tensor:
        """Return the values."""
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return the value alone."""
        return [value]
