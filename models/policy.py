"""A policy is a Hugging Face causal language model with its tokenizer. This file moves it in and out.

Three forms: a folder as the `transformers` library writes it, a model in memory, and bytes (the small files by
name, and the weights as safetensors) from which any process builds the model without a folder.

Weights are always named as in the model's state dict; a tied tensor stands once, under its first name.
"""

import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from data_contracts.errors import ConfigError, ContractError

Dtype = Literal["float32", "bfloat16"] | torch.dtype

_WEIGHT_SUFFIXES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_CODE_SUFFIXES = (".py", ".md")
_METADATA_KEY = "rollflow"

# Saving a model imports DeepSpeed where it is installed, which warns once that it has found no accelerator.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())


class Policy(NamedTuple):
    """A model and the tokenizer that goes with it."""

    model: Any
    """A transformers causal language model (nn.Module)."""
    tokenizer: Any
    """A transformers tokenizer."""


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """Return the torch dtype of a name such as bfloat16."""
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"dtype {dtype!r} is not a floating-point format: use float32 or bfloat16")
    return found


def load_policy(folder: Path | str, dtype: Dtype) -> Policy:
    """Load a causal language model and its tokenizer from a local folder; the network is never asked.

    Args:
        folder: config.json, safetensors weights and tokenizer files.
        dtype: format of the model's parameters.

    Raises:
        ConfigError: the folder or a file in it is missing or cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist: give the folder that holds config.json")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {folder} has no config.json: give a folder written by save_pretrained")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model folder {folder} has no .safetensors weights: save the model in that format")
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype(dtype), local_files_only=True)
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as cause:
        raise ConfigError(f"model folder {folder} cannot be loaded: {_first_line(cause)}") from cause
    return Policy(model.eval(), _load_tokenizer(folder))


def save_policy(model: Any, tokenizer: Any, folder: Path | str) -> None:
    """Write a plain Hugging Face folder that `load_policy` and any other tool reads."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def model_files(folder: Path | str) -> dict[str, bytes]:
    """Return the small files of a model folder (config, generation config, tokenizer) by name, without weights.

    Raises:
        ConfigError: there is no config.json.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {folder} has no config.json: give a folder written by save_pretrained")
    skipped = _WEIGHT_SUFFIXES + _CODE_SUFFIXES
    files = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    return {p.name: p.read_bytes() for p in files if not p.name.endswith(skipped)}


def policy_files(model: Any, tokenizer: Any) -> dict[str, bytes]:
    """Return the same small files for a model that is only in memory."""
    with tempfile.TemporaryDirectory() as scratch:
        model.config.save_pretrained(scratch)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        return model_files(scratch)


def build_policy(
    files: Mapping[str, bytes], dtype: Dtype, weights: Mapping[str, Tensor] | None = None, *, device: str = "cpu"
) -> Policy:
    """Build a policy from the small files and, when given, its weights.

    Without weights the model is initialized at random, from torch's global generator.

    Args:
        files: what `model_files` or `policy_files` returned.
        dtype: format of the model's parameters; weights are cast to it.
        weights: as from `named_weights` or `weights_from_bytes`.
        device: "meta" makes a model without memory, for what its configuration says.

    Raises:
        ConfigError: config.json or the tokenizer is missing or cannot be read.
        ContractError: a weight is missing, extra or of another shape.
    """
    if "config.json" not in files:
        raise ConfigError(f"model files have no config.json, only {sorted(files)}: take them with model_files")
    with tempfile.TemporaryDirectory() as scratch:
        for name, body in files.items():
            if Path(name).name != name:
                raise ConfigError(f"model file {name!r} is not a plain file name: take the files with model_files")
            (Path(scratch) / name).write_bytes(body)
        try:
            config = AutoConfig.from_pretrained(scratch, local_files_only=True)
        except (OSError, ValueError, KeyError) as cause:
            raise ConfigError(f"config.json of the model cannot be read: {_first_line(cause)}") from cause
        tokenizer = _load_tokenizer(Path(scratch))
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype(dtype)).eval()
        if "generation_config.json" in files:
            model.generation_config = GenerationConfig.from_pretrained(scratch, local_files_only=True)
    if weights is not None:
        load_weights(model, weights, cast=True)
    return Policy(model, tokenizer)


def end_ids(policy: Policy) -> tuple[int, ...]:
    """Return the tokens that end a response, ascending: the tokenizer's and those of the generation config."""
    named = getattr(policy.model.generation_config, "eos_token_id", None)
    several = named if isinstance(named, list | tuple) else [named]
    return tuple(sorted({int(token) for token in (policy.tokenizer.eos_token_id, *several) if token is not None}))


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's own weights by state-dict name, tied tensors once; views, not copies."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor.detach()
    return named


def copy_weights(model: nn.Module, dtype: Dtype | None = None) -> dict[str, Tensor]:
    """Return a copy of the model's weights, floating-point ones cast to the published `dtype` when given."""
    target = None if dtype is None else torch_dtype(dtype)
    return {
        name: tensor.to(target if target is not None and tensor.is_floating_point() else tensor.dtype, copy=True)
        for name, tensor in named_weights(model).items()
    }


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], *, cast: bool = False) -> None:
    """Copy weights into a model in place; nothing is changed unless all of them fit.

    Args:
        model: any module; its parameters keep their memory.
        weights: by state-dict name; a tied tensor may stand under any or all of its names.
        cast: accept another dtype than the model's and convert.

    Raises:
        ContractError: a name is missing or unknown, or a shape or dtype differs.
    """
    own = named_weights(model)
    first_names = _first_names(model)
    unknown = sorted(set(weights) - set(first_names))
    given = {first_names[name]: tensor for name, tensor in weights.items() if name in first_names}
    missing = sorted(set(own) - set(given))
    if unknown or missing:
        raise ContractError(
            f"weights do not fit the model: missing {missing[:3]} ({len(missing)}), "
            f"unknown {unknown[:3]} ({len(unknown)}): load weights of the same architecture"
        )
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            raise ContractError(f"weight {name}: expected shape {tuple(own[name].shape)}, got {tuple(tensor.shape)}")
        if tensor.dtype != own[name].dtype and not cast:
            raise ContractError(f"weight {name}: expected {own[name].dtype}, got {tensor.dtype}: cast it before")
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)


def weights_to_bytes(named: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return weights as one safetensors file. Equal input gives equal bytes, in any process.

    Args:
        named: tensors by name; no two may share memory (see `named_weights`).
        metadata: texts stored in the header, under one key: the format's own table has no fixed order.
    """
    header = {_METADATA_KEY: json.dumps(dict(metadata or {}), sort_keys=True)}
    return safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}, header)


def weights_from_bytes(body: bytes) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Raises:
        ContractError: the bytes are no safetensors file.
    """
    try:
        return safetensors.torch.load(body)
    except safetensors.SafetensorError as cause:
        raise ContractError(f"weights of {len(body)} bytes are no safetensors file: {_first_line(cause)}") from cause


def metadata_from_bytes(body: bytes) -> dict[str, str]:
    """Return the metadata that `weights_to_bytes` stored; empty when there is none.

    Raises:
        ContractError: the header cannot be read.
    """
    try:
        length = int.from_bytes(body[:8], "little")
        header = json.loads(body[8 : 8 + length])
        return json.loads(header.get("__metadata__", {}).get(_METADATA_KEY, "{}"))
    except (ValueError, AttributeError) as cause:
        raise ContractError(f"weights of {len(body)} bytes have no safetensors header: {_first_line(cause)}") from cause


def _first_names(model: nn.Module) -> dict[str, str]:
    """Return for every state-dict name the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


def _load_tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as cause:
        raise ConfigError(f"tokenizer of model folder {folder} cannot be loaded: {_first_line(cause)}") from cause


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
