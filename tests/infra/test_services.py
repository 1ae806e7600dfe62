import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from data_contracts.errors import ServiceError
from infra import services, settings
from infra.locks import locked
from infra.processes import free_port
from infra.server_processes import TOKEN_VARIABLE, Server


def recorded(home: Path) -> dict[str, Server]:
    return {entry["name"]: Server(**entry) for entry in json.loads((home / "services.json").read_text())}


def record(home: Path, *servers: Server) -> None:
    settings.make_home(home)
    (home / "services.json").write_text(json.dumps([asdict(server) for server in servers]))


def carriers_of(token: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(TOKEN_VARIABLE) == token:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.fixture
def stranger():
    """A process that is none of ours."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def test_up_starts_both_and_a_second_up_finds_them(servers):
    before = recorded(servers.home)
    assert servers.up() == servers.services == services.find(servers.home)
    assert recorded(servers.home) == before, "the same processes"
    assert [(status.name, status.state) for status in services.status(servers.home)] == [
        ("prefect", "healthy"),
        ("mlflow", "healthy"),
    ]
    assert servers.services.prefect_url == servers.services.prefect_ui_url + "/api"
    assert services.connect_environment(servers.services) == {
        "PREFECT_API_URL": servers.services.prefect_url,
        "MLFLOW_TRACKING_URI": servers.services.mlflow_url,
        "MLFLOW_REGISTRY_URI": servers.services.mlflow_url,
    }


def test_servers_keep_everything_below_home_and_listen_on_loopback_only(servers):
    assert (servers.home / "prefect" / "prefect.db").exists()
    assert (servers.home / "mlflow" / "mlflow.db").exists()
    assert (servers.home / "logs" / "prefect.log").stat().st_size > 0
    for server in recorded(servers.home).values():
        family = [psutil.Process(pid) for pid in carriers_of(server.token)]
        listening = {c.laddr.ip for process in family for c in process.net_connections("tcp") if c.status == "LISTEN"}
        assert listening == {"127.0.0.1"}
        assert {os.getsid(process.pid) for process in family} == {server.pid}, "detached from this session"


def test_up_starts_a_killed_server_again_and_clears_what_outlived_it(servers):
    before = recorded(servers.home)
    old = before["mlflow"]
    family = [psutil.Process(pid) for pid in carriers_of(old.token)]
    assert len(family) > 1, "MLflow's server has a worker, which holds the port when its parent is killed"
    os.kill(old.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(old.pid)], timeout=10)
    assert [status.state for status in services.status(servers.home)] == ["healthy", "stopped"]

    assert servers.up() == servers.services, "at the same address"

    after = recorded(servers.home)
    assert after["prefect"] == before["prefect"]
    assert after["mlflow"].pid != old.pid
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)


def test_a_server_that_is_slow_to_answer_is_waited_for_and_not_started_again(servers):
    before = recorded(servers.home)
    family = [psutil.Process(pid) for pid in carriers_of(before["mlflow"].token)]
    for process in family:
        process.suspend()
    assert [status.state for status in services.status(servers.home)] == ["healthy", "not answering"]
    awake = threading.Timer(3.0, lambda: [process.resume() for process in family])
    awake.start()
    assert servers.up() == servers.services
    awake.join()
    assert recorded(servers.home) == before


def test_another_port_than_the_one_it_runs_on_is_refused(servers):
    port = recorded(servers.home)["prefect"].port
    with pytest.raises(ServiceError, match=f"prefect already runs on port {port}, port 1 was asked for"):
        services.up(servers.home, prefect_port=1)


def test_a_busy_port_names_the_port_and_the_option(tmp_path: Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServiceError, match=f"mlflow cannot have port {port}.*--mlflow-port"):
            services.up(tmp_path, prefect_port=free_port(), mlflow_port=port)
    assert not (tmp_path / "services.json").exists(), "nothing was started"


def test_a_reused_pid_is_neither_taken_for_ours_nor_stopped(tmp_path: Path, stranger: psutil.Process):
    ours = Server("mlflow", stranger.pid, stranger.create_time() - 5.0, 1, "a token nobody has", "log")
    record(tmp_path, ours)
    assert [status.state for status in services.status(tmp_path)] == ["stopped", "stopped"]
    assert services.find(tmp_path) is None
    assert services.down(tmp_path) == []
    assert stranger.is_running()
    assert recorded(tmp_path) == {}


def test_down_stops_what_is_ours_with_its_descendants_even_if_it_ignores_the_request(tmp_path: Path, stranger):
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print('ready', flush=True);"
        "time.sleep(600)"
    )
    token = "token-of-this-test"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, TOKEN_VARIABLE: token},
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    started = psutil.Process(process.pid).create_time()
    record(tmp_path, Server("prefect", process.pid, started, 1, token, "log"))
    assert len(carriers_of(token)) == 2

    assert services.down(tmp_path, patience_s=0.5) == ["prefect"]

    assert carriers_of(token) == []
    assert stranger.is_running()
    process.wait()
    process.stdout.close()


def test_what_a_killed_up_had_started_is_found_by_its_token(tmp_path: Path):
    token = "token-of-a-killed-up"
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, TOKEN_VARIABLE: token}
    )
    record(tmp_path, Server("mlflow", 0, 0.0, 1, token, "log"))
    assert carriers_of(token) == [process.pid]
    services.down(tmp_path)
    assert carriers_of(token) == []
    process.wait()


def test_up_and_down_of_one_home_exclude_each_other(tmp_path: Path):
    settings.make_home(tmp_path)
    done = threading.Event()
    with locked(tmp_path / "services.lock"):
        other = threading.Thread(target=lambda: (services.down(tmp_path), done.set()))
        other.start()
        assert not done.wait(0.3)
    assert done.wait(10)
    other.join()


def test_an_unreadable_state_file_says_what_to_do(tmp_path: Path):
    settings.make_home(tmp_path)
    (tmp_path / "services.json").write_text('[{"name": "prefect"}]')
    with pytest.raises(ServiceError, match="services.json: expected a list of servers.*delete the file"):
        services.status(tmp_path)


@pytest.mark.slow
def test_a_server_that_dies_at_its_start_shows_the_end_of_its_log(tmp_path: Path):
    settings.make_home(tmp_path)
    (tmp_path / "prefect" / "prefect.db").write_text("this is no database")
    try:
        with pytest.raises(ServiceError, match="(?s)prefect died at its start.*file is not a database"):
            services.up(tmp_path, prefect_port=free_port(), mlflow_port=free_port())
        assert services.status(tmp_path)[0].state == "stopped"
    finally:
        services.down(tmp_path)


@pytest.mark.slow
def test_a_database_of_another_mlflow_is_copied_and_upgraded(tmp_path: Path, servers):
    settings.make_home(tmp_path)
    with (servers.home / "mlflow" / "mlflow.db").open("rb") as database:
        (tmp_path / "mlflow" / "mlflow.db").write_bytes(database.read())
    (tmp_path / "mlflow" / "schema_version").write_text("3.0.0")
    try:
        services.up(tmp_path, prefect_port=free_port(), mlflow_port=free_port())
        assert len(list((tmp_path / "mlflow").glob("mlflow-before-*.db"))) == 1
        assert (tmp_path / "mlflow" / "schema_version").read_text() != "3.0.0"
    finally:
        services.down(tmp_path)


def test_a_planned_server_is_not_alive():
    plan = Server("mlflow", 0, 0.0, 1, "token", "log")
    assert not services.is_healthy(plan)
    assert not services.is_healthy(replace(plan, pid=os.getpid()))
