"""The policies of a run as registered model versions of MLflow, which of them is newest, and which is best.

Versions have no key that MLflow would keep unique: they are looked for by their tags before and after they are made,
and of two the younger is deleted. Import infra/tracking.py first: it sets the environment that MLflow reads once.
"""

import math

from mlflow import MlflowClient  # noqa: TID251
from mlflow.entities import LoggedModel, LoggedModelStatus, Run  # noqa: TID251
from mlflow.entities.model_registry import ModelVersion  # noqa: TID251
from mlflow.exceptions import MlflowException  # noqa: TID251

from data_contracts.config import RunConfig
from data_contracts.records import Commit
from infra import history

CHAMPION, CANDIDATE = "champion", "candidate"


class ModelRegistry:
    """What MLflow has of one run's policies; what it is asked is remembered until `forget`."""

    def __init__(self, client: MlflowClient, config: RunConfig, run_id: str, store_url: str) -> None:
        """Ask nothing yet.

        Args:
            client: of a tracking server that is its own registry.
            config: the run's, for the registered model's name.
            run_id: of the run; its versions are found by it.
            store_url: the run's prefix, where the weights lie.
        """
        self._client = client
        self._config = config
        self._run_id = run_id
        self._store_url = store_url
        self._model_name = history.model_name(config)
        self._versions: dict[int, ModelVersion] | None = None

    def forget(self) -> None:
        """Ask the server again: others register too."""
        self._versions = None

    def register(self, run: Run, commit: Commit, lineage_path: str) -> ModelVersion:
        """Return the registered version of a commit, registering it if need be; the newest is the candidate.

        Args:
            run: the MLflow run that it belongs to.
            commit: of the version.
            lineage_path: artifact of that run that says what the version was trained on.
        """
        if commit.version not in self._registered():
            self._register_new(run, commit, lineage_path)
        registered = self._registered()
        if commit.version == max(registered):
            self._client.set_registered_model_alias(
                self._model_name, CANDIDATE, str(registered[commit.version].version)
            )
        return registered[commit.version]

    def _register_new(self, run: Run, commit: Commit, lineage_path: str) -> None:
        self._ensure_registered_model()
        model = self._external_model(run, commit)
        self._client.create_model_version(
            self._model_name,
            source=f"models:/{model.model_id}",
            run_id=run.info.run_id,
            model_id=model.model_id,
            await_creation_for=0,
            tags=history.version_tags(commit, self._run_id, self._store_url, lineage_path),
            description=f"policy version {commit.version} of run {self._run_id}, digest {commit.weights.digest}",
        )
        self._versions = None

    def _registered(self) -> dict[int, ModelVersion]:
        """Return what MLflow has of this run, by policy version; of doubles the first, deleting the others."""
        if self._versions is not None:
            return self._versions
        wanted = f"name = '{self._model_name}' and tags.`rollflow.run_id` = '{self._run_id}'"
        found = self._client.search_model_versions(wanted, max_results=10_000)
        self._versions = {}
        # A version without its tags is being deleted by another exporter at this moment.
        whole = [version for version in found if "rollflow.version" in version.tags]
        for version in sorted(whole, key=lambda version: int(version.version)):
            kept = self._versions.setdefault(int(version.tags["rollflow.version"]), version)
            if kept is not version:
                self._client.delete_model_version(self._model_name, str(version.version))
        return self._versions

    def _ensure_registered_model(self) -> None:
        try:
            self._client.create_registered_model(self._model_name, tags={"rollflow.name": self._config.name})
        except MlflowException as cause:
            if cause.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _external_model(self, run: Run, commit: Commit) -> LoggedModel:
        """Return MLflow's entry for a model whose weights lie elsewhere; its server takes no other local source."""
        name = f"policy-v{commit.version}"
        model = self._only_model(run, name)
        if model is None:
            made = self._client.create_logged_model(
                run.info.experiment_id,
                name=name,
                source_run_id=run.info.run_id,
                tags={"mlflow.model.isExternal": "true", "rollflow.run_id": self._run_id},
                params={
                    "uri": f"{self._store_url}/{history.weights_folder(commit)}",
                    "version": str(commit.version),
                    "digest": commit.weights.digest,
                },
            )
            model = self._only_model(run, name) or made
        if model.status != LoggedModelStatus.READY:
            model = self._client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
        return model

    def _only_model(self, run: Run, name: str) -> LoggedModel | None:
        """Return the entry of that name; of several the one made first, deleting the others."""
        wanted = f"name = '{name}' AND source_run_id = '{run.info.run_id}'"
        found = self._client.search_logged_models([run.info.experiment_id], wanted)
        found = sorted(found, key=lambda model: (model.creation_timestamp, model.model_id))
        for double in found[1:]:
            self._client.delete_logged_model(double.model_id)
        return found[0] if found else None

    def crown(self, version: ModelVersion, key: str, value: float) -> None:
        """Make `version` the champion if it is strictly better than the one there is."""
        if not math.isfinite(value):
            return
        crowned = self._client.get_registered_model(self._model_name).aliases.get(CHAMPION)
        champion = self._client.get_model_version(self._model_name, str(crowned)) if crowned else None
        best = float(champion.tags.get(key, "-inf")) if champion else -math.inf
        if value > best:
            self._client.set_registered_model_alias(self._model_name, CHAMPION, str(version.version))

    def tag(self, version: ModelVersion, key: str, value: str) -> None:
        """Set a tag of a registered version."""
        self._client.set_model_version_tag(self._model_name, version.version, key, value)
