"""What a tracking server is told about a run, computed from its records alone. Knows no tracking server.

Everything here is a pure function of records and configuration, times included: telling the same thing twice
gives the same bytes, which is what lets an exporter that was killed say it again without harm.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from data_contracts.config import RunConfig
from data_contracts.metrics import check_names
from data_contracts.records import Audit, Commit, Control, Curated, Evaluation, Raw, Scored

MAX_VALUE_CHARACTERS = 6000
COMMIT_MARKER = "export/commit"
EVALUATION_MARKER = "export/evaluation"
AUDIT_MARKER = "export/audit"
MARKERS = (COMMIT_MARKER, EVALUATION_MARKER, AUDIT_MARKER)
HEADLINES = ("eval/accuracy", "eval/reward")
"""Evaluation metrics that decide the champion: the first one that an evaluation has."""


@dataclass(frozen=True)
class Point:
    """One value of one metric."""

    key: str
    value: float
    at_ms: int
    """Milliseconds since the epoch, from the record: part of the point's identity."""
    step: int
    """Policy version; for the two markers, the number of the record."""


@dataclass(frozen=True)
class EnvInput:
    """Where the prompts of a run come from."""

    name: str
    """Kind of env, and its data set if it has one, for example reasoning_gym/chain_sum."""
    digest: str
    """First 36 hexadecimal digits of the SHA-256 of the env's configuration."""
    config: dict[str, Any]


@dataclass(frozen=True)
class RunState:
    """How a run is, by its control records."""

    kind: Literal["running", "ended", "failed", "stopped"]
    at_ms: int
    """When that was written; 0 when nothing was."""
    error: str = ""
    """Of the role that failed, or why it was stopped."""

    @property
    def is_over(self) -> bool:
        """Whether no process works on the run; a stopped one can be resumed."""
        return self.kind != "running"


def flatten(config: BaseModel) -> dict[str, str]:
    """Return the resolved configuration as dotted names and texts, for example train.learning_rate -> 0.0003.

    Values are JSON, texts without quotes; those longer than 6000 characters are cut and end in "...".
    """
    return {name: shorten(value) for name, value in _leaves("", config.model_dump(mode="json"))}


def safe_key(key: str) -> str:
    """Return `key` with every character that MLflow refuses in names as an underscore."""
    return re.sub(r"[^\w\-. :/]", "_", key, flags=re.ASCII)


def shorten(text: str, limit: int = MAX_VALUE_CHARACTERS) -> str:
    """Return `text`, or its beginning and "..." when it is longer than `limit` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _leaves(prefix: str, value: object) -> Iterable[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            name = safe_key(str(key))
            yield from _leaves(f"{prefix}.{name}" if prefix else name, inner)
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for i, inner in enumerate(value):
            yield from _leaves(f"{prefix}.{i}", inner)
    else:
        yield prefix, value if isinstance(value, str) else json.dumps(value)


def env_inputs(config: RunConfig) -> list[EnvInput]:
    """Return the sources of prompts, in the order of the configuration."""
    inputs = []
    for env in config.envs:
        body = env.model_dump(mode="json")
        detail = body.get("dataset") or body.get("path")
        inputs.append(EnvInput(f"{env.type}/{detail}" if detail else env.type, _digest(body)[:36], body))
    return inputs


def model_name(config: RunConfig) -> str:
    """Return the name under which policies are registered: the run's short name and a digest.

    The digest covers what makes two evaluations comparable (model, envs, how it is evaluated), so that one
    name never holds policies of which none can be called the better one.
    """
    compared = {
        "model": config.model.model_dump(mode="json"),
        "envs": [env.model_dump(mode="json") for env in config.envs],
        "evaluate": config.evaluate.model_dump(mode="json", include={"num_prompts", "max_new_tokens"}),
        "max_new_tokens": config.rollout.sampling.max_new_tokens,
    }
    return f"{config.name}-{_digest(compared)[:8]}"


def commit_points(commit: Commit, told: Sequence[Curated | Raw | Scored]) -> list[Point]:
    """Return a commit's metrics, what the other roles did meanwhile, and the commit's marker, last.

    Args:
        commit: the step.
        told: the records of the other roles that fall to it (see `infra.windows`).

    Raises:
        ContractError: a name is not declared in data_contracts/metrics.py.
    """
    values = add_up(told) | commit.metrics
    return _points(values, commit.version, _ms(commit.at)) + [
        Point(COMMIT_MARKER, float(commit.version), _ms(commit.at), commit.version)
    ]


def evaluation_points(number: int, evaluation: Evaluation, *, is_first: bool) -> list[Point]:
    """Return the metrics of evaluation record `number` at its version, and the marker at its number, last.

    A version that an earlier record has evaluated (not `is_first`) gets no second value, only the marker.

    Raises:
        ContractError: a name is not declared in data_contracts/metrics.py.
    """
    at_ms = _ms(evaluation.at)
    points = _points(evaluation.metrics, evaluation.version, at_ms) if is_first else []
    return [*points, Point(EVALUATION_MARKER, float(number), at_ms, number)]


def audit_points(number: int, audit: Audit) -> list[Point]:
    """Return what the audit found in the window of record `number`, at that number, and the marker, last.

    Raises:
        ContractError: a name is not declared in data_contracts/metrics.py.
    """
    broken = [result for result in audit.results if not result.passed]
    values = {
        "rows": float(audit.num_rows),
        "torn": float(audit.num_torn),
        "rules": float(len(audit.results)),
        "violations": float(len(broken)),
    }
    values |= {name.replace("/", "."): value for name, value in audit.statistics.items() if math.isfinite(value)}
    named = {f"audit/{audit.stage}/{name}": value for name, value in values.items()}
    at_ms = _ms(audit.at)
    return [*_points(named, number, at_ms), Point(AUDIT_MARKER, float(number), at_ms, number)]


def audit_summary(audits: Sequence[Audit]) -> str:
    """Return in one line what the audit has found so far, for a tag."""
    broken: dict[str, int] = {}
    for audit in audits:
        for result in audit.results:
            if not result.passed:
                broken[result.rule] = broken.get(result.rule, 0) + 1
    told = ", ".join(f"{rule} {count}" for rule, count in sorted(broken.items(), key=lambda item: (-item[1], item[0])))
    return shorten(f"windows {len(audits)}, violations {sum(broken.values())}" + (f": {told}" if told else ""), 500)


def _points(values: Mapping[str, float], step: int, at_ms: int) -> list[Point]:
    check_names(values)
    return [Point(safe_key(key), float(value), at_ms, step) for key, value in sorted(values.items())]


def add_up(records: Sequence[Curated | Raw | Scored]) -> dict[str, float]:
    """Return what the roles did, summed over their records, under the role's name where a name has no folder.

    Besides the sums: the share of its time that each role waited (<role>/idle), and the tokens sampled by
    second of work (rollout/tokens_per_s).
    """
    roles: dict[type[BaseModel], str] = {Raw: "rollout", Scored: "verify", Curated: "curate"}
    sums: dict[str, float] = {}
    for record in records:
        for name, value in record.metrics.items():
            key = name if "/" in name else f"{roles[type(record)]}/{name}"
            sums[key] = sums.get(key, 0.0) + value
    for role in roles.values():
        busy_s, waiting_s = sums.get(f"{role}/busy_s", 0.0), sums.get(f"{role}/waiting_s", 0.0)
        if busy_s + waiting_s > 0:
            sums[f"{role}/idle"] = waiting_s / (busy_s + waiting_s)
    if sums.get("rollout/busy_s", 0.0) > 0 and "rollout/tokens" in sums:
        sums["rollout/tokens_per_s"] = sums["rollout/tokens"] / sums["rollout/busy_s"]
    return sums


def is_registered(version: int, config: RunConfig) -> bool:
    """Whether a version is registered for its number alone: every register_every, and the last of the run."""
    return version % config.tracking.register_every == 0 or version == config.steps


def lineage(commits: Sequence[Commit]) -> list[dict[str, Any]]:
    """Return, for each commit, what its weights came from: tickets and batches by SHA-256, and its histograms."""
    return [
        {
            "version": commit.version,
            "status": commit.status,
            "digest": commit.weights.digest,
            "batches": consumed_batches(commit),
            "tickets": sorted(consumed.ticket for consumed in commit.consumed),
            "histograms": commit.histograms,
            "evidence": commit.evidence,
        }
        for commit in commits
    ]


def consumed_batches(commit: Commit) -> list[str]:
    """Return the SHA-256 of every batch that the commit took groups from, sorted."""
    return sorted({consumed.batch.sha256 for consumed in commit.consumed})


def version_tags(commit: Commit, run_id: str, store_url: str, lineage_path: str) -> dict[str, str]:
    """Return what is said about a registered policy: identity, digest, where its weights are, what made it."""
    weights = commit.weights
    return {
        "rollflow.run_id": run_id,
        "rollflow.version": str(commit.version),
        "rollflow.digest": weights.digest,
        "rollflow.weights": shorten(" ".join(f"{store_url}/{ref.key}" for ref in weights.objects)),
        "rollflow.weights_kind": weights.kind if weights.base is None else f"{weights.kind} to {weights.base}",
        "rollflow.batches_sha256": hashlib.sha256("\n".join(consumed_batches(commit)).encode()).hexdigest(),
        "rollflow.lineage": lineage_path,
        "rollflow.trained_tickets": str(commit.num_trained),
        "rollflow.trained_tokens": str(commit.num_tokens),
    }


def weights_folder(commit: Commit) -> str:
    """Return the key of the folder that holds the version's weights; empty if nothing was published for it."""
    return commit.weights.objects[0].key.rpartition("/")[0] if commit.weights.objects else ""


def headline(evaluation: Evaluation) -> tuple[str, float] | None:
    """Return (name, value) of the metric that decides the champion; None if the evaluation has none."""
    for key in HEADLINES:
        if key in evaluation.metrics:
            return key, evaluation.metrics[key]
    return None


def run_state(control: Sequence[Control]) -> RunState:
    """Return how the run is: what stands after the newest `start` counts, a failure more than an end than a stop."""
    starts = [i for i, record in enumerate(control) if record.kind == "start"]
    current = control[starts[-1] :] if starts else control
    kinds: dict[str, Literal["failed", "ended", "stopped"]] = {"fail": "failed", "end": "ended", "stop": "stopped"}
    for kind, state in kinds.items():
        for record in current:
            if record.kind == kind:
                error = f"{record.role}: {record.error}" if state == "failed" else record.error
                return RunState(state, _ms(record.at), error)
    return RunState("running", _ms(current[0].at) if current else 0)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
