"""Experiments of MLflow, and the runs in them that stand for a group of others.

Neither has a key that MLflow would keep unique for us: what two processes make at the same moment is found by both, and
one of it stays. Import infra/tracking.py first: it sets the environment that MLflow reads once.
"""

import contextlib
from collections.abc import Iterator, Mapping

from mlflow import MlflowClient  # noqa: TID251
from mlflow.entities import Run  # noqa: TID251
from mlflow.exceptions import MlflowException  # noqa: TID251
from requests.exceptions import RequestException

from data_contracts.errors import ServiceError
from infra import history

TRAINING = {"mlflow.experimentKind": "custom_model_development"}
"""Has MLflow's pages show runs and metrics first; by default they show traces of applications."""


@contextlib.contextmanager
def as_service_error(uri: str) -> Iterator[None]:
    """Raise ServiceError for whatever a server that does not answer or refuses makes MLflow's client raise."""
    try:
        yield
    except (MlflowException, RequestException) as cause:
        first_line = (str(cause).splitlines() or [""])[0]
        raise ServiceError(f"MLflow at {uri} does not answer or refuses: {history.shorten(first_line, 300)}") from cause


def ensure_experiment(client: MlflowClient, name: str) -> str:
    """Return the id of an experiment; it is made when there is none, also by somebody else at the same moment.

    Raises:
        ServiceError: it is deleted there.
    """
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name, tags=TRAINING)
        except MlflowException as cause:
            if cause.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(name)
    if experiment is None or experiment.lifecycle_stage != "active":
        raise ServiceError(
            f"MLflow at {client.tracking_uri}: experiment {name} is deleted there: restore it, or choose another "
            "tracking.experiment"
        )
    return experiment.experiment_id


def ensure_group_run(uri: str, experiment: str, name: str, tags: Mapping[str, str]) -> str:
    """Return the id of the MLflow run that other runs name as their parent; it is made when there is none.

    Raises:
        ServiceError: the server does not answer or refuses.
    """
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    with as_service_error(uri):
        experiment_id = ensure_experiment(client, experiment)
        if not _group_runs(client, experiment_id, name):
            made = client.create_run(experiment_id, tags={**tags, "rollflow.group": name}, run_name=name)
            client.set_terminated(made.info.run_id)
        first, *doubles = _group_runs(client, experiment_id, name)
        for double in doubles:  # made by somebody else at the same moment
            client.delete_run(double.info.run_id)
        return first.info.run_id


def _group_runs(client: MlflowClient, experiment_id: str, name: str) -> list[Run]:
    """Return the runs that stand for a group, the first one first."""
    found = client.search_runs([experiment_id], f"tags.`rollflow.group` = '{name}'")
    return sorted(found, key=lambda run: (run.info.start_time, run.info.run_id))
