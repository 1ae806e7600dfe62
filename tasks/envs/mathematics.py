"""Mathematical problems, judged by the math-verify package: answers are equal when what they mean is.

An answer that cannot be parsed is a wrong one, and is counted by the component `parsed`.
"""

import importlib.metadata
import logging
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from math_verify import parse, verify

from data_contracts.config import MathEnv
from tasks.envs.problems import ProblemEnv
from tasks.envs.protocol import Prompt, Score

# The package's own time limits are alarms, which would switch off that of the process that verifies (tasks/verify.py
# kills it when it hangs); without them it warns at every call.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_BOX = re.compile(r"\\boxed\{([^{}]*)\}")
_PLAIN = re.compile(r"[-+]?\d+(\.\d+|/0*[1-9]\d*)?")


class Mathematics(ProblemEnv):
    """Problems of a file, with a reward of 1 for a right answer in the right form."""

    needs_timeout = True  # sympy can think for ever

    def __init__(self, config: MathEnv) -> None:
        """Read the problems.

        Raises:
            ConfigError: the file is not usable.
        """
        self._config = config
        super().__init__(config, config.name or config.type, (config.answer,))
        self.verifier = f"math_verify@{importlib.metadata.version('math-verify')}"

    def gold(self, problem: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Return the answer, without the working before `answer_after`."""
        answer = str(problem[self._config.answer])
        if self._config.answer_after:
            answer = answer.rpartition(self._config.answer_after)[2]
        return answer.strip(), {}

    def score(self, prompt: Prompt, response_text: str, response_ids: list[int]) -> Score:
        """Compare the response's answer, what stands in its last box or else its last expression, with the gold one.

        Components: `correct`, `boxed` (whether there is a box) and `parsed` (whether an answer could be read).
        """
        gold = parse(_boxed(prompt.answer), parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        box = response_text.rfind("\\boxed{")  # the package would take all boxes together for one set of answers
        given = parse(response_text[max(box, 0) :], parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        correct = float(verify(gold, given, timeout_seconds=None))
        boxed = float(box >= 0)
        parsed = float(any(not isinstance(answer, str) for answer in given))
        share = self._config.boxed_weight
        reward = (1 - share) * correct + share * boxed
        return Score(reward, {"correct": correct, "boxed": boxed, "parsed": parsed})

    def second_opinion(self, prompt: Prompt, response_text: str, response_ids: list[int]) -> float | None:
        """Return the reward by exact comparison, where both answers are plain numbers and the config asks for it."""
        box = _BOX.findall(response_text)
        if not self._config.cross_check or not box:
            return None
        gold, given = _number(prompt.answer), _number(box[-1])
        if gold is None or given is None:
            return None
        share = self._config.boxed_weight
        return (1 - share) * float(gold == given) + share

    def gold_response(self, prompt: Prompt) -> str:
        """Return the gold answer in a box."""
        return _boxed(prompt.answer)


def _number(text: str) -> Fraction | None:
    """Return the number that a text plainly is, None for anything else."""
    plain = text.strip().replace(",", "")
    return Fraction(plain) if _PLAIN.fullmatch(plain) else None


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"
