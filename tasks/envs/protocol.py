"""What an environment is: prompts, and a reward that anybody can compute again from a prompt's id.

An env is a pure function of its configuration. The rollout role asks it for a prompt, the reward role, in another
process or on another machine, asks it for the same prompt again and scores the response. So nothing about an env
may depend on the process: no global state, no order of calls, no `hash()`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from data_contracts.errors import ConfigError, ContractError

GOLD_REWARD = 1.0
"""What the gold answer of every prompt must score."""

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_NUM_PROVED = 16
_HELD_OUT = "eval"


class Message(TypedDict):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question to the policy, and what is needed to judge the answer."""

    id: str
    """<env>/<index>, or <env>/eval/<index> for a held-out prompt."""
    content: str | tuple[Message, ...]
    """Plain text, given to the policy as it is; or the turns of a chat."""
    answer: str
    """The gold answer."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Whatever the env needs for scoring."""
    guided: str | tuple[Message, ...] | None = None
    """The same question with guidance, for rollouts that are to have some; None where the env has none to give."""


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and its parts."""

    reward: float
    """Weighted sum of the components, by the env's own weights."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Name to value; at least what the reward was made of."""


class Env(ABC):
    """Prompts with a verifiable reward. Subclass it, set the attributes, write three methods.

    An answer that cannot be parsed is a wrong answer: score it. What is not the answer's fault (a sandbox that does
    not start, a service that does not reply) must be raised, as any exception: it is retried and in the end counts
    as missing, never as a reward of zero.
    """

    name: str
    """Unique within a run; letters, digits, `_`, `.` and `-`."""
    verifier: str
    """What computes the reward, as name@version."""
    num_prompts: int
    """Prompts to train on."""
    num_eval_prompts: int
    """Held-out prompts."""
    needs_timeout: bool = True
    """Whether a verification may hang: then it runs in a process that can be killed."""
    tolerance: float = 0.0
    """By how much a second verifier's reward may differ before the two disagree."""

    @abstractmethod
    def prompt(self, index: int) -> Prompt:
        """Return training prompt `index`, from 0 and below `num_prompts`; always the same one."""

    @abstractmethod
    def eval_prompt(self, index: int) -> Prompt:
        """Return held-out prompt `index`; no training prompt asks the same."""

    @abstractmethod
    def score(self, prompt: Prompt, response_text: str, response_ids: list[int]) -> Score:
        """Judge a response to a prompt of this env.

        Args:
            prompt: from `prompt` or `eval_prompt`.
            response_text: decoded without special tokens.
            response_ids: the response's tokens.
        """

    def second_opinion(self, prompt: Prompt, response_text: str, response_ids: list[int]) -> float | None:
        """Return the reward that another verifier gives; None where the env has none, or it cannot tell.

        Where the two differ by more than `tolerance` the response has no reward: nobody knows which one is right. It
        is counted by itself and not tried again.
        """
        return None

    def gold_response(self, prompt: Prompt) -> str:
        """Return a response that must score 1."""
        return prompt.answer

    def wrong_response(self, prompt: Prompt) -> str:
        """Return a response that must score less than 1."""
        return ""

    def validate(self) -> None:
        """Prove the reward on some prompts of both splits.

        Raises:
            ConfigError: a gold answer scores less than 1, a wrong one does not, a prompt is not the same when asked
                for again, or a held-out prompt is also trained on.
        """
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"env name {self.name!r} may have only letters, digits, _, . and -: give it another name")
        if self.num_prompts < 1 or self.num_eval_prompts < 1:
            raise ConfigError(
                f"env {self.name} has {self.num_prompts} training and {self.num_eval_prompts} held-out prompts: "
                "it needs at least one of each"
            )
        trained = [self.prompt(index) for index in range(min(self.num_prompts, _NUM_PROVED))]
        held_out = [self.eval_prompt(index) for index in range(min(self.num_eval_prompts, _NUM_PROVED))]
        for prompt in (*trained, *held_out):
            self._prove(prompt)
        shared = {str(p.content) for p in trained} & {str(p.content) for p in held_out}
        if shared:
            raise ConfigError(f"env {self.name} holds out a prompt that it also trains on: {sorted(shared)[0][:200]!r}")

    def find(self, prompt_id: str) -> Prompt:
        """Return the prompt with this id.

        Raises:
            ContractError: this env has no such prompt.
        """
        path = prompt_id.removeprefix(f"{self.name}/")
        held_out, number = path.startswith(f"{_HELD_OUT}/"), path.rpartition("/")[2]
        if number.isascii() and number.isdigit():
            index = int(number)
            prompt = None
            if held_out and index < self.num_eval_prompts:
                prompt = self.eval_prompt(index)
            elif not held_out and index < self.num_prompts:
                prompt = self.prompt(index)
            if prompt is not None and prompt.id == prompt_id:
                return prompt
        raise ContractError(f"env {self.name} has no prompt {prompt_id!r}: was the run's config changed?")

    def prompt_id(self, index: int) -> str:
        """Return the id of a training prompt."""
        return f"{self.name}/{index}"

    def eval_prompt_id(self, index: int) -> str:
        """Return the id of a held-out prompt."""
        return f"{self.name}/{_HELD_OUT}/{index}"

    def _prove(self, prompt: Prompt) -> None:
        again = self.find(prompt.id)
        if again.content != prompt.content or again.answer != prompt.answer:
            raise ConfigError(
                f"env {self.name} gives another prompt when asked again for {prompt.id}: it cannot be scored"
            )
        gold = self.score(prompt, self.gold_response(prompt), []).reward
        if gold != GOLD_REWARD:
            raise ConfigError(
                f"env {self.name}, prompt {prompt.id}: expected gold answer {prompt.answer!r} to score 1, got {gold}"
            )
        second = self.second_opinion(prompt, self.gold_response(prompt), [])
        if second is not None and abs(second - gold) > self.tolerance:
            raise ConfigError(
                f"env {self.name}, prompt {prompt.id}: expected both verifiers to give gold answer {prompt.answer!r} "
                f"1, the second gives {second}"
            )
        wrong = self.score(prompt, self.wrong_response(prompt), []).reward
        if not wrong < GOLD_REWARD:
            raise ConfigError(
                f"env {self.name}, prompt {prompt.id}: expected a wrong answer to score below 1, got {wrong}"
            )
