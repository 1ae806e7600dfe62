"""What is installed here: optional packages, and functions of a user's own that a configuration names."""

import importlib
import importlib.util
from functools import lru_cache
from typing import Any

from data_contracts.config import DeepspeedBackend, TrainBackend
from data_contracts.errors import ConfigError


def check_backend(backend: TrainBackend) -> None:
    """Raise ConfigError when what trains is not installed here."""
    if isinstance(backend, DeepspeedBackend) and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "train.backend.type deepspeed: the package deepspeed is not installed here; "
            "pip install 'rollflow[deepspeed]', or set train.backend.type torch"
        )


@lru_cache(maxsize=256)
def load_function(path: str, what: str) -> Any:
    """Return the function that module:function names.

    Args:
        path: for example my_rules.lengths:too_long.
        what: names the thing in an error, for example "rule".

    Raises:
        ConfigError: there is none.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{what} {path!r}: expected module:function, for example my_package.my_module:make")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as cause:
        raise ConfigError(f"{what} {path!r} cannot be imported: {cause}; expected module:function") from cause
