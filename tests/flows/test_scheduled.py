"""Deployments on a real Prefect server: what a person does in its user interface, done through its API."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from data_contracts.records import Commit
from flows.scheduled import as_words
from flows.serve import SHIPPED, load_deployments
from infra.heartbeats import read_heartbeats
from infra.log import Log
from infra.store import Store, open_store
from tests.flows.conftest import Deck, wait_until

CONFIG = """
name = "night"
steps = 100000
groups_per_step = 4
samples_per_group = 4
store = "{store}"
[model]
type = "tiny"
hidden_size = 32
intermediate_size = 64
num_layers = 2
num_heads = 2
warm_start_max_steps = 20
[train]
checkpoint_every = 10
[evaluate]
every = 50000
num_prompts = 16
[audit]
enabled = false
[tracking]
enabled = false
[orchestration]
heartbeat_s = 0.5
heartbeat_limit_s = 600
"""


def test_changes_are_words_of_the_command_line() -> None:
    changes = {
        "steps": 50,
        "staleness.max_staleness": "unbounded",
        "deterministic": None,
        "rollout.swap_in_flight": False,
    }
    assert as_words(changes) == [
        *("--steps", "50", "--staleness.max_staleness", "unbounded"),
        *("--deterministic", "none", "--rollout.swap_in_flight", "false"),
    ]


def test_the_shipped_deployments_name_flows_by_module_and_keep_nights_from_overlapping() -> None:
    nightly, resume = load_deployments(SHIPPED)
    assert (nightly.entrypoint, resume.entrypoint) == ("flows.scheduled.train", "flows.scheduled.resume")
    assert nightly.concurrency_limit == 1
    assert nightly.concurrency_options is not None
    assert nightly.concurrency_options.collision_strategy == "CANCEL_NEW"
    assert [str(found.schedule.cron) for found in nightly.schedules or []] == ["0 2 * * *"]  # pyright: ignore
    assert set(nightly._parameter_openapi_schema.properties) == {"config", "changes"}


class Api:
    """Prefect's API, as its user interface uses it."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=60)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._send(method, path, body).raise_for_status().json()

    def deployment(self, name: str) -> str | None:
        reply = self._send("GET", f"/deployments/name/{name}")
        return None if reply.status_code == 404 else reply.raise_for_status().json()["id"]

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        for _ in range(20):
            reply = self._client.request(method, path, json=body)
            if reply.status_code != 503:
                return reply
            time.sleep(1)  # with SQLite the server says so while another request writes; Prefect's clients ask again
        return reply

    def trigger(self, name: str, **parameters: object) -> str:
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        return self.call("POST", f"/deployments/{self.deployment(name)}/create_flow_run", body)["id"]

    def state(self, flow_run: str) -> str:
        return self.call("GET", f"/flow_runs/{flow_run}")["state"]["name"]

    def set_state(self, flow_run: str, kind: str) -> None:
        self.call("POST", f"/flow_runs/{flow_run}/set_state", {"state": {"type": kind}})


@dataclass
class Night:
    """A served nightly deployment, and the first run of it."""

    deck: Deck
    api: Api
    config: str
    flow_run: str
    store: Store

    @property
    def run_id(self) -> str:
        return f"night-{self.flow_run[:8]}"

    @property
    def version(self) -> int:
        return Log(self.store, "log/commit", Commit).tail() - 1

    def living(self) -> list[int]:
        """Processes that play a role."""
        return [beat.pid for beat in read_heartbeats(self.store) if not beat.done and psutil.pid_exists(beat.pid)]

    def wait_for_steps(self, num: int) -> None:
        goal = self.version + num
        wait_until(lambda: self.version >= goal, f"version {goal}")

    def cancel(self, flow_run: str) -> None:
        """Cancel as a person does, and wait until no role is played any more."""
        self.api.set_state(flow_run, "CANCELLING")
        wait_until(lambda: self.api.state(flow_run) == "Cancelled" and not self.living(), "the end of a cancelled run")


NIGHTLY, RESUME = "post-training-new/nightly", "post-training-resumed/resume"


@pytest.fixture
def night(deck: Deck, tmp_path: Path) -> Night:
    config = tmp_path / "night.toml"
    config.write_text(CONFIG.format(store=tmp_path / "store"))
    deck.start("serve", "flows.cli", "serve")
    api = Api(deck.services.prefect_url)
    wait_until(lambda: api.deployment(NIGHTLY) and api.deployment(RESUME), "the deployments")
    flow_run = api.trigger(NIGHTLY, config=str(config), changes={"seed": 7})
    found = Night(deck, api, str(config), flow_run, open_store(str(tmp_path / "store")).at(f"night-{flow_run[:8]}"))
    found.wait_for_steps(4)
    return found


@pytest.mark.slow
def test_a_night_takes_changed_fields_does_not_overlap_is_cancelled_and_resumed(night: Night, tmp_path: Path) -> None:
    assert b'"seed": 7' in night.store.get("run.json")
    second = night.api.trigger(NIGHTLY, config=night.config, changes={})
    wait_until(lambda: night.api.state(second) == "Cancelled", "the end of the second night")
    assert night.api.state(night.flow_run) == "Running"

    night.cancel(night.flow_run)

    resumed = night.api.trigger(RESUME, run=night.run_id, store=str(tmp_path / "store"))
    night.wait_for_steps(3)
    night.cancel(resumed)


@pytest.mark.slow
def test_a_night_whose_processes_are_killed_becomes_crashed_and_a_retry_goes_on_with_its_run(night: Night) -> None:
    serve = psutil.Process(night.deck.processes["serve"].pid)
    (flow,) = [child for child in serve.children() if "prefect.engine" in child.cmdline()]
    for process in (serve, flow):  # the runner would report the death of the flow at once
        process.kill()
    night.deck.processes["serve"].wait()
    wait_until(lambda: not night.living(), "the end of the roles")
    wait_until(lambda: night.api.state(night.flow_run) == "Crashed", "the automation")

    night.deck.start("serve", "flows.cli", "serve")
    night.api.set_state(night.flow_run, "SCHEDULED")
    night.wait_for_steps(3)
    assert night.api.state(night.flow_run) == "Running"
    night.cancel(night.flow_run)
