"""The exporter: follows the records of a run into one MLflow run, at its own pace. Only this file and
those beside it (infra/tracking_*.py) import MLflow.

The records are the truth and MLflow is a view of it, which may be slow, down, or restored from yesterday. The
exporter therefore remembers nothing: at every pass it asks MLflow what it holds and adds what is missing.

- Where to go on. Every commit's metrics go out in one call together with a marker, and MLflow's SQL stores
  write the metrics of a call in one transaction: the newest marker says which commits are in. Whatever else
  belongs to a commit (lineage, registered version) is written before the marker.
- Exactly once. Values, steps and timestamps come from the records alone. To MLflow's SQL stores a point that is
  equal in all of them is the same row, so a call that is repeated because its reply was lost, or by a second
  exporter, changes nothing. Runs and model versions have no such key: they are looked for by their tags before
  and again after they are made, and of two the younger is deleted.
- Status. `end` makes FINISHED and `fail` FAILED. A stopped run can be resumed, so `stop` makes SCHEDULED, with
  the tag rollflow.state saying why; `start` makes RUNNING again. KILLED is never set: a killed run has no one
  to write a record, and goes on when it is started again.

Nobody waits for the exporter but the end of the run, for `tracking.drain_s`.
"""

import json
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from data_contracts.config import RunConfig
from data_contracts.errors import ConfigError, ProtocolError
from data_contracts.records import Audit, Commit, Control, Evaluation, Record
from infra import history, settings
from infra.history import Point
from infra.log import Cached, Log
from infra.pages import AS_TRAINING
from infra.store import Store
from infra.windows import Windows

settings.apply_defaults()  # MLflow reads its environment, telemetry first of all, when it is imported

from mlflow import MlflowClient  # noqa: E402, TID251
from mlflow.entities import (  # noqa: E402, TID251
    Dataset,
    DatasetInput,
    InputTag,
    Metric,
    Param,
    Run,
    RunTag,
)
from mlflow.entities.model_registry import ModelVersion  # noqa: E402, TID251
from mlflow.exceptions import MlflowException  # noqa: E402, TID251

from infra.tracking_experiments import as_service_error, ensure_experiment  # noqa: E402
from infra.tracking_registry import ModelRegistry  # noqa: E402

logger = logging.getLogger("rollflow.export")

MAX_METRICS_PER_CALL = 1000
MAX_NAMES_PER_CALL = 100
COMMITS_AT_ONCE = 200
STATUSES = {"running": "RUNNING", "ended": "FINISHED", "failed": "FAILED", "stopped": "SCHEDULED"}

R = TypeVar("R", bound=Record)
T = TypeVar("T")


class Exporter:
    """Exports one run. Make one per process; any number may work on the same run without harm.

    Args:
        store: the run's prefix.
        uri: tracking server; None takes config.tracking.uri, then MLFLOW_TRACKING_URI.
        config: the run's resolved configuration.
        run_id: the run's id; the MLflow run is found by it (tag rollflow.run_id).
        packages: package to version, for tags.
        flow_run_id: id of the Prefect flow run, for a tag; empty for none.
        flow_run_url: its page.
        tags: further tags of the MLflow run.

    Raises:
        ConfigError: no tracking server is named anywhere.
    """

    def __init__(
        self,
        store: Store,
        uri: str | None,
        config: RunConfig,
        run_id: str,
        *,
        packages: Mapping[str, str] | None = None,
        flow_run_id: str = "",
        flow_run_url: str = "",
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self.uri = uri or config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        if not self.uri:
            raise ConfigError("tracking.uri is not set and MLFLOW_TRACKING_URI neither: run `rollflow up`, or name one")
        self._store = store
        self._config = config
        self._run_id = run_id
        self._client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        self._commits = Log(store, "log/commit", Commit)
        self._windows = Windows(store)
        self._control = Cached(Log(store, "log/control", Control))
        self._evaluations = Cached(Log(store, "log/eval", Evaluation))
        self._audits = Cached(Log(store, "log/audit", Audit))
        self._registry = ModelRegistry(self._client, config, run_id, store.url)
        self._params = history.flatten(config)
        self._tags = _run_tags(store.url, run_id, packages or {}, flow_run_id, flow_run_url) | dict(tags or {})
        self._experiment = ""
        self._mlflow_run_id: str | None = None

    @property
    def run_url(self) -> str:
        """Page of the MLflow run; empty before the first pass that reached the server."""
        page = f"{self.uri}/#/experiments/{self._experiment}/runs/{self._mlflow_run_id}{AS_TRAINING}"
        return page if self._mlflow_run_id else ""

    def export_available(self) -> int:
        """Bring MLflow up to the records that exist now; return how many of them were new to it.

        Raises:
            ServiceError: the server does not answer (within about ten seconds) or refuses; call again later.
            ContractError: a record carries a metric that data_contracts/metrics.py does not declare.
            StoreError: the run's store fails.
        """
        # Read first: whatever was committed before the run ended is then among what follows.
        state = history.run_state(self._control.read())
        self._registry.forget()
        with as_service_error(self.uri):
            run = self._find_run() or self._create_run()
            self._describe(run)
            num_commits = self._export_commits(run)
            num_evaluations = self._export_evaluations(run)
            num_audits = self._export_audits(run)
            self._export_state(run, state)
        return num_commits + num_evaluations + num_audits

    # The run

    def _find_run(self) -> Run | None:
        if self._mlflow_run_id is not None:
            run = _found(self._client.get_run, self._mlflow_run_id)
            if run is not None and run.info.lifecycle_stage == "active":
                return run
        self._experiment = ensure_experiment(self._client, self._config.tracking.experiment)
        return self._only_run()

    def _create_run(self) -> Run:
        started = self._control.read()
        made = self._client.create_run(
            self._experiment,
            start_time=int(started[0].at * 1000) if started else None,
            tags={"rollflow.run_id": self._run_id, "rollflow.made_ns": f"{time.time_ns():020d}"},
            run_name=self._run_id,
        )
        return self._only_run() or made

    def _only_run(self) -> Run | None:
        """Return the MLflow run of this run, if there is one; of several, the one made first, deleting the others.

        There are several when two exporters began at once, or when the reply to a creation was lost.
        """
        found = self._client.search_runs([self._experiment], f"tags.`rollflow.run_id` = '{self._run_id}'")
        found = sorted(found, key=lambda run: (run.data.tags.get("rollflow.made_ns", ""), run.info.run_id))
        for double in found[1:]:
            self._client.delete_run(double.info.run_id)
        self._mlflow_run_id = found[0].info.run_id if found else None
        return found[0] if found else None

    def _describe(self, run: Run) -> None:
        """Add the parameters, tags and prompt sources that the MLflow run lacks."""
        params = [Param(key, value) for key, value in self._params.items() if key not in run.data.params]
        tags = [RunTag(key, value) for key, value in self._tags.items() if run.data.tags.get(key) != value]
        for part in _cut(params, MAX_NAMES_PER_CALL):
            self._client.log_batch(run.info.run_id, params=part, synchronous=True)
        for part in _cut(tags, MAX_NAMES_PER_CALL):
            self._client.log_batch(run.info.run_id, tags=part, synchronous=True)
        known = {(item.dataset.name, item.dataset.digest) for item in (run.inputs.dataset_inputs if run.inputs else [])}
        inputs = [env for env in history.env_inputs(self._config) if (env.name, env.digest) not in known]
        if inputs:
            self._client.log_inputs(run.info.run_id, [_dataset_input(env) for env in inputs])

    # Commits

    def _export_commits(self, run: Run) -> int:
        first = _next_number(run, history.COMMIT_MARKER)
        before = self._commits.read(first - 1) if first else None
        num_exported = 0
        while commits := self._commits.read_from(first + num_exported, limit=COMMITS_AT_ONCE):
            self._export_some(run, before, commits)
            before = commits[-1]
            num_exported += len(commits)
        return num_exported

    def _export_some(self, run: Run, before: Commit | None, commits: Sequence[Commit]) -> None:
        """Export successive commits; `before` is the one before the first."""
        pending: list[Point] = []
        for commit in commits:
            points = history.commit_points(commit, self._windows.read(before, commit))
            if len(pending) + len(points) > MAX_METRICS_PER_CALL:
                self._log_points(run, pending)
                pending = []
            if history.is_registered(commit.version, self._config):
                # Its lineage and its version stand before the marker that says it is done.
                self._log_lineage(run, commit.version)
                self._register(run, commit)
            pending += points
            before = commit
        self._log_points(run, pending)

    def _log_points(self, run: Run, points: Sequence[Point], model_id: str | None = None) -> None:
        for part in _cut(points, MAX_METRICS_PER_CALL):
            metrics = [
                Metric(p.key, p.value, p.at_ms, p.step, model_id=None if p.key in history.MARKERS else model_id)
                for p in part
            ]
            self._client.log_batch(run.info.run_id, metrics=metrics, synchronous=True)

    def _lineage_path(self, version: int) -> tuple[int, str]:
        """Return the first version of the block of register_every versions that `version` lies in, and its file."""
        every = self._config.tracking.register_every
        first = max(0, (version - 1) // every * every + 1)
        return first, f"lineage/{first:010d}.json"

    def _register(self, run: Run, commit: Commit) -> ModelVersion:
        return self._registry.register(run, commit, self._lineage_path(commit.version)[1])

    def _log_lineage(self, run: Run, version: int) -> None:
        """Write the file that says what the versions up to `version`, since the last milestone, were trained on."""
        first, path = self._lineage_path(version)
        commits = self._commits.read_from(first, limit=version - first + 1)
        self._client.log_text(run.info.run_id, json.dumps(history.lineage(commits), indent=1), path)

    # Evaluations

    def _export_evaluations(self, run: Run) -> int:
        evaluations = self._evaluations.read()
        first = _next_number(run, history.EVALUATION_MARKER)
        for number, evaluation in enumerate(evaluations[first:], start=first):
            is_first = all(earlier.version != evaluation.version for earlier in evaluations[:number])
            points = history.evaluation_points(number, evaluation, is_first=is_first)
            model_id = self._export_evaluation(run, number, evaluation) if is_first else None
            self._log_points(run, points, model_id)
        return max(0, len(evaluations) - first)

    def _export_evaluation(self, run: Run, number: int, evaluation: Evaluation) -> str | None:
        """Write what belongs to an evaluation besides its points; return MLflow's id of the model evaluated."""
        self._client.log_text(run.info.run_id, evaluation.model_dump_json(indent=1), f"evaluations/{number:010d}.json")
        commit = self._commits.read(evaluation.version)
        if commit is None:
            raise ProtocolError(f"log/eval record {number} evaluates version {evaluation.version}, which has no commit")
        version = self._register(run, commit)
        if commit.weights.digest != evaluation.digest:
            raise ProtocolError(
                f"log/eval record {number} evaluated weights {evaluation.digest} as version {evaluation.version}, "
                f"whose commit says {commit.weights.digest}"
            )
        for key, value in sorted(evaluation.metrics.items()):
            self._registry.tag(version, history.safe_key(key), repr(value))
        decisive = history.headline(evaluation)
        if decisive is not None:
            self._registry.crown(version, *decisive)
        return version.source.removeprefix("models:/") if version.source else None

    # Data quality

    def _export_audits(self, run: Run) -> int:
        """Write what the audit found, window by window: numbers, the whole record as JSON, and a summary as a tag."""
        audits = self._audits.read()
        first = _next_number(run, history.AUDIT_MARKER)
        pending: list[Point] = []
        for number, audit in enumerate(audits[first:], start=first):
            points = history.audit_points(number, audit)
            if len(pending) + len(points) > MAX_METRICS_PER_CALL:
                self._log_points(run, pending)
                pending = []
            self._client.log_text(run.info.run_id, audit.model_dump_json(indent=1), f"data_quality/{number:010d}.json")
            pending += points
        self._log_points(run, pending)
        if audits[first:]:
            self._client.set_tag(run.info.run_id, "rollflow.data_quality", history.audit_summary(audits))
        return max(0, len(audits) - first)

    # The end

    def _export_state(self, run: Run, state: history.RunState) -> None:
        """Bring status and tags to `state`; when the run is over, register its newest version too."""
        version = self._commits.tail() - 1 if state.is_over else -1
        newest = self._commits.read(version) if version >= 0 else None
        text = f"{state.kind} at version {version}" if state.is_over else state.kind
        if run.data.tags.get("rollflow.state") == text and run.info.status == STATUSES[state.kind]:
            return
        if newest is not None:
            self._log_lineage(run, newest.version)
            self._register(run, newest)
        status = STATUSES[state.kind]
        if status in ("FINISHED", "FAILED"):
            self._client.set_terminated(run.info.run_id, status, end_time=state.at_ms)
        elif run.info.status != status:
            self._client.update_run(run.info.run_id, status=status)
        tags = {"rollflow.error": history.shorten(state.error), "rollflow.state": text}
        self._client.log_batch(run.info.run_id, tags=[RunTag(*item) for item in tags.items()], synchronous=True)


def _next_number(run: Run, marker: str) -> int:
    return int(run.data.metrics.get(marker, -1.0)) + 1


def _found(call: Callable[[str], T], name: str) -> T | None:
    """Return what `call(name)` returns, or None if MLflow has no such thing."""
    try:
        return call(name)
    except MlflowException as cause:
        if cause.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def _cut(items: Sequence[T], most: int) -> Iterator[list[T]]:
    for start in range(0, len(items), most):
        yield list(items[start : start + most])


def _dataset_input(env: history.EnvInput) -> DatasetInput:
    source = json.dumps({"tags": {"env": env.name, "config": json.dumps(env.config, sort_keys=True)}})
    dataset = Dataset(name=env.name, digest=env.digest, source_type="code", source=source)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "rollout")])


def _run_tags(
    store_url: str, run_id: str, packages: Mapping[str, str], flow_run_id: str, flow_run_url: str
) -> dict[str, str]:
    tags = {"rollflow.run_id": run_id, "rollflow.store": store_url}
    tags |= {f"rollflow.package.{name}": number for name, number in packages.items()}
    optional = {
        "rollflow.flow_run_id": flow_run_id,
        "rollflow.flow_run": flow_run_url,
        "mlflow.source.git.commit": git_commit(),
    }
    return tags | {key: value for key, value in optional.items() if value}


def git_commit() -> str:
    """Return the commit of the working copy that this code lies in; empty if it lies in none."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
