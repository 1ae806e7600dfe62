"""The reward stage as a function: trajectories in, the same trajectories with their rewards out.

A row without a reward says why. That is the case where the sample itself had failed, where the prompt cannot be
found again, and where the verifier failed or hung on every attempt: none of these is a reward of zero.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from data_contracts.config import RewardConfig
from data_contracts.errors import ContractError
from data_contracts.trajectory import add_columns
from tasks.envs.protocol import Env, Prompt, Score
from tasks.envs.registry import Envs
from tasks.verify import Counts, Job, Outcome, VerifierPool, attempt, judge

_LARGEST = float(np.finfo(np.float32).max)


class Scored(NamedTuple):
    """A scored batch."""

    table: pa.Table
    """The raw table with the columns of the reward stage behind."""
    metrics: dict[str, float]
    """verify/rows, verify/errors (rows without a reward), and of these verify/failed_samples; verify/retries,
    verify/timeouts, verify/restarts of verifier processes."""


def score(
    table: pa.Table,
    envs: Envs,
    decode: Callable[[Sequence[Sequence[int]]], list[str]],
    config: RewardConfig,
    *,
    pool: VerifierPool | None = None,
    encode: Callable[[Prompt], list[int]] | None = None,
) -> Scored:
    """Judge every row of a raw table; the order and the columns of the rows stay as they are.

    Args:
        table: checked trajectories of stage raw.
        envs: the run's envs, which find a prompt by its id.
        decode: from `tasks.prompts.make_decoder`.
        config: timeout and retries of a verification.
        pool: processes for envs that need a timeout; None starts some for this call alone.
        encode: when given, a row whose prompt tokens are not those of the env's prompt gets no reward: the env
            gives another prompt under this id than it gave to the rollout role.
    """
    texts = decode(table.column("response_ids").to_pylist())
    rows = _Rows(table, texts, envs, encode)
    counts = rows.in_process(config.max_retries)
    if rows.slow:
        own = pool or make_pool(envs, config)
        try:
            rows.in_pool(own, counts)
        finally:
            if pool is None:
                own.close()
    scored = add_columns(table, rows.columns())
    failed = table.column("finish_reason").to_pylist().count("error")
    errors = sum(isinstance(outcome, str) for outcome in rows.outcomes)
    return Scored(
        scored,
        {
            "verify/rows": float(table.num_rows),
            "verify/errors": float(errors),
            "verify/failed_samples": float(failed),
            "verify/retries": float(counts.retries),
            "verify/timeouts": float(counts.timeouts),
            "verify/restarts": float(counts.restarts),
        },
    )


def make_pool(envs: Envs, config: RewardConfig) -> VerifierPool:
    """Return the processes that a role keeps for all its batches; they start when first needed."""
    return VerifierPool(envs, timeout_s=config.timeout_s, max_retries=config.max_retries)


class _Rows:
    """One batch on its way to rewards: an outcome for every row."""

    def __init__(
        self, table: pa.Table, texts: list[str], envs: Envs, encode: Callable[[Prompt], list[int]] | None
    ) -> None:
        self._envs = envs
        self._encode = encode
        self._texts = texts
        self._prompt_ids = table.column("prompt_id").to_pylist()
        self._prompt_tokens = table.column("prompt_ids")
        self._response_ids = table.column("response_ids").to_pylist()
        self._errors = table.column("error").to_pylist()
        self._found: dict[str, tuple[Env, Prompt] | str] = {}
        self._verifiers = [""] * table.num_rows
        self.outcomes: list[Outcome] = ["not judged"] * table.num_rows
        self.slow: list[int] = []
        """Rows left to the pool."""

    def in_process(self, max_retries: int) -> Counts:
        """Judge the rows of envs that cannot hang, and find those that can."""
        counts = Counts()
        for row, prompt_id in enumerate(self._prompt_ids):
            found = self._find(prompt_id, row)
            if not isinstance(found, str):
                self._verifiers[row] = found[0].verifier
            if self._errors[row]:
                self.outcomes[row] = f"no response: {self._errors[row]}"
            elif isinstance(found, str):
                self.outcomes[row] = found
            elif found[0].needs_timeout:
                self.slow.append(row)
            else:
                self.outcomes[row] = checked(_judge_here(*found, self._job(row), max_retries, counts))
        return counts

    def in_pool(self, pool: VerifierPool, counts: Counts) -> None:
        """Judge the rows of envs that may hang; adds to `counts`."""
        outcomes, more = pool.verify([self._job(row) for row in self.slow])
        for row, outcome in zip(self.slow, outcomes, strict=True):
            self.outcomes[row] = checked(outcome)
        counts.retries += more.retries
        counts.timeouts += more.timeouts
        counts.restarts += more.restarts

    def columns(self) -> dict[str, Sequence[object]]:
        """Return the columns of the reward stage."""
        scores = [outcome if isinstance(outcome, Score) else None for outcome in self.outcomes]
        return {
            "response_text": self._texts,
            "reward": [math.nan if score is None else score.reward for score in scores],
            "reward_names": [[] if score is None else list(score.components) for score in scores],
            "reward_values": [[] if score is None else list(score.components.values()) for score in scores],
            "verifier": self._verifiers,
            "reward_error": [outcome if isinstance(outcome, str) else "" for outcome in self.outcomes],
        }

    def _job(self, row: int) -> Job:
        return Job(self._prompt_ids[row], self._texts[row], self._response_ids[row])

    def _find(self, prompt_id: str, row: int) -> tuple[Env, Prompt] | str:
        """Return env and prompt, or why they cannot be had; looked up once for the rows of a group."""
        if prompt_id not in self._found:
            self._found[prompt_id] = attempt(lambda: self._look_up(prompt_id, row))
        return self._found[prompt_id]

    def _look_up(self, prompt_id: str, row: int) -> tuple[Env, Prompt]:
        env, prompt = self._envs.env_of(prompt_id), self._envs.find(prompt_id)
        if self._encode and self._encode(prompt) != self._prompt_tokens[row].as_py():
            raise ContractError(
                f"env {env.name} gives another prompt for {prompt_id} here than it gave to the rollout role: "
                "use the same versions of its packages everywhere"
            )
        return env, prompt


def checked(outcome: Outcome) -> Outcome:
    """Return the outcome if every number in it is finite as float32, else the reason why it is none."""
    if isinstance(outcome, str):
        return outcome or "verification failed without a word"
    for name, value in (("reward", outcome.reward), *outcome.components.items()):
        if not abs(value) <= _LARGEST:
            return f"verifier gave {name} {value}, expected a finite number"
    return outcome


def _judge_here(env: Env, prompt: Prompt, job: Job, max_retries: int, counts: Counts) -> Outcome:
    outcome = attempt(lambda: judge(env, prompt, job))
    for _ in range(max_retries):
        if isinstance(outcome, Score):
            break
        counts.retries += 1
        outcome = attempt(lambda: judge(env, prompt, job))
    return outcome
