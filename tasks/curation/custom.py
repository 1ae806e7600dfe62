"""A rule of one's own, found by its path."""

import importlib
from functools import lru_cache
from typing import Any

import numpy as np

from data_contracts.config import CustomRule
from data_contracts.errors import ConfigError
from tasks.curation.group import Group


def custom(group: Group, config: CustomRule) -> np.ndarray:
    """Return [N] bool: what the user's function marks.

    Raises:
        ConfigError: the function cannot be found, or gives something else.
    """
    broken = np.asarray(load(config.path)(group, **config.parameters))
    if broken.shape != group.places.shape or broken.dtype != bool:
        raise ConfigError(
            f"rule {config.path}: expected {group.places.size} bools, one for each row, "
            f"got {broken.dtype} of shape {broken.shape}"
        )
    return broken


@lru_cache(maxsize=64)
def load(path: str) -> Any:
    """Return the function that module:function names.

    Raises:
        ConfigError: there is none.
    """
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as cause:
        raise ConfigError(f"rule {path}: cannot be imported, {cause}: expected module:function") from cause
