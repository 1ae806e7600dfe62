"""PostgreSQL under Prefect and MLflow: a run through both, read back, and its password nowhere on the disk."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.processes import free_port
from tests.servers import postgres
from tests.servers.postgres import PASSWORD, Postgres

pytestmark = pytest.mark.slow

CONFIG = """
name = "pg"
steps = 4
groups_per_step = 2
samples_per_group = 4
[model]
type = "tiny"
hidden_size = 32
intermediate_size = 64
num_layers = 2
num_heads = 2
warm_start_max_steps = 5
[evaluate]
every = 2
num_prompts = 8
[tracking]
experiment = "postgres"
register_every = 2
poll_s = 0.5
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres.running() as server:
        for name in ("prefect", "mlflow"):
            server.ask("postgres", f"CREATE DATABASE {name}")
        yield server


def rollflow(home: Path, server: Postgres, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "ROLLFLOW_HOME": str(home),
        "ROLLFLOW_PREFECT_DATABASE": server.url("prefect"),
        "ROLLFLOW_MLFLOW_DATABASE": server.url("mlflow"),
    }
    command = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


@pytest.fixture
def home(tmp_path: Path, server: Postgres) -> Iterator[Path]:
    home = tmp_path / "home"
    ports = ("--prefect-port", str(free_port()), "--mlflow-port", str(free_port()))
    done = rollflow(home, server, "up", *ports)
    assert done.returncode == 0, done.stdout + done.stderr
    yield home
    rollflow(home, server, "down")


def test_a_run_is_in_both_databases_and_the_password_is_nowhere_else(home: Path, server: Postgres) -> None:
    config = home / "pg.toml"
    config.write_text(CONFIG)
    done = rollflow(home, server, "run", str(config), "--id", "first", "--store", str(home / "store"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert server.ask("prefect", "SELECT state_type FROM flow_run WHERE name LIKE '%first'") == "COMPLETED"
    assert server.ask("mlflow", "SELECT status FROM runs WHERE name = 'first'") == "FINISHED"
    points = "FROM metrics m JOIN runs r USING (run_uuid) WHERE r.name = 'first' AND m.key = 'reward/mean'"
    assert server.ask("mlflow", f"SELECT count(*), min(step), max(step) {points}") == "4|1|4"
    versions = "SELECT count(*) FROM model_versions v JOIN model_version_tags t USING (name, version)"
    assert server.ask("mlflow", f"{versions} WHERE t.key = 'rollflow.run_id' AND t.value = 'first'") == "3"
    assert not (home / "prefect" / "prefect.db").exists()
    assert not (home / "mlflow" / "mlflow.db").exists()
    for path in home.rglob("*"):
        if path.is_file():
            assert PASSWORD.encode() not in path.read_bytes(), path
    for database in ("prefect", "mlflow"):
        dump = [str(server.programs / "pg_dump"), server.url(database)]
        done = subprocess.run(dump, env=server.environment, capture_output=True, text=True, check=True)
        assert PASSWORD not in done.stdout


def test_an_exporter_that_begins_again_changes_nothing(home: Path, server: Postgres) -> None:
    config = home / "pg.toml"
    config.write_text(CONFIG)
    done = rollflow(home, server, "run", str(config), "--id", "second", "--store", str(home / "store"))
    assert done.returncode == 0, done.stdout + done.stderr
    count = "SELECT count(*) FROM metrics JOIN runs USING (run_uuid) WHERE name = 'second'"
    before = server.ask("mlflow", count)
    server.ask("mlflow", "DELETE FROM metrics WHERE key = 'export/commit' AND step > 1")
    server.ask("mlflow", "UPDATE latest_metrics SET value = 1, step = 1 WHERE key = 'export/commit'")
    mlflow = next(line.split()[-1] for line in done.stdout.splitlines() if line.startswith("MLflow"))
    exporter = (
        "import sys; from infra.runs import load_run; from infra.tracking import Exporter;"
        "run = load_run(sys.argv[1]); Exporter(run.store, sys.argv[2], run.config, run.id).export_available()"
    )
    command = [sys.executable, "-c", exporter, str(home / "store" / "second"), mlflow]
    subprocess.run(command, check=True, timeout=600)
    assert server.ask("mlflow", count) == before


def test_another_database_than_the_one_it_runs_on_is_refused(home: Path, server: Postgres) -> None:
    environment = os.environ | {"ROLLFLOW_HOME": str(home)}
    command = [sys.executable, "-m", "flows.cli", "up"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "prefect already runs on postgresql://127.0.0.1" in done.stderr
    assert PASSWORD not in done.stderr
