"""Training as deployments run it: a new run on a schedule or on demand, and one that goes on.

The run's id is made from the flow run's, so that a retry of the flow run in Prefect's user interface goes on with the
run that the first try has begun.
"""

import json
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_link_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run

from data_contracts.errors import StoreError
from flows import conduct
from flows.checks import check_before_resume, check_before_start
from flows.load import load_run_config
from flows.post_training import carry
from infra import settings
from infra.runs import Run, create_run, find_run, load_run
from infra.store import open_store
from tasks.supervise import Supervisor


@flow(name="post-training-new")
def train(
    config: str = "tiny",
    changes: dict[str, Any] = {},  # noqa: B006 only read; Prefect has no form for a union with None
) -> State:
    """Train a policy from its first step to its last; a retry goes on with the same run.

    Args:
        config: A TOML file on the machine that runs this, or the name of a shipped config.
        changes: Fields of the config to change, by their dotted names, for example {"steps": 50,
            "staleness.max_staleness": 4}.
    """
    resolved = load_run_config(config, as_words(changes))
    run_id = f"{resolved.name}-{str(flow_run.id)[:8]}"
    _rename_flow_run(run_id)
    begun = open_store(resolved.store).at(run_id)
    if begun.exists("run.json"):
        return _go_on(load_run(begun.url))
    check_before_start(resolved)
    return _carry(create_run(resolved, run_id))


@flow(name="post-training-resumed")
def resume(run: str, store: str = "") -> State:
    """Go on with a run that was stopped, has failed or has crashed: nothing is lost or trained twice.

    Args:
        run: The run's id, the beginning of one, or its URL.
        store: Folder or s3:// URL that holds the run; empty takes ROLLFLOW_STORE, or the usual one.
    """
    found = find_run(run, store or settings.default_store())
    _rename_flow_run(f"{found.id}-resumed")
    return _go_on(found)


def as_words(changes: dict[str, Any]) -> list[str]:
    """Return changes of fields as the words of a command line: {"steps": 50} as --steps 50."""
    words = []
    for name, value in changes.items():
        text = value if isinstance(value, str) else "none" if value is None else json.dumps(value)
        words += [f"--{name}", text]
    return words


def _go_on(run: Run) -> State:
    check_before_resume(run)
    get_run_logger().info("going on with run %s", run.id)
    return _carry(run)


def _carry(run: Run) -> State:
    supervisor = Supervisor(run.store)
    supervisor.bury_the_dead()
    supervisor.open()
    try:
        state = carry(run)
    except Exception:  # not a termination: Prefect does not wait long then
        _show_report(run)
        raise
    _show_report(run)
    return state


def _show_report(run: Run) -> None:
    """Write the run's report and show where it is."""
    try:
        path = conduct.make_report(run, None)
        create_link_artifact(path.as_uri(), link_text="report", key="report", description=f"records: {run.store.url}")
    except StoreError as error:
        get_run_logger().warning("no report: %s", error)
    except Exception as error:  # noqa: BLE001 a view of the run, not the run
        get_run_logger().warning("the report is not linked in Prefect: %s", error)


def _rename_flow_run(name: str) -> None:
    """Call this flow run as the run is called."""
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run(flow_run_id=flow_run.id, name=name)  # pyright: ignore[reportArgumentType]
    except Exception:  # noqa: BLE001 a view of the run, not the run
        return
