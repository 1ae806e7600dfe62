import httpx

from infra.pages import AS_TRAINING, find_pages
from infra.services import Services


def test_a_run_is_found_on_the_pages_of_both_servers(servers):
    services = servers.services
    mlflow, prefect = f"{services.mlflow_url}/api/2.0/mlflow", services.prefect_url
    assert find_pages(services, "paged", "pages") == {
        "Prefect": services.prefect_ui_url,
        "MLflow": services.mlflow_url,
    }

    number = httpx.post(f"{mlflow}/experiments/create", json={"name": "pages"}).json()["experiment_id"]
    assert (
        find_pages(services, "paged", "pages")["MLflow"] == f"{services.mlflow_url}/#/experiments/{number}{AS_TRAINING}"
    )

    tags = [{"key": "rollflow.run_id", "value": "paged"}]
    made = httpx.post(f"{mlflow}/runs/create", json={"experiment_id": number, "tags": tags}).json()
    run = made["run"]["info"]["run_id"]
    flow = httpx.post(f"{prefect}/flows/", json={"name": "some-flow"}).json()["id"]
    flow_run = httpx.post(f"{prefect}/flow_runs/", json={"flow_id": flow, "name": "paged"}).json()["id"]
    assert find_pages(services, "paged", "pages") == {
        "Prefect": f"{services.prefect_ui_url}/runs/flow-run/{flow_run}",
        "MLflow": f"{services.mlflow_url}/#/experiments/{number}/runs/{run}{AS_TRAINING}",
    }


def test_servers_that_are_away_are_named_by_their_first_pages():
    away = Services("http://127.0.0.1:9/api", "http://127.0.0.1:9")
    assert find_pages(away, "run", "rollflow") == {"Prefect": "http://127.0.0.1:9", "MLflow": "http://127.0.0.1:9"}
