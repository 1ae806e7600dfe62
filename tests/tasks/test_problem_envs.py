"""Problems from files: read strictly, split for ever, judged by what answers mean and what programs do."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from data_contracts.config import CodeEnv, EnvConfig, MathEnv, RewardConfig, RunConfig
from data_contracts.errors import ConfigError, ServiceError
from infra.sandbox import Sandbox
from tasks.envs.code import Code, extract
from tasks.envs.protocol import Env
from tasks.envs.registry import build_envs
from tasks.scoring import judge_all
from tasks.verify import Job

ADD = "def add(a, b):\n    return a + b"


def write(path: Path, problems: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(problem) for problem in problems))
    return str(path)


def math_file(folder: Path, num: int = 40) -> str:
    return write(folder / "math.jsonl", [{"question": f"{i}/2?", "answer": f"\\frac{{{i}}}{{2}}"} for i in range(num)])


def code_file(folder: Path, tests: list[dict[str, Any]], solution: str = ADD) -> str:
    problems = [{"question": f"Problem {i}", "tests": tests, "solution": solution} for i in range(12)]
    return write(folder / "code.jsonl", problems)


def make(config: EnvConfig) -> Env:
    (env,) = build_envs([config], seed=0).by_name.values()
    return env


@pytest.fixture(scope="module")
def mode() -> str:
    """The strongest sandbox that this machine has."""
    from infra.sandbox import Limits

    try:
        return Sandbox("namespaces", Limits()).mode
    except ConfigError:
        return "limits"


def test_math_problems_prove_their_reward_and_are_split_by_their_text(tmp_path: Path) -> None:
    env = make(MathEnv(path=math_file(tmp_path)))
    env.validate()
    assert env.num_prompts + env.num_eval_prompts == 40
    assert 2 <= env.num_eval_prompts <= 16
    more = make(MathEnv(path=math_file(tmp_path, 50), name="more"))
    held_out = {env.eval_prompt(i).content for i in range(env.num_eval_prompts)}
    assert held_out <= {more.eval_prompt(i).content for i in range(more.num_eval_prompts)}


@pytest.mark.parametrize(
    ("response", "correct", "boxed", "parsed"),
    [
        ("It is $\\frac{3}{2}$.", 1.0, 0.0, 1.0),
        ("\\boxed{1.5}", 1.0, 1.0, 1.0),
        ("\\boxed{3/2}", 1.0, 1.0, 1.0),
        ("first \\boxed{2}, no: \\boxed{1.5}", 1.0, 1.0, 1.0),
        ("\\boxed{2}", 0.0, 1.0, 1.0),
        ("I do not know", 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0),
        ("\\boxed{\\frac{}", 0.0, 1.0, 0.0),
    ],
)
def test_mathematical_answers_are_compared_by_what_they_mean(
    response: str, correct: float, boxed: float, parsed: float, tmp_path: Path
) -> None:
    problems = [{"question": f"q{i}", "answer": "so #### 3/2"} for i in range(40)]
    path = write(tmp_path / "m.jsonl", problems)
    env = make(MathEnv(path=path, boxed_weight=0.25, answer_after="####"))
    score = env.score(env.prompt(0), response, [])
    assert score.components == {"correct": correct, "boxed": boxed, "parsed": parsed}
    assert score.reward == 0.75 * correct + 0.25 * boxed


def test_plain_numbers_can_be_compared_exactly_as_well(tmp_path: Path) -> None:
    path = tmp_path / "close.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{i}", "answer": f"{i}.5"}) + "\n" for i in range(40)))
    env = make(MathEnv(path=str(path), cross_check=True))
    prompt = env.prompt(0)
    env.validate()
    assert env.second_opinion(prompt, env.gold_response(prompt), []) == 1.0
    assert env.second_opinion(prompt, f"\\boxed{{{prompt.answer}0001}}", []) == 0.0
    assert env.second_opinion(prompt, "\\boxed{\\sqrt{2}}", []) is None, "no plain number"
    assert env.second_opinion(prompt, prompt.answer, []) is None, "no box"
    assert make(MathEnv(path=str(path))).second_opinion(prompt, env.gold_response(prompt), []) is None


def test_math_is_judged_in_processes_that_can_be_killed(tmp_path: Path) -> None:
    envs = build_envs([MathEnv(path=math_file(tmp_path))], seed=0)
    prompt = envs.prompt_for(0)
    jobs = [Job(prompt.id, text, []) for text in (f"\\boxed{{{prompt.answer}}}", "\\boxed{-1}", "9" * 5000)]
    outcomes, counts = judge_all(jobs, envs, RewardConfig(timeout_s=20.0))
    assert [outcome.reward for outcome in outcomes if not isinstance(outcome, str)] == [1.0, 0.0, 0.0]
    assert counts.restarts == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"question": "a"}', "line 1: expected an object with"),
        ("[1]", "line 1: expected an object with"),
        ("{", "line 1: not JSON"),
        ('{"question": "a", "answer": "1"}', "at least one of each"),
        ("", "at least one of each"),
    ],
)
def test_files_that_hold_no_problems_are_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=says):
        make(MathEnv(path=str(tmp_path / "m.jsonl")))


def test_a_missing_or_another_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        make(MathEnv(path=str(tmp_path / "none.jsonl")))
    path = math_file(tmp_path)
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    make(MathEnv(path=path, sha256=digest))
    with pytest.raises(ConfigError, match="another file"):
        make(MathEnv(path=path, sha256="0" * 64))


CALLS = [{"call": "add", "args": [1, 2], "expect": 3}, {"call": "add", "args": [[1], [2]], "expect": [1, 2]}]
LINES = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "5 5\n", "stdout": "10"}]
READER = "a, b = map(int, input().split())\nprint(a + b)"


@pytest.mark.parametrize(("tests", "solution"), [(CALLS, ADD), (LINES, READER)])
def test_code_problems_prove_their_reward(tests, solution: str, mode, tmp_path: Path) -> None:
    env = make(CodeEnv(path=code_file(tmp_path, tests, solution), sandbox=mode))
    prompt = env.prompt(0)
    assert env.score(prompt, env.gold_response(prompt), []).reward == 1.0
    assert env.score(prompt, env.wrong_response(prompt), []).reward == 0.0


@pytest.mark.parametrize(
    ("program", "reward", "passed"),
    [
        ("def add(a, b): return a + b", 1.0, 1.0),
        ("print('noise')\ndef add(a, b):\n    print('more')\n    return a + b", 1.0, 1.0),
        ("def add(a, b): return 3", 0.0, 0.5),
        ("def add(a, b): return None", 0.0, 0.0),
        ("def add(a, b): return 1 / 0", 0.0, 0.0),
        ("def add(a, b): return object()", 0.0, 0.0),
        ("import os; os._exit(0)", 0.0, 0.0),
        ("def add(a, b:", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("class A:\n    def __eq__(self, other): return True\ndef add(a, b): return A()", 0.0, 0.0),
        ("import json; json.dumps = lambda value: '[1, 2]'\ndef add(a, b): return 0", 0.0, 0.0),
        ("import sys\ndef add(a, b): sys.exit(0)", 0.0, 0.0),
    ],
)
def test_programs_are_rewarded_for_what_they_return_and_nothing_else(
    program: str, reward: float, passed: float, mode, tmp_path: Path
) -> None:
    env = make(CodeEnv(path=code_file(tmp_path, CALLS), sandbox=mode))
    score = env.score(env.prompt(0), f"Here:\n```python\n{program}\n```", [])
    assert score.reward == reward
    assert score.components["passed"] == passed


def test_some_passed_tests_are_worth_something_when_asked_for(mode, tmp_path: Path) -> None:
    env = make(CodeEnv(path=code_file(tmp_path, CALLS), sandbox=mode, partial=True))
    assert env.score(env.prompt(0), "def add(a, b): return 3", []).reward == 0.5
    assert env.score(env.prompt(0), "def add(a, b): return [1, 2]", []).reward == 0.5


@pytest.mark.parametrize(
    "program", ["while True: pass", "while True: print('x' * 999)", "def add(a, b):\n    while True: pass"]
)
def test_a_program_that_meets_a_limit_is_wrong_and_says_so(program: str, mode, tmp_path: Path) -> None:
    env = make(CodeEnv(path=code_file(tmp_path, CALLS), sandbox=mode, time_s=0.5))
    score = env.score(env.prompt(0), program, [])
    assert score.reward == 0.0
    assert score.components["limited"] == 1.0


def test_too_little_time_for_quick_tests_is_not_the_programs_fault(mode, tmp_path: Path) -> None:
    env = make(CodeEnv(path=code_file(tmp_path, CALLS * 20), sandbox=mode, total_s=0.05))
    with pytest.raises(ServiceError, match="raise total_s"):
        env.score(env.prompt(0), ADD, [])


def test_the_last_block_of_code_is_the_program() -> None:
    assert extract("```python\na\n```\nno:\n```\nb\n```") == "b\n"
    assert extract("print(1)") == "print(1)"
    assert extract("```py\nx = 1\n```") == "x = 1\n"


@pytest.mark.parametrize("tests", [[], "x", [{"stdin": ""}], [{"call": "f", "args": [], "stdout": ""}]])
def test_tests_of_another_form_are_refused(tests, mode, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected tests as a list"):
        Code(CodeEnv(path=code_file(tmp_path, tests), sandbox=mode))


def test_a_code_env_must_have_less_time_than_its_verifier() -> None:
    with pytest.raises(ValueError, match=r"raise reward\.timeout_s"):
        RunConfig.model_validate({"envs": [{"type": "code", "path": "x", "total_s": 10.0}]})
