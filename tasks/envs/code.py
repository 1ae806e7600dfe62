"""Programming problems: the program in a response runs against tests, shut in by infra/sandbox.py.

The program cannot know what is expected of it: tests are compared here, outside of the sandbox, with what it printed
or returned. Every test runs it afresh. Whatever goes wrong inside (an error, a limit, nonsense on stdout) is the
program's fault and a failed test; a sandbox that does not start is not, and is raised.
"""

import json
import math
import re
import secrets
import sys
import time
from collections.abc import Mapping
from typing import Any

from data_contracts.config import CodeEnv
from data_contracts.errors import ConfigError, ServiceError
from infra.sandbox import Limits, Ran, Sandbox
from tasks.envs.problems import ProblemEnv
from tasks.envs.protocol import Prompt, Score

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

# The answer goes to a copy of stdout behind a mark, so that what the program itself prints is not taken for it.
_CALLER = """
import json, os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
job = json.load(open("job.json"))
space = {"__name__": "program"}
exec(compile(open("solution.py").read(), "solution.py", "exec"), space)
answer = json.dumps(space[job["call"]](*job["args"]))
out.write("\\n" + job["mark"] + answer + "\\n")
out.flush()
"""


class Code(ProblemEnv):
    """Problems of a file, with a reward for the tests that the program passes."""

    def __init__(self, config: CodeEnv) -> None:
        """Read the problems and prove the sandbox.

        Raises:
            ConfigError: the file is not usable, or this machine cannot shut programs in as asked.
        """
        self._config = config
        super().__init__(config, config.name or config.type, ("tests", "solution"))
        for problem in (*self.problems.trained, *self.problems.held_out):
            check_tests(problem["tests"], config.path)
        self._wall_s = 2 * config.time_s + 1
        limits = Limits(
            wall_s=self._wall_s,
            cpu_s=math.ceil(config.time_s),
            memory_bytes=config.memory_mb << 20,
            processes=config.processes,
            output_bytes=config.output_kb << 10,
        )
        self._sandbox = Sandbox(config.sandbox, limits)
        self.verifier = f"code.{config.sandbox}.python{sys.version_info.major}.{sys.version_info.minor}@1"

    def gold(self, problem: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Return the solution, and the tests it passes."""
        return str(problem["solution"]), {"tests": problem["tests"]}

    def score(self, prompt: Prompt, response_text: str, response_ids: list[int]) -> Score:
        """Run the program against the tests, until the first that fails unless failing some is worth something.

        Components: `passed` (share of the tests) and `limited` (1 when a limit ended a run).

        Raises:
            ServiceError: the sandbox did not start, or the machine was too slow to tell.
        """
        program, tests = extract(response_text), prompt.metadata["tests"]
        give_up = time.monotonic() + self._config.total_s
        passed, limited = 0, False
        for test in tests:
            remaining_s = give_up - time.monotonic()
            if remaining_s <= 0:
                self._run_out(limited)
                break
            is_passed, ran = self._test(program, test, min(remaining_s, self._wall_s))
            if ran.ending == "too long" and remaining_s < self._wall_s:
                self._run_out(limited)
            passed += is_passed
            limited |= ran.ending in ("too long", "too much output")
            if not is_passed and not self._config.partial:
                break
        share = passed / len(tests)
        reward = share if self._config.partial else float(passed == len(tests))
        return Score(reward, {"passed": share, "limited": float(limited)})

    def _run_out(self, limited: bool) -> None:
        """Take it for the program's fault when it had been slow; raise when it had not."""
        if not limited:
            raise ServiceError(
                f"env {self.name}: the tests of one response took longer than total_s {self._config.total_s:g}: raise "
                "total_s and reward.timeout_s, or run on a machine with less to do"
            )

    def gold_response(self, prompt: Prompt) -> str:
        """Return the gold solution as a block of code."""
        return f"```python\n{prompt.answer}\n```"

    def _test(self, program: str, test: dict[str, Any], wall_s: float) -> tuple[bool, Ran]:
        if "stdout" in test:
            ran = self._sandbox.run({"program.py": program}, stdin=test["stdin"], wall_s=wall_s)
            return ran.ending == "exited" and ran.code == 0 and _same_text(ran.stdout, test["stdout"]), ran
        mark = secrets.token_hex(16)
        job = json.dumps({"call": test["call"], "args": test["args"], "mark": mark})
        ran = self._sandbox.run({"program.py": _CALLER, "solution.py": program, "job.json": job}, wall_s=wall_s)
        answer = ran.stdout.rpartition(mark)[2]
        return ran.ending == "exited" and ran.code == 0 and _same_value(answer, test["expect"]), ran


def extract(response_text: str) -> str:
    """Return the program: the last block of code, or all of it when there is none."""
    blocks = _BLOCK.findall(response_text)
    return blocks[-1] if blocks else response_text


def check_tests(tests: object, path: str) -> None:
    """Raise ConfigError unless `tests` is a list of at least one test of a known form."""
    forms = ({"stdin", "stdout"}, {"call", "args", "expect"})
    if not isinstance(tests, list) or not tests or any(set(test) not in forms for test in tests):
        raise ConfigError(
            f"problems {path}: expected tests as a list of objects with stdin and stdout, or with call, args and "
            f"expect, got {str(tests)[:200]}"
        )


def _same_text(given: str, expected: str) -> bool:
    """Compare outputs line by line, space at the ends of lines and of the text aside."""
    left, right = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (given, expected))
    return left == right


def _same_value(answer: str, expected: object) -> bool:
    try:
        return json.loads(answer) == expected
    except (ValueError, RecursionError):
        return False
