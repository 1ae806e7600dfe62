"""Where a person finds a run on the pages of Prefect and MLflow."""

from typing import Any

import httpx

from infra.services import Services

LIMIT_S = 10.0

AS_TRAINING = "?workflowType=machine_learning"
"""Behind an address in MLflow: without it, a browser that is new there shows traces of applications."""


def find_pages(services: Services, run_id: str, experiment: str) -> dict[str, str]:
    """Return the run's own page in Prefect and in MLflow, by server; a server that does not know it, its first page.

    Args:
        services: the two servers.
        run_id: the run's id, which names its flow run and its MLflow run.
        experiment: of MLflow.
    """
    return {"Prefect": _prefect(services, run_id), "MLflow": _mlflow(services.mlflow_url, run_id, experiment)}


def _prefect(services: Services, run_id: str) -> str:
    wanted = {"flow_runs": {"name": {"any_": [run_id]}}, "sort": "EXPECTED_START_TIME_DESC", "limit": 1}
    found = _ask("POST", f"{services.prefect_url}/flow_runs/filter", json=wanted)
    return f"{services.prefect_ui_url}/runs/flow-run/{found[0]['id']}" if found else services.prefect_ui_url


def _mlflow(url: str, run_id: str, experiment: str) -> str:
    api = f"{url}/api/2.0/mlflow"
    named = _ask("GET", f"{api}/experiments/get-by-name", params={"experiment_name": experiment})
    if not named:
        return url
    number = named["experiment"]["experiment_id"]
    wanted = {"experiment_ids": [number], "filter": f"tags.`rollflow.run_id` = '{run_id}'", "max_results": 1}
    found = _ask("POST", f"{api}/runs/search", json=wanted)
    if not found or not found.get("runs"):
        return f"{url}/#/experiments/{number}{AS_TRAINING}"
    return f"{url}/#/experiments/{number}/runs/{found['runs'][0]['info']['run_id']}{AS_TRAINING}"


def _ask(method: str, url: str, **arguments: Any) -> Any:
    """Return the answer; None from a server that is away or refuses."""
    try:
        return httpx.request(method, url, timeout=LIMIT_S, **arguments).raise_for_status().json()
    except (httpx.HTTPError, ValueError):
        return None
