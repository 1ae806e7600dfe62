"""A rule of one's own, found by its path."""

import numpy as np

from data_contracts.config import CustomRule
from data_contracts.errors import ConfigError
from infra.installed import load_function
from tasks.curation.group import Group


def custom(group: Group, config: CustomRule) -> np.ndarray:
    """Return [N] bool: what the user's function marks.

    Raises:
        ConfigError: the function cannot be found, or gives something else.
    """
    broken = np.asarray(load_function(config.path, "rule")(group, **config.parameters))
    if broken.shape != group.places.shape or broken.dtype != bool:
        raise ConfigError(
            f"rule {config.path}: expected {group.places.size} bools, one for each row, "
            f"got {broken.dtype} of shape {broken.shape}"
        )
    return broken
