"""AdamW over float32 master weights, with a schedule, an undo, and a state that fits into one file.

Where the model computes in bfloat16, masters are copies and the model holds their rounded values; where it
computes in float32 they are the model's own parameters.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from data_contracts.config import TrainConfig
from data_contracts.errors import ContractError

FORMAT = "trainer/1"


def learning_rate(cfg: TrainConfig, version: int, total_steps: int) -> float:
    """Return the learning rate of the step from `version` to `version + 1`.

    It rises linearly over `warmup_steps` commits, then keeps, or falls to `final_fraction` at the last step.
    """
    if version < cfg.warmup_steps:
        return cfg.learning_rate * (version + 1) / cfg.warmup_steps
    if cfg.schedule == "constant":
        return cfg.learning_rate
    span = max(total_steps - 1 - cfg.warmup_steps, 1)
    done = min((version - cfg.warmup_steps) / span, 1.0)
    shape = 1 - done if cfg.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return cfg.learning_rate * (cfg.final_fraction + (1 - cfg.final_fraction) * shape)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies of masters and optimizer state."""

    tensors: dict[str, Tensor]
    updates: int


class Optimizer:
    """Updates the trainable parameters of a model."""

    def __init__(self, model: nn.Module, cfg: TrainConfig) -> None:
        self.max_grad_norm = cfg.max_grad_norm
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {
            name: p if p.dtype == torch.float32 else p.detach().float().requires_grad_()
            for name, p in self.parameters.items()
        }
        self._adamw = torch.optim.AdamW(
            list(self.masters.values()),
            lr=cfg.learning_rate,
            betas=(cfg.beta1, cfg.beta2),
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
            fused=True,
        )
        for master in self.masters.values():  # made here, so that a snapshot has the same tensors from the start
            self._adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    @property
    def updates(self) -> int:
        """Updates made so far."""
        first = next(iter(self.masters.values()))
        return int(self._adamw.state[first]["step"])

    def clear_gradient(self) -> None:
        """Forget the gradient."""
        for tensors in (self.parameters, self.masters):
            for tensor in tensors.values():
                tensor.grad = None

    def collect_gradient(self) -> None:
        """Add the model's gradient to that of the masters in float32, where these are copies."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter and parameter.grad is not None:
                new = parameter.grad.float()
                master.grad = new if master.grad is None else master.grad.add_(new)
                parameter.grad = None

    def clip_gradient(self) -> float:
        """Scale the gradient down to `max_grad_norm`; return its norm before."""
        return torch.nn.utils.clip_grad_norm_(list(self.masters.values()), self.max_grad_norm).item()

    def broken_gradients(self) -> list[str]:
        """Return the names of parameters whose gradient is not finite."""
        grads = {name: master.grad for name, master in self.masters.items()}
        return [name for name, grad in grads.items() if grad is not None and not grad.isfinite().all()]

    def broken_weights(self) -> list[str]:
        """Return the names of parameters that are not finite."""
        # a sum is finite only if every element is, and costs a tenth
        suspects = {name: p for name, p in self.parameters.items() if not p.detach().sum().isfinite()}
        return [name for name, parameter in suspects.items() if not parameter.isfinite().all()]

    def update(self, rate: float) -> None:
        """Move the masters along the gradient and the model with them."""
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._publish()

    @torch.no_grad()
    def step_back(self, start: Mapping[str, Tensor], keep: float) -> None:
        """Move the masters to start + keep (now - start), and the model with them; moments stay."""
        for name, master in self.masters.items():
            master.copy_(torch.lerp(start[name], master, keep))
        self._publish()

    def snapshot(self) -> Snapshot:
        """Copy everything an update changes: 12 bytes a parameter."""
        return Snapshot({name: tensor.clone() for name, tensor in self._tensors().items()}, self.updates)

    def restore(self, before: Snapshot) -> None:
        """Go back, bit for bit."""
        self._load(before.tensors, before.updates)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return (tensors, JSON-able scalars); the tensors are the optimizer's own, not copies."""
        return self._tensors(), {"format": FORMAT, "updates": self.updates}

    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Take over a state, weights included.

        Raises:
            ContractError: it is of another format or another model.
        """
        check_checkpoint({name: tensor.shape for name, tensor in self._tensors().items()}, tensors, scalars)
        self._load(tensors, int(scalars["updates"]))

    def adopt(self, weights: Mapping[str, Tensor]) -> None:
        """Take over the model's weights by name; a master whose rounded value is the same keeps its precision.

        Raises:
            ContractError: a weight is missing or of another shape.
        """
        check_weights({name: parameter.shape for name, parameter in self.parameters.items()}, weights)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                master, given = self.masters[name], weights[name].to(parameter.device).float()
                master.copy_(torch.where(given == parameter.float(), master, given))
        self._publish()

    def _tensors(self) -> dict[str, Tensor]:
        found = {}
        for name, master in self.masters.items():
            state = self._adamw.state[master]
            found[f"weights/{name}"] = master.detach()
            found[f"exp_avg/{name}"] = state["exp_avg"]
            found[f"exp_avg_sq/{name}"] = state["exp_avg_sq"]
        return found

    @torch.no_grad()
    def _load(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        for name, tensor in self._tensors().items():
            tensor.copy_(tensors[name])
        for master in self.masters.values():
            self._adamw.state[master]["step"].fill_(updates)
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])


def check_checkpoint(own: Mapping[str, torch.Size], tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
    """Raise ContractError unless a state is of this format and of a model with these tensors."""
    if scalars.get("format") != FORMAT:
        raise ContractError(f"checkpoint: expected format {FORMAT}, got {scalars.get('format')!r}")
    if own.keys() != tensors.keys():
        odd = sorted(own.keys() ^ tensors.keys())[:4]
        raise ContractError(f"checkpoint: expected the {len(own)} tensors of this model, but {odd} differ")
    for name, shape in own.items():
        if shape != tensors[name].shape or tensors[name].dtype != torch.float32:
            got = f"{tensors[name].dtype} {list(tensors[name].shape)}"
            raise ContractError(f"checkpoint: {name}: expected float32 {list(shape)}, got {got}")


def check_weights(own: Mapping[str, torch.Size], weights: Mapping[str, Tensor]) -> None:
    """Raise ContractError unless there is a weight of its shape for every parameter."""
    odd = [name for name, shape in own.items() if name not in weights or weights[name].shape != shape]
    if odd:
        raise ContractError(f"weights: expected every parameter of this model in its shape, but {odd[:4]} differ")


def checkpoint_to_bytes(tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> bytes:
    """Return a checkpoint as a safetensors file, its scalars as JSON in the header."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save_safetensors(contiguous, metadata={"scalars": json.dumps(dict(scalars), sort_keys=True)})


def checkpoint_from_bytes(body: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, scalars) of `checkpoint_to_bytes`.

    Raises:
        ContractError: the bytes are not such a file.
    """
    try:
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        scalars = json.loads(header["__metadata__"]["scalars"])
        return load_safetensors(body), scalars
    except (ValueError, KeyError, TypeError, SafetensorError) as cause:
        raise ContractError(
            f"checkpoint: expected a safetensors file with scalars, got {len(body)} bytes: {cause}"
        ) from cause
