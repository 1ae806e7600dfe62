"""Data sets of the reasoning-gym package: procedural questions, each judged by the data set's own scorer.

Questions are split by their text (a fifth is held out), so a question that turns up twice never lies on both
sides. The data set's seed is its parameter `seed`, not the run's: prompt ids mean the same in every run.
"""

import difflib
import hashlib
import importlib.metadata
import math
import re
from dataclasses import fields
from functools import lru_cache
from typing import Any

from reasoning_gym.factory import DATASETS, create_dataset

from data_contracts.config import ReasoningGymEnv
from data_contracts.errors import ConfigError
from tasks.envs.protocol import Env, Message, Prompt, Score

UNSTABLE = frozenset(
    {"isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Data sets that walk over sets of strings, or draw from global state: another process, or another order of calls,
makes other questions (found by asking every data set for 24 questions in three processes, reasoning-gym 0.1.25)."""

# A sign counts only where it is no operator; commas only between groups of three digits.
_NUMBER = re.compile(
    r"(?:(?<![0-9)])[-+])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|\.[0-9]+"
)
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_HELD_OUT_ONE_IN = 5
_MAX_TRIES = 500
# What the package's scorers raise on answers they did not expect (all data sets tried on 17 malformed answers).
_UNPARSABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)


class ReasoningGym(Env):
    """One data set with its parameters, as prompts and a reward between 0 and 1."""

    def __init__(self, config: ReasoningGymEnv) -> None:
        """Make the data set; its questions are generated when asked for.

        Raises:
            ConfigError: the data set or a parameter does not exist, or the data set refuses the parameters.
        """
        self._config = config
        self._data = _make_dataset(config)
        self.name = config.name or config.dataset
        self.verifier = f"reasoning_gym.{config.dataset}@{importlib.metadata.version('reasoning-gym')}"
        self.num_prompts = config.size
        self.num_eval_prompts = max(1, config.size // (2 * _HELD_OUT_ONE_IN))
        self._entry = lru_cache(maxsize=4096)(self._make_entry)
        self._held_out: list[int] = []
        self._num_scanned = 0
        self._examples: list[dict[str, Any]] | None = None

    def prompt(self, index: int) -> Prompt:
        """Return training prompt `index`; where that question is held out, another one stands in for it."""
        if not 0 <= index < self.num_prompts:
            raise IndexError(f"env {self.name} has prompts 0 to {self.num_prompts - 1}, not {index}")
        stride = _coprime_stride(self.num_prompts)
        for turn in range(_MAX_TRIES):
            entry = self._entry((index + turn * stride) % self.num_prompts)
            if not _is_held_out(entry["question"]):
                return self._make_prompt(self.prompt_id(index), entry)
        raise ConfigError(
            f"env {self.name}: none of {_MAX_TRIES} questions of {self._config.dataset} may be trained on, "
            "because they are all alike and held out: widen its parameters"
        )

    def eval_prompt(self, index: int) -> Prompt:
        """Return held-out prompt `index`, in the data set's own order; from the start again when it runs out."""
        if not 0 <= index < self.num_eval_prompts:
            raise IndexError(f"env {self.name} has held-out prompts 0 to {self.num_eval_prompts - 1}, not {index}")
        while len(self._held_out) <= index and self._num_scanned < self._config.size:
            if _is_held_out(self._entry(self._num_scanned)["question"]):
                self._held_out.append(self._num_scanned)
            self._num_scanned += 1
        if not self._held_out:
            raise ConfigError(
                f"env {self.name}: no question among {self._config.size} of {self._config.dataset} is held out, "
                "because they are too few or all alike: raise size or widen its parameters"
            )
        return self._make_prompt(self.eval_prompt_id(index), self._entry(self._held_out[index % len(self._held_out)]))

    def score(self, prompt: Prompt, response_text: str, response_ids: list[int]) -> Score:
        """Give the extracted answer to the data set's scorer.

        Components: `score` is the scorer's word, `answered` whether an answer was found; the reward is `score`, or
        with `exact` 1 where that is 1 and else 0.
        """
        answer = extract(response_text, self._config.extract)
        if answer is None:
            return Score(0.0, {"score": 0.0, "answered": 0.0})
        try:
            score = float(self._data.score_answer(answer, dict(prompt.metadata)))
        except _UNPARSABLE:
            score = 0.0
        reward = float(math.isclose(score, 1.0)) if self._config.exact else score
        return Score(reward, {"score": score, "answered": 1.0})

    def gold_response(self, prompt: Prompt) -> str:
        """Return the answer in the form that the extraction looks for."""
        return f"<answer>{prompt.answer}</answer>" if self._config.extract == "answer_tag" else prompt.answer

    def wrong_response(self, prompt: Prompt) -> str:
        """Return the answer to another question, if one scores below 1, else nothing."""
        for index in range(min(20, self.num_prompts)):
            other = self.gold_response(self.prompt(index))
            if self.score(prompt, other, []).reward < 1.0:
                return other
        return ""

    def validate(self) -> None:
        """Prove the reward, and that every process makes the same questions.

        Raises:
            ConfigError: see `Env.validate`; also for data sets without a gold answer in text.
        """
        _check_stable(self._config, self._data)
        super().validate()

    def _make_entry(self, index: int) -> dict[str, Any]:
        entry = self._data[index]
        if not isinstance(entry["answer"], str):
            raise ConfigError(
                f"env {self.name}: data set {self._config.dataset} gives no gold answer as text, so its reward cannot "
                "be proved: choose another data set"
            )
        return entry

    def _make_prompt(self, prompt_id: str, entry: dict[str, Any]) -> Prompt:
        turns: list[Message] = []
        for example in self._few_shot(entry["question"]):
            turns.append({"role": "user", "content": self._ask(example["question"])})
            solved = self.gold_response(Prompt("", "", example["answer"]))
            turns.append({"role": "assistant", "content": solved})
        turns.append({"role": "user", "content": self._ask(entry["question"])})
        return Prompt(prompt_id, tuple(turns), entry["answer"], entry)

    def _ask(self, question: str) -> str:
        return f"{self._config.instruction}\n{question}" if self._config.instruction else question

    def _few_shot(self, question: str) -> list[dict[str, Any]]:
        """Return solved training questions, never the one that is asked."""
        wanted = self._config.few_shot
        if self._examples is None:
            found: dict[str, dict[str, Any]] = {}
            for index in range(min(self.num_prompts, _MAX_TRIES) if wanted else 0):
                entry = self._entry(index)
                if not _is_held_out(entry["question"]):
                    found.setdefault(entry["question"], entry)
                if len(found) > wanted:
                    break
            self._examples = list(found.values())
        return [entry for entry in self._examples if entry["question"] != question][:wanted]


def extract(response: str, part: str) -> str | None:
    """Return the answer in a response: all of it, its last number, or what stands in its last <answer> tag.

    >>> extract("12 apples and 1,300 pears.", "last_number")
    '1300'
    """
    if part == "last_number":
        numbers = _NUMBER.findall(response)
        return numbers[-1].replace(",", "") if numbers else None
    if part == "answer_tag":
        tagged = _TAG.findall(response)
        return tagged[-1].strip() if tagged else None
    return response.strip() or None


def _make_dataset(config: ReasoningGymEnv) -> Any:
    if config.dataset not in DATASETS:
        raise ConfigError(
            f"reasoning-gym has no data set {config.dataset!r}: {_suggest(config.dataset, list(DATASETS))}"
        )
    known = [f.name for f in fields(DATASETS[config.dataset][1]) if f.name != "size"]
    for name in config.parameters:
        if name not in known:
            raise ConfigError(f"data set {config.dataset} has no parameter {name!r}: {_suggest(name, known)}")
    try:
        return create_dataset(config.dataset, **{"seed": 0, **config.parameters, "size": config.size})
    except (AssertionError, *_UNPARSABLE) as cause:
        raise ConfigError(f"data set {config.dataset} refuses its parameters: {cause}") from cause


def _suggest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"choose one of {', '.join(sorted(known))}"


def _check_stable(config: ReasoningGymEnv, data: Any) -> None:
    indices = range(min(6, config.size))
    in_order = [str(data[index]) for index in indices]
    another = _make_dataset(config)
    in_reverse = [str(another[index]) for index in reversed(indices)][::-1]
    if config.dataset in UNSTABLE or in_order != in_reverse:
        raise ConfigError(
            f"data set {config.dataset} of reasoning-gym does not make the same questions in every process, so nobody "
            "could score the answers: choose another data set"
        )


def _is_held_out(question: str) -> bool:
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _HELD_OUT_ONE_IN == 0


def _coprime_stride(size: int) -> int:
    """Return a step near the golden section of `size` that visits every number."""
    stride = max(1, round(size * 0.618034))
    while math.gcd(stride, size) != 1:
        stride += 1
    return stride
