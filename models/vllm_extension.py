"""What Rollflow adds to the worker of a vLLM server: it takes versions of the weights and says what it computes with.

vLLM mixes `WeightsExtension` into its worker (`--worker-extension-cls`), and the rollout role calls its methods
through the server's /collective_rpc. So this module is imported in vLLM's own environment, not in Rollflow's: what it
imports must be in requirements-vllm.lock, which a test holds.

The digest is Rollflow's own (models/digest.py): fused, padded and renamed tensors give the digest of the plain ones.
On a CPU there are no such tensors to read: vLLM packs a matrix into a format of the kernel's own and throws the
original away. Then the digest is taken over what the packed matrix answers to the unit vectors, which is exact (one
product with 1, all others with 0) and shows the very weights that sample. What a product cannot show is the sign of a
zero: negative zeros are counted in the weights as they came.

Who waits for whom: the server does not step while a method runs; the caller has paused it before.

Legend: K inputs and N outputs of a linear layer.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data_contracts.errors import ContractError
from models.delta import apply_delta, delta_from_bytes
from models.digest import DigestSums, negative_zeros, weights_digest
from models.policy import weights_from_bytes

_ROWS = 512  # unit vectors asked at once


class WeightsExtension:
    """Methods of a vLLM worker. Names begin with rollflow_: the class becomes a base of vLLM's own."""

    def rollflow_take(self, files: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Load a version of the weights and return what the engine holds then.

        Args:
            files: (kind, path) in order: "full" weights, or a "delta" to what came before.

        Returns:
            digest: over the weights in the engine. seconds: spent.
        """
        started = time.monotonic()
        worker: Any = self
        held, digest = getattr(worker, "_rollflow_held", ({}, ""))
        for kind, path in files:
            body = Path(path).read_bytes()
            if kind == "full":
                held = weights_from_bytes(body)
                digest = weights_digest(held)
            else:
                delta = delta_from_bytes(body)
                held, digest = apply_delta(held, delta, base_digest=digest), delta.digest
        read_s = time.monotonic() - started
        worker.reload_weights(weights_iterator=iter(held.items()))
        model = worker.model_runner.get_model()
        pack_tied(model)
        load_s = time.monotonic() - started - read_s
        worker._rollflow_held = held, digest
        found = engine_digest(model, held)
        return {"digest": found, "read_s": read_s, "load_s": load_s, "seconds": time.monotonic() - started}


def pack_tied(model: Any) -> None:
    """Pack the matrices anew that share their weight with another module: vLLM's reload passes over them.

    An output layer that is tied to the embedding would go on with the packed copy of the old weights.
    """
    owners: dict[int, Any] = {}
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if _packed(module) and weight.numel() and owners.setdefault(weight.data_ptr(), module) is not module:
            module.quant_method.process_weights_after_loading(module)


def engine_digest(model: nn.Module, held: Mapping[str, Tensor]) -> str:
    """Return the digest over the weights that `model`, a model of vLLM, computes with.

    Args:
        model: as the worker holds it.
        held: the weights as they came, for their dtype and their number of negative zeros.

    Raises:
        ContractError: a packed matrix does not hold the weight that lies beside it.
    """
    dtype = next(iter(held.values())).dtype
    sums, seen = DigestSums(), set()
    unseen_signs = sum(negative_zeros(tensor) for tensor in held.values())
    for name, module in model.named_modules():
        for tensor in module.parameters(recurse=False):
            if tensor.numel() and tensor.data_ptr() not in seen:  # tied weights count once
                seen.add(tensor.data_ptr())
                plain = _as_published(tensor.detach(), dtype)
                sums.add(plain)
                unseen_signs -= negative_zeros(plain)
        if _packed(module):
            _count_packed(name, module, sums)
    sums.add_negative_zeros(dtype, unseen_signs)
    return sums.text()


def _count_packed(name: str, module: Any, sums: DigestSums) -> None:
    """Add a packed matrix to `sums`; one whose weight is still there has been counted and must only agree with it."""
    weight = module.weight.detach()
    if not weight.numel():
        for block in read_back(module):
            sums.add(block)
        return
    first = 0
    for block in read_back(module):
        if not torch.equal(block, weight[:, first : first + len(block)].t()):
            raise ContractError(f"{name}: the packed matrix is not the weight that lies beside it: it was not reloaded")
        first += len(block)


def read_back(module: Any) -> Iterator[Tensor]:
    """Yield the rows of a packed linear layer's transposed weight, [rows, N] at a time, by asking it for them."""
    num_inputs = (
        getattr(module, "input_size_per_partition", None) or getattr(module, "input_size", None) or module.embedding_dim
    )
    for first in range(0, num_inputs, _ROWS):
        ask = torch.zeros(min(_ROWS, num_inputs - first), num_inputs, dtype=module.weight.dtype)
        ask[torch.arange(len(ask)), first + torch.arange(len(ask))] = 1
        yield module.cpu_linear(ask, module.weight, None)


def _packed(module: nn.Module) -> bool:
    return getattr(module, "cpu_linear", nn.functional.linear) is not nn.functional.linear


def _as_published(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in the published dtype where that loses nothing: some kernels want a bias in float32."""
    cast = tensor.to(dtype)
    return cast if torch.equal(cast.to(tensor.dtype), tensor) else tensor
