"""The command line as a person uses it: real servers, real processes, a kill of everything, and resume."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from data_contracts.records import Commit
from infra.log import Log
from infra.runs import load_run
from tasks.ledger import Ledger

pytestmark = pytest.mark.slow

CONFIG = """
name = "cli"
steps = 30
groups_per_step = 4
samples_per_group = 4
[model]
type = "tiny"
hidden_size = 32
intermediate_size = 64
num_layers = 2
num_heads = 2
warm_start_max_steps = 20
[staleness]
max_staleness = 0
[train]
checkpoint_every = 5
[evaluate]
every = 10
num_prompts = 16
[orchestration]
heartbeat_s = 0.5
"""

PORTS = ("--prefect-port", "14811", "--mlflow-port", "15811")


def rollflow(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the command in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *arguments],
        env=os.environ | {"ROLLFLOW_HOME": str(folder / "home")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def output_of(process: subprocess.Popen[str]) -> str:
    printed, _ = process.communicate(timeout=400)
    assert process.returncode == 0, printed
    return printed


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "cli.toml").write_text(CONFIG + f'\n[tracking]\nexperiment = "cli"\n# {tmp_path}\n')
    output_of(rollflow(tmp_path, "up", *PORTS))
    yield tmp_path
    output_of(rollflow(tmp_path, "down"))


def test_a_run_whose_whole_process_group_is_killed_resumes_and_loses_nothing(folder: Path) -> None:
    store = folder / "store"
    run = rollflow(folder, "run", str(folder / "cli.toml"), "--id", "victim", "--store", str(store))
    commits = store / "victim" / "log" / "commit"
    give_up = time.monotonic() + 300
    while not (commits / "0000000007.json").exists():
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < give_up
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    printed = output_of(rollflow(folder, "resume", str(store / "victim")))
    assert "30 of 30" in printed
    found = load_run(str(store / "victim"))
    records = Log(found.store, "log/commit", Commit).read_from(0)
    tickets = [group.ticket for commit in records for group in commit.consumed]
    assert tickets == list(range(30 * 4))
    assert Ledger(found.store, found.config).state.account().in_flight == 0
    assert "120 tickets in 30 commits" in output_of(rollflow(folder, "show", str(store / "victim")))
    assert (folder / "home" / "reports" / "victim.html").read_text().startswith("<!")


def state_in_prefect(run_id: str) -> str:
    body = {"flow_runs": {"name": {"any_": [run_id]}}}
    (found,) = httpx.post(f"http://127.0.0.1:{PORTS[1]}/api/flow_runs/filter", json=body).raise_for_status().json()
    return found["state"]["name"]


@pytest.mark.parametrize("how", ["command", "signal"])
def test_a_stopped_run_says_so_and_resumes(folder: Path, how: str) -> None:
    store = folder / "store"
    run = rollflow(folder, "run", str(folder / "cli.toml"), "--id", "paused", "--store", str(store))
    commits = store / "paused" / "log" / "commit"
    give_up = time.monotonic() + 300
    while not (commits / "0000000003.json").exists():
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < give_up
        time.sleep(0.05)
    if how == "command":
        output_of(rollflow(folder, "stop", str(store / "paused")))
    else:
        os.killpg(run.pid, signal.SIGTERM)
    assert "rollflow resume paused" in output_of(run)
    assert state_in_prefect("paused") == "Cancelled"
    assert "30 of 30" in output_of(rollflow(folder, "resume", str(store / "paused")))


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("run", "tiny", "--steps", "none"), 2, "steps"),
        (("run", "no-such-config"), 2, "no such file"),
        (("run", "tiny", "--model.type", "local", "--model.path", "/no/such/model"), 2, "fetch-model"),
        (("show", "no-such-run"), 2, "no such run"),
        (("role", "nobody", "--run", "x"), 2, "expected one of"),
    ],
)
def test_a_mistake_is_one_sentence_and_an_exit_code(
    arguments: tuple[str, ...], code: int, sentence: str, tmp_path: Path
) -> None:
    process = rollflow(tmp_path, *arguments)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == code
    assert sentence in printed
    assert "Traceback" not in printed
    assert len(printed.strip().splitlines()) == 1
