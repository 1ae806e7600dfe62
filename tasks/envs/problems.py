"""Problems from a file of JSON lines, split once for ever: a question's text decides whether it is held out."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_contracts.config import ProblemFile
from data_contracts.errors import ConfigError

_HELD_OUT_ONE_IN = 5


class Problems:
    """The problems of a file.

    Attributes:
        trained: problems to train on, in the order of the file.
        held_out: the others.
    """

    def __init__(self, config: ProblemFile, needed: tuple[str, ...]) -> None:
        """Read the file; every problem must have the question and the fields in `needed`.

        Raises:
            ConfigError: the file cannot be read, is not the one named by its digest, or a problem lacks something.
        """
        self._path = Path(config.path)
        try:
            body = self._path.read_bytes()
        except OSError as cause:
            raise ConfigError(f"problems {self._path}: cannot be read: {cause.strerror}") from cause
        digest = hashlib.sha256(body).hexdigest()
        if config.sha256 and digest != config.sha256:
            raise ConfigError(f"problems {self._path}: expected SHA-256 {config.sha256}, got {digest}: another file")
        self.trained: list[dict[str, Any]] = []
        self.held_out: list[dict[str, Any]] = []
        lines = [line for line in body.split(b"\n") if line.strip()]
        for number, line in enumerate(lines, 1):
            problem = self._parse(number, line, (config.question, *needed))
            hashed = hashlib.blake2b(str(problem[config.question]).encode(), digest_size=8).digest()
            is_held_out = int.from_bytes(hashed, "big") % _HELD_OUT_ONE_IN == 0
            (self.held_out if is_held_out else self.trained).append(problem)
        if not self.trained or not self.held_out:
            raise ConfigError(
                f"problems {self._path}: {len(self.trained)} to train on and {len(self.held_out)} held out (a fifth, "
                "by their text): add problems, there must be at least one of each"
            )

    def _parse(self, number: int, line: bytes, needed: tuple[str, ...]) -> dict[str, Any]:
        try:
            problem = json.loads(line)
        except ValueError as cause:
            raise ConfigError(f"problems {self._path}, line {number}: not JSON: {cause}") from cause
        missing = [name for name in needed if not isinstance(problem, dict) or name not in problem]
        if missing:
            raise ConfigError(f"problems {self._path}, line {number}: expected an object with {list(needed)}")
        return problem


def guided(problem: Mapping[str, Any], question: str, config: ProblemFile) -> str | None:
    """Return the question with the problem's hint behind it; None without a hint."""
    hint = str(problem.get(config.hint) or "") if config.hint else ""
    return f"{question}\n{hint}" if hint else None
