"""The reward stage as a function: trajectories in, the same trajectories with their rewards out.

A row without a reward says why. That is the case where the sample itself had failed, where the prompt cannot be
found again, and where the verifier failed or hung on every attempt: none of these is a reward of zero.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from data_contracts.config import OverlongPenalty, RewardConfig
from data_contracts.trajectory import add_columns
from tasks.envs.protocol import Env, Prompt, Score
from tasks.envs.registry import Envs
from tasks.verify import DISAGREE, Counts, Job, Outcome, VerifierPool, attempt, judge

Found = tuple[Env, Prompt] | str
"""What a prompt id stands for, or why that cannot be said."""

_KINDS = {
    "no response": "sample",
    "verification took longer": "timeout",
    "verifier process died": "died",
    "verifier gave": "not_finite",
    DISAGREE: "disagree",
}
"""How a reason begins, to what kind it is of; all others are exceptions of a verifier."""

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
    max_tokens: int | None = None,
) -> Scored:
    """Judge every row of a raw table; the order and the columns of the rows stay as they are.

    Args:
        table: checked trajectories of stage raw.
        envs: the run's envs, which find a prompt by its id.
        decode: from `tasks.prompts.make_decoder`.
        config: timeout and retries of a verification.
        pool: processes for envs that need a timeout; None starts some for this call alone.
        max_tokens: the length from which config.overlong costs its whole penalty, where it names none itself.
        encode: when given, a row whose prompt tokens are not those of the env's prompt gets no reward: the env
            gives another prompt under this id than it gave to the rollout role.
    """
    jobs = [
        Job(prompt_id, text, ids)
        for prompt_id, text, ids in zip(
            table.column("prompt_id").to_pylist(),
            decode(table.column("response_ids").to_pylist()),
            table.column("response_ids").to_pylist(),
            strict=True,
        )
    ]
    found = _look_up(jobs, envs)
    if encode is not None:
        _compare_prompts(found, jobs, table, encode)
    errors = table.column("error").to_pylist()
    failed = [f"no response: {error}" if error else "" for error in errors]
    outcomes, counts = _judge(jobs, found, failed, envs, config, pool)
    if config.overlong is not None:
        outcomes = [
            shaped(outcome, len(job.response_ids), config.overlong, max_tokens)
            for outcome, job in zip(outcomes, jobs, strict=True)
        ]
    verifiers = [f[0].verifier if isinstance(f := found[job.prompt_id], tuple) else "" for job in jobs]
    return Scored(
        add_columns(table, _columns(jobs, outcomes, verifiers)),
        {
            "verify/rows": float(table.num_rows),
            "verify/errors": float(sum(isinstance(outcome, str) for outcome in outcomes)),
            "verify/failed_samples": float(sum(map(bool, failed))),
            "verify/retries": float(counts.retries),
            "verify/timeouts": float(counts.timeouts),
            "verify/restarts": float(counts.restarts),
        }
        | count_errors(outcomes),
    )


def count_errors(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return how many samples have no reward, by kind: verify/failed/sample, timeout, died, not_finite, disagree or
    exception; and how many of those that have one gave no answer that could be read (verify/unparsed).
    """
    found: dict[str, float] = {}
    for outcome in outcomes:
        if isinstance(outcome, Score) and 0.0 in (outcome.components.get(name) for name in ("parsed", "answered")):
            found["verify/unparsed"] = found.get("verify/unparsed", 0.0) + 1
        if isinstance(outcome, str):
            kind = next((kind for start, kind in _KINDS.items() if outcome.startswith(start)), "exception")
            found[f"verify/failed/{kind}"] = found.get(f"verify/failed/{kind}", 0.0) + 1
    return found


def judge_all(
    jobs: Sequence[Job], envs: Envs, config: RewardConfig, *, pool: VerifierPool | None = None
) -> tuple[list[Outcome], Counts]:
    """Judge responses that are in no batch, for example those of an evaluation, with the same care.

    Returns:
        For every job a score, or in words why there is none; and what happened beside.
    """
    return _judge(jobs, _look_up(jobs, envs), [""] * len(jobs), envs, config, pool)


def make_pool(envs: Envs, config: RewardConfig) -> VerifierPool:
    """Return the processes that a role keeps for all its batches; they start when first needed."""
    return VerifierPool(envs, timeout_s=config.timeout_s, max_retries=config.max_retries)


def _look_up(jobs: Sequence[Job], envs: Envs) -> dict[str, Found]:
    """Return env and prompt of every prompt id, each looked up once, or why they cannot be had."""
    return {
        prompt_id: attempt(lambda prompt_id=prompt_id: (envs.env_of(prompt_id), envs.find(prompt_id)))
        for prompt_id in {job.prompt_id for job in jobs}
    }


def _compare_prompts(
    found: dict[str, Found], jobs: Sequence[Job], table: pa.Table, encode: Callable[[Prompt], list[int]]
) -> None:
    """Put a reason in the place of every prompt that is another here than it was for the rollout role."""
    given = table.column("prompt_ids")
    first_rows = {job.prompt_id: row for row, job in reversed(list(enumerate(jobs)))}
    for prompt_id, row in first_rows.items():
        here = found[prompt_id]
        if isinstance(here, str):
            continue
        prompt = here[1]
        ids = attempt(lambda prompt=prompt: encode(prompt))
        if ids != given[row].as_py():
            found[prompt_id] = (
                f"env {here[0].name} gives another prompt for {prompt_id} here than it gave to the rollout role: "
                "use the same versions of its packages everywhere"
            )


def _judge(
    jobs: Sequence[Job],
    found: dict[str, Found],
    failed: Sequence[str],
    envs: Envs,
    config: RewardConfig,
    pool: VerifierPool | None,
) -> tuple[list[Outcome], Counts]:
    """Judge the jobs that have not failed already: in this process, or in the pool those that may hang."""
    counts = Counts()
    outcomes: list[Outcome] = []
    slow: list[int] = []
    for number, job in enumerate(jobs):
        here = found[job.prompt_id]
        if failed[number] or isinstance(here, str):
            outcomes.append(failed[number] or str(here))
        elif here[0].needs_timeout:
            outcomes.append("not judged")
            slow.append(number)
        else:
            outcomes.append(_judge_here(*here, job, config.max_retries, counts))
    if slow:
        own = pool or make_pool(envs, config)
        try:
            answers, more = own.verify([jobs[number] for number in slow])
        finally:
            if pool is None:
                own.close()
        for number, answer in zip(slow, answers, strict=True):
            outcomes[number] = answer
        counts = Counts(counts.retries + more.retries, more.timeouts, more.restarts)
    return [checked(outcome) for outcome in outcomes], counts


def _columns(jobs: Sequence[Job], outcomes: Sequence[Outcome], verifiers: Sequence[str]) -> dict[str, Sequence[object]]:
    scores = [outcome if isinstance(outcome, Score) else None for outcome in outcomes]
    return {
        "response_text": [job.response_text for job in jobs],
        "reward": [math.nan if score is None else score.reward for score in scores],
        "reward_names": [[] if score is None else list(score.components) for score in scores],
        "reward_values": [[] if score is None else list(score.components.values()) for score in scores],
        "verifier": verifiers,
        "reward_error": [outcome if isinstance(outcome, str) else "" for outcome in outcomes],
    }


def shaped(outcome: Outcome, num_tokens: int, config: OverlongPenalty, max_tokens: int | None) -> Outcome:
    """Return the outcome with the penalty on its length as component `overlong`, and in the reward; weight 1.

    The soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13): 0 up to max - buffer tokens, falling linearly to
    -factor at max tokens, -factor beyond.
    """
    limit = config.max_tokens or max_tokens
    if isinstance(outcome, str) or limit is None:
        return outcome
    excess = num_tokens - (limit - config.buffer_tokens)
    penalty = -config.factor * min(max(excess / config.buffer_tokens, 0.0), 1.0)
    return Score(outcome.reward + penalty, {**outcome.components, "overlong": penalty})


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
        if isinstance(outcome, Score) or outcome.startswith(DISAGREE):
            break
        counts.retries += 1
        outcome = attempt(lambda: judge(env, prompt, job))
    return outcome
