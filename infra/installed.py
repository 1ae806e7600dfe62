"""Which optional packages are there, said before anything is started."""

import importlib.util

from data_contracts.config import DeepspeedBackend, TrainBackend
from data_contracts.errors import ConfigError


def check_backend(backend: TrainBackend) -> None:
    """Raise ConfigError when what trains is not installed here."""
    if isinstance(backend, DeepspeedBackend) and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "train.backend.type deepspeed: the package deepspeed is not installed here; "
            "pip install 'rollflow[deepspeed]', or set train.backend.type torch"
        )
