import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from data_contracts.errors import ServiceError
from infra import automation, services

FLOW = """
import sys, time
from prefect import flow

@flow(name="{name}")
def wait():
    print("running", flush=True)
    time.sleep({seconds})

wait()
"""


def stored(api: str) -> list[dict]:
    reply = httpx.post(f"{api}/automations/filter", json={"limit": 200})
    return [found for found in reply.raise_for_status().json() if found["name"] == automation.NAME]


def test_the_automation_is_made_once_and_brought_up_to_date(servers):
    api = servers.services.prefect_url
    first = automation.ensure_automation(api)
    (made,) = stored(api)
    assert made["id"] == str(first)
    assert made["enabled"]
    assert made["trigger"]["within"] == 150.0
    assert made["trigger"]["posture"] == "Proactive"
    assert made["trigger"]["for_each"] == ["prefect.resource.id"]
    assert set(made["trigger"]["expect"]) > {"prefect.flow-run.heartbeat", "prefect.flow-run.Completed"}
    assert [(action["type"], action["state"]) for action in made["actions"]] == [("change-flow-run-state", "CRASHED")]

    assert automation.ensure_automation(api) == first
    assert stored(api) == [made], "one that is right is not written again"

    assert automation.ensure_automation(api, within_s=120.0) == first
    (changed,) = stored(api)
    assert changed["trigger"]["within"] == 120.0
    automation.ensure_automation(api)


def test_what_a_person_switched_off_stays_off(servers):
    api = servers.services.prefect_url
    made = automation.ensure_automation(api)
    httpx.patch(f"{api}/automations/{made}", json={"enabled": False}).raise_for_status()
    automation.ensure_automation(api)
    assert [found["enabled"] for found in stored(api)] == [False]
    httpx.patch(f"{api}/automations/{made}", json={"enabled": True}).raise_for_status()


def test_doubles_are_removed(servers):
    api = servers.services.prefect_url
    automation.ensure_automation(api)
    body = automation.crash_automation().model_dump(mode="json")
    httpx.post(f"{api}/automations/", json=body).raise_for_status()
    assert len(stored(api)) == 2
    kept = automation.ensure_automation(api)
    assert [found["id"] for found in stored(api)] == [str(kept)]


def test_the_address_comes_from_the_environment(servers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_API_URL", servers.services.prefect_url)
    assert automation.ensure_automation() == automation.ensure_automation(servers.services.prefect_url)
    monkeypatch.delenv("PREFECT_API_URL")
    with pytest.raises(ServiceError, match="expected PREFECT_API_URL.*rollflow up"):
        automation.ensure_automation()


def test_a_server_that_is_away_is_named():
    with pytest.raises(ServiceError, match="Prefect at http://127.0.0.1:9/api did not take the automation"):
        automation.ensure_automation("http://127.0.0.1:9/api")


def state_of_flow(api: str, name: str) -> str:
    reply = httpx.post(f"{api}/flow_runs/filter", json={"flows": {"name": {"any_": [name]}}})
    (run,) = reply.raise_for_status().json()
    return run["state"]["name"]


@pytest.mark.slow
def test_a_killed_flow_becomes_crashed_and_living_finished_and_strange_ones_do_not(servers):
    api = servers.services.prefect_url
    automation.ensure_automation(api, within_s=65.0)
    environment = {**os.environ, **services.connect_environment(servers.services)}
    lives = {"post-training-killed": 600, "post-training-living": 600, "post-training-finished": 32, "stranger": 600}
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-c", FLOW.format(name=name, seconds=seconds)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, seconds in lives.items()
    }
    try:
        for process in processes.values():
            assert process.stdout is not None
            while process.stdout.readline() != "running\n":
                assert process.poll() is None
        for name in ("post-training-killed", "stranger"):
            processes[name].send_signal(signal.SIGKILL)
            processes[name].wait()
        assert state_of_flow(api, "post-training-killed") == "Running"
        patience = time.monotonic() + 180
        while state_of_flow(api, "post-training-killed") == "Running" and time.monotonic() < patience:
            time.sleep(1)
        assert state_of_flow(api, "post-training-killed") == "Crashed"
        assert state_of_flow(api, "post-training-living") == "Running"
        assert state_of_flow(api, "post-training-finished") == "Completed"
        assert state_of_flow(api, "stranger") == "Running", "a flow that is none of ours is left alone"
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
        automation.ensure_automation(api)
