"""A GGUF file made into an ordinary Hugging Face folder: safetensors, tokenizer, chat template, generation config.

The quantized numbers are expanded once, into the format that is trained. transformers marks what it read from a GGUF
file as quantized and refuses to save it, so the numbers go into a fresh model of the same shape.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from data_contracts.errors import ConfigError, ContractError
from models.digest import weights_digest
from models.policy import load_policy, named_weights, save_policy


def convert(file: Path, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the model in a GGUF file as a plain folder, and prove it by loading it again.

    Args:
        file: a GGUF file of an architecture that transformers knows.
        folder: made if need be; files in it are overwritten.
        dtype: format of the weights written.

    Raises:
        ConfigError: the file cannot be read, or the packages that read it are not installed.
        ContractError: what was written loads as something else.
    """
    with _quiet():
        model, tokenizer = _read(file, dtype)
        save_policy(model, tokenizer, folder)
        written = load_policy(folder, dtype)
    expected, got = weights_digest(named_weights(model)), weights_digest(named_weights(written.model))
    if expected != got:
        raise ContractError(f"model folder {folder}: expected weights {expected}, got {got} when loaded again")
    if written.tokenizer.chat_template != tokenizer.chat_template or len(written.tokenizer) != len(tokenizer):
        raise ContractError(f"model folder {folder}: the tokenizer loads as another one than was written")


def _read(file: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**place)
        quantized = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
        config = AutoConfig.from_pretrained(**place)
    except ImportError as cause:
        raise ConfigError(f"cannot read {file.name}: {_first_line(cause)}: pip install 'rollflow[models]'") from cause
    except (OSError, ValueError, LookupError, RuntimeError, struct.error) as cause:
        raise ConfigError(f"cannot read {file.name}: expected a GGUF model, got {_first_line(cause)}") from cause
    vars(config).pop("quantization_config", None)
    config.dtype = dtype
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(quantized.state_dict())  # casts
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model.eval(), tokenizer


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the screen."""
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
