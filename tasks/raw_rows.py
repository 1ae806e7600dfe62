"""Finished groups as rows of the raw table."""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from data_contracts import trajectory
from data_contracts.config import RunConfig
from data_contracts.records import GroupRef
from models.requests import Finished
from tasks.branching import FROM_PROMPT, Start

MAX_SAMPLES = 1 << 20


@dataclass
class Group:
    """A ticket's group while it is being rolled out."""

    ticket: int
    attempt: int
    prompt_id: str
    env: str
    prompt_ids: list[int]
    queued_at: float
    num_samples: int
    error: str = ""
    guided_ids: list[int] = field(default_factory=list)
    """Prompt with guidance, for the samples that are to have it."""
    results: dict[int, Finished] = field(default_factory=dict)
    starts: dict[int, Start] = field(default_factory=dict)
    """Where samples begin that do not begin at the prompt."""


def sample_seed(ticket: int, sample: int) -> int:
    """Return the seed of a sample's random stream: the same for every attempt at the ticket."""
    return ticket * MAX_SAMPLES + sample


def temperature_of(sample: int, num_samples: int, config: RunConfig) -> float:
    """Return what divides a sample's logits: 0, greedy, for the last one of its group where the run wants one."""
    is_greedy = config.rollout.greedy_sample and sample == num_samples - 1
    return 0.0 if is_greedy else config.rollout.sampling.temperature


def make_raw_table(groups: list[Group], config: RunConfig) -> tuple[pa.Table, list[GroupRef]]:
    """Return the raw table of finished groups, rows by group and sample, and where each group lies in it."""
    columns: dict[str, list[object]] = {field.name: [] for field in trajectory.SCHEMAS["raw"]}
    references = []
    first_row = 0
    for group in groups:
        rows = [_row(group, sample, config) for sample in range(group.num_samples)]
        for row in rows:
            for name, value in row.items():
                columns[name].append(value)
        versions = [int(version) for result in group.results.values() for version in result.digests]
        references.append(
            GroupRef(
                ticket=group.ticket,
                attempt=group.attempt,
                first_row=first_row,
                num_rows=group.num_samples,
                oldest_version=min(versions, default=-1),
            )
        )
        first_row += group.num_samples
    arrays = {field.name: pa.array(columns[field.name], field.type) for field in trajectory.SCHEMAS["raw"]}
    return pa.table(arrays, schema=trajectory.SCHEMAS["raw"]), references


def _row(group: Group, sample: int, config: RunConfig) -> dict[str, object]:
    sampling = config.rollout.sampling
    result = group.results.get(sample)
    start = group.starts.get(sample, FROM_PROMPT)
    shared, own = len(start.prefix), 0 if result is None else len(result.response_ids)
    return {
        "ticket": group.ticket,
        "attempt": group.attempt,
        "sample": sample,
        "prompt_id": group.prompt_id,
        "env": group.env,
        "seed": sample_seed(group.ticket, sample),
        "prompt_ids": group.prompt_ids,
        "response_ids": [] if result is None else np.concatenate([start.prefix, result.response_ids]),
        "action_mask": np.arange(shared + own) >= shared if result is not None else [],
        "behavior_logprobs": [] if result is None else _behind(shared, np.nan, result.logprobs),
        "policy_versions": [] if result is None else _behind(shared, -1, result.versions),
        "used_versions": [] if result is None else list(result.digests),
        "used_digests": [] if result is None else list(result.digests.values()),
        "finish_reason": "error" if result is None else result.finish_reason,
        "error": (group.error or "no response") if result is None else "",
        "temperature": temperature_of(sample, group.num_samples, config),
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "engine": config.rollout.engine.type,
        "dtype": config.model.dtype if config.model.type == "local" else "float32",
        "queued_at": group.queued_at,
        "started_at": 0.0 if result is None else result.started_at,
        "finished_at": 0.0 if result is None else result.finished_at,
        "guided_prompt_ids": group.guided_ids if sample < config.rollout.guided_samples else [],
        "branch_of": -1 if result is None else start.branch_of,
        "branch_at": 0 if result is None else shared,
    }


def _behind(shared: int, nothing: float, values: np.ndarray) -> np.ndarray:
    """Return values [T] behind as many places without a value as there are tokens shared with another sample."""
    return np.concatenate([np.full(shared, nothing, values.dtype), values])
