"""What `rollflow serve` does: offers the deployments of a prefect.yaml from this process, without a work pool.

The same file serves `prefect deploy`; here only what it says of each deployment counts, and runs are processes of this
machine.
"""

import importlib
from pathlib import Path
from typing import Any

import typer
import yaml
from prefect import Flow, serve
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.deployments.runner import RunnerDeployment
from prefect.schedules import Cron
from prefect.types.entrypoint import EntrypointType

from data_contracts.errors import ConfigError

SHIPPED = Path(__file__).parents[1] / "infra" / "deploy" / "prefect.yaml"


def serve_deployments(path: Path | None, limit: int | None, ui_url: str) -> None:
    """Register the deployments and run what is due, until this process is stopped.

    Args:
        path: a prefect.yaml; None takes the shipped one.
        limit: flow runs at once.
        ui_url: address of Prefect's user interface, to tell.

    Raises:
        ConfigError: the file cannot be read or names what does not exist.
    """
    deployments = load_deployments(path or SHIPPED)
    typer.echo(f"{', '.join(deployment.name for deployment in deployments)}: {ui_url}/deployments")
    serve(*deployments, limit=limit, print_starting_message=False)


def load_deployments(path: Path) -> list[RunnerDeployment]:
    """Return the deployments that a prefect.yaml declares.

    Raises:
        ConfigError: names the file and what is wrong with it.
    """
    try:
        declared = yaml.safe_load(path.read_text())["deployments"]
        return [_make_deployment(entry) for entry in declared]
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, ImportError, AttributeError) as cause:
        raise ConfigError(f"{path}: expected deployments with module-path entrypoints: {cause!r}") from cause


def _make_deployment(entry: dict[str, Any]) -> RunnerDeployment:
    module, _, name = entry["entrypoint"].rpartition(".")
    flow: Flow[..., Any] = getattr(importlib.import_module(module), name)
    limit = entry.get("concurrency_limit")
    return RunnerDeployment.from_flow(
        flow,
        name=entry["name"],
        description=entry.get("description"),
        tags=entry.get("tags"),
        parameters=entry.get("parameters"),
        schedules=[
            Cron(schedule["cron"], timezone=schedule.get("timezone"), active=schedule.get("active", True))
            for schedule in entry.get("schedules", [])
        ],
        concurrency_limit=ConcurrencyLimitConfig.model_validate(limit) if isinstance(limit, dict) else limit,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
