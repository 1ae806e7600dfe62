"""Log-probability and entropy of given tokens from hidden states, without all the logits at once.

Forward and backward go over the rows in chunks and compute the logits of a chunk again in the backward pass,
so memory is chunk * V instead of N * V. Legend: N rows, D hidden width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.modeling_utils import PreTrainedModel

from data_contracts.errors import ConfigError

MAX_LOGITS = 1 << 22
"""Logits computed at once, in elements."""


@dataclass(frozen=True, slots=True)
class Head:
    """How a model turns hidden states into logits: softcap * tanh(scale * (h W^T + b) / softcap)."""

    weight: Tensor
    """[V, D]."""
    bias: Tensor | None
    """[V]."""
    scale: float = 1.0
    softcap: float | None = None


def head_of(model: PreTrainedModel) -> Head:
    """Read a model's head.

    Raises:
        ConfigError: the output layer is not a linear one.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise ConfigError(
            f"{type(model).__name__}: expected a linear output layer, got {type(layer).__name__}; choose another model"
        )
    scale = getattr(model.config, "logit_scale", None) or 1.0
    scale /= getattr(model.config, "logits_scaling", None) or 1.0
    return Head(layer.weight, layer.bias, scale, getattr(model.config, "final_logit_softcapping", None))


def target_logprobs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: Tensor | None = None,
    *,
    entropy_grad: bool = False,
    max_logits: int = MAX_LOGITS,
) -> tuple[Tensor, Tensor]:
    """Return log-probability of `targets` and entropy of the distribution, [N] float32 each.

    Args:
        hidden: [N, D] in the model's format.
        head: from `head_of`.
        targets: [N] token ids.
        temperature: [N] divides the logits; None is 1.
        entropy_grad: whether the entropy carries a gradient.
        max_logits: logits computed at once, in elements; a row at least.
    """
    chunk = max(1, max_logits // len(head.weight))
    return _TargetLogprobs.apply(
        hidden, head.weight, head.bias, targets, temperature, head.scale, head.softcap, entropy_grad, chunk
    )


@torch.no_grad()
def collisions(
    hidden: Tensor, head: Head, temperature: Tensor | None = None, *, max_logits: int = MAX_LOGITS
) -> Tensor:
    """Return the sum of squared probabilities over the vocabulary, [N] float32; arguments as in `target_logprobs`."""
    found = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    for rows in _chunks(len(hidden), max(1, max_logits // len(head.weight))):
        heat = None if temperature is None else temperature[rows]
        logits, _ = _logits(hidden[rows], head.weight, head.bias, heat, head.scale, head.softcap)
        found[rows] = ((2 * logits).logsumexp(-1) - 2 * logits.logsumexp(-1)).exp()
    return found


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | None,
        scale: float,
        softcap: float | None,
        entropy_grad: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy, log_total = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for rows in _chunks(len(hidden), chunk):
            logits, _ = _logits(
                hidden[rows], weight, bias, None if temperature is None else temperature[rows], scale, softcap
            )
            log_total[rows] = logits.logsumexp(-1)
            logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0] - log_total[rows]
            normal = logits.sub_(log_total[rows, None])
            entropy[rows] = -(normal.exp() * normal.clamp(min=torch.finfo(torch.float32).min)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, log_total, entropy)
        ctx.scale, ctx.softcap, ctx.chunk = scale, softcap, chunk
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        ctx.entropy_grad = entropy_grad
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, temperature, log_total, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for rows in _chunks(len(hidden), ctx.chunk):
            heat = None if temperature is None else temperature[rows]
            logits, slope = _logits(hidden[rows], weight, bias, heat, ctx.scale, ctx.softcap)
            normal = logits.sub_(log_total[rows, None])
            probability = normal.exp()
            grad = probability * -grad_logprobs[rows, None]
            if ctx.entropy_grad:
                pull = normal.clamp_(min=torch.finfo(torch.float32).min).add_(entropy[rows, None])
                grad -= probability * pull * grad_entropy[rows, None]
            grad.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
            grad = (grad if slope is None else grad * slope) * ctx.scale
            grad = (grad if heat is None else grad / heat[:, None]).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.T @ hidden[rows]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        grad_bias = None if grad_bias is None else grad_bias.to(weight.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None, None, None, None


def _chunks(num_rows: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return float32 logits [n, V] after temperature, and the slope of the softcap where there is one."""
    logits = linear(hidden, weight, bias).float()
    logits = logits if scale == 1.0 else logits * scale
    slope = None
    if softcap is not None:
        bounded = torch.tanh(logits / softcap)
        logits, slope = bounded * softcap, 1 - bounded**2
    return logits if temperature is None else logits / temperature[:, None], slope
