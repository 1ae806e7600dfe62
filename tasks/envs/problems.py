"""Problems from a file of JSON lines, split once for ever: a question's text decides whether it is held out."""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_contracts.config import ProblemFile
from data_contracts.errors import ConfigError
from tasks.envs.protocol import Env, Prompt

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


class ProblemEnv(Env):
    """Asks the problems of a file; what is left to say is the gold answer and the score."""

    def __init__(self, config: ProblemFile, name: str, needed: tuple[str, ...]) -> None:
        """Read the problems; see Problems.

        Raises:
            ConfigError: the file is not usable.
        """
        self._file = config
        self.problems = Problems(config, needed)
        self.name = name
        self.num_prompts = len(self.problems.trained)
        self.num_eval_prompts = len(self.problems.held_out)

    def prompt(self, index: int) -> Prompt:
        """Return training prompt `index`."""
        return self._ask(self.prompt_id(index), self.problems.trained[index])

    def eval_prompt(self, index: int) -> Prompt:
        """Return held-out prompt `index`."""
        return self._ask(self.eval_prompt_id(index), self.problems.held_out[index])

    @abstractmethod
    def gold(self, problem: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Return the gold answer of a problem, and what scoring needs beside it."""

    def _ask(self, prompt_id: str, problem: Mapping[str, Any]) -> Prompt:
        question = self._file.instruction + str(problem[self._file.question])
        hint = str(problem.get(self._file.hint) or "") if self._file.hint else ""
        return Prompt(prompt_id, question, *self.gold(problem), guided=f"{question}\n{hint}" if hint else None)
