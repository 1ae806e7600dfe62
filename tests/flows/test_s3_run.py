"""A run whose store is a real S3 server over HTTP: it trains, recovers, and leaves no secret anywhere."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from data_contracts.records import Commit, Raw
from infra.log import Log
from infra.probe import probe
from infra.runs import Run, create_run, load_run
from infra.store import open_store
from tasks.ledger import Ledger
from tests.harness import tiny_config
from tests.servers import faulty_proxy
from tests.servers.s3 import S3Server

ROLES = ("train", "rollout", "reward", "curate")
SECRETS = {
    "AWS_SESSION_TOKEN": "a-session-token-nobody-may-see",
    "MLFLOW_TRACKING_PASSWORD": "a-tracking-password-nobody-may-see",
    "ROLLFLOW_PREFECT_DATABASE": "postgresql://user:a-database-password-nobody-may-see@127.0.0.1:1/prefect",
}


@pytest.fixture
def begun_on_s3(_begun: Run, s3_url: str) -> Callable[..., Run]:
    """Return a function that makes a run on S3 which begins from the same version 0 as all others."""

    def make(**changes: object) -> Run:
        run = create_run(tiny_config(s3_url, **changes), "run")
        for folder in ("policy", "log/commit"):
            for key in _begun.store.list(folder):
                run.store.put_new(key, _begun.store.get(key))
        return load_run(run.store.url)

    return make


def assert_every_ticket_is_trained_once(run: Run) -> None:
    commits = Log(run.store, "log/commit", Commit).read_from(0)
    assert [commit.version for commit in commits] == list(range(run.config.steps + 1))
    tickets = [group.ticket for commit in commits for group in commit.consumed]
    assert len(tickets) == len(set(tickets)) == run.config.steps * run.config.groups_per_step
    account = Ledger(run.store, run.config).state.account()
    assert account.issued == account.trained + account.refused
    assert account.in_flight == 0


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_short_run_trains_and_no_secret_is_in_any_object_log_or_report(
    begun_on_s3: Callable[..., Run], s3_server: S3Server, processes, tmp_path: Path
) -> None:
    from dashboards.report import write_report

    run = begun_on_s3(steps=3, staleness={"max_staleness": 1}, train={"full_weights_every": 2})
    environment = {**s3_server.environment, **SECRETS}
    processes.join(processes.start_all(run, ROLES, outputs=str(tmp_path), **environment))
    assert {path.name for path in tmp_path.iterdir()} == {f"{role}.log" for role in ROLES}
    assert_every_ticket_is_trained_once(run)
    kinds = [commit.weights.kind for commit in Log(run.store, "log/commit", Commit).read_from(0)]
    assert kinds == ["full", "delta", "full", "delta"]
    write_report(run.store, tmp_path / "report.html", {})
    held = {key: run.store.get(key) for key in run.store.list()} | all_bytes(tmp_path)
    secrets = [s3_server.secret_key, s3_server.access_key, *SECRETS.values(), "nobody-may-see"]
    assert not [key for key, body in held.items() if any(secret.encode() in body for secret in secrets)]


def test_the_store_is_probed_from_two_processes(s3_url: str) -> None:
    probe(s3_url)
    assert open_store(s3_url).list() == []


@pytest.mark.slow
def test_a_run_killed_whole_on_s3_resumes_to_the_same_bits(
    begun_on_s3: Callable[..., Run], s3_server: S3Server, processes, begun: Callable[..., Run]
) -> None:
    undisturbed = begun("undisturbed")
    processes.join(processes.start_all(undisturbed, ROLES))
    run = begun_on_s3()
    crash = {"ROLLFLOW_CRASH_POINT": "train.before_commit:3"}
    started = processes.start_all(run, ROLES, **s3_server.environment, **crash)
    processes.join([process for process in started if process.name == "train"])
    processes.kill_all()
    processes.join(processes.start_all(run, ROLES, **s3_server.environment))
    assert_every_ticket_is_trained_once(run)
    digests = [
        [commit.weights.digest for commit in Log(r.store, "log/commit", Commit).read_from(0)]
        for r in (undisturbed, run)
    ]
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_a_run_goes_on_through_a_network_that_fails(
    begun_on_s3: Callable[..., Run], s3_server: S3Server, processes
) -> None:
    run = begun_on_s3(steps=4, staleness={"max_staleness": 1})
    with faulty_proxy.running(s3_server.endpoint) as proxy:
        proxy.set(seed=3, hang_s=1.5, slowdown=0.04, error=0.02, throttle=0.02, lost=0.04, reset=0.03, conflict=0.04)
        environment = s3_server.environment | {"AWS_ENDPOINT_URL": proxy.endpoint, "ROLLFLOW_STORE_TIMEOUT_S": "1"}
        started = processes.start_all(run, ROLES, **environment)
        processes.join(started, limit_s=600.0)
        assert sum(proxy.counts().values()) - proxy.counts()["none"] > 20
    assert [process.exitcode for process in started] == [0] * len(started)
    assert_every_ticket_is_trained_once(run)


@pytest.mark.slow
def test_a_store_that_stays_away_ends_a_role_with_one_sentence(
    begun_on_s3: Callable[..., Run], s3_server: S3Server, processes, tmp_path: Path
) -> None:
    run = begun_on_s3()
    with faulty_proxy.running(s3_server.endpoint) as proxy:
        environment = s3_server.environment | {"AWS_ENDPOINT_URL": proxy.endpoint, "ROLLFLOW_STORE_RETRY_S": "1"}
        process = processes.start(run, "rollout", output=str(tmp_path / "printed"), **environment)
        while not any(Log(run.store, f"log/raw/{w}", Raw).tail() for w in run.store.at("log/raw").list_folders()):
            assert process.is_alive()
        proxy.set(slowdown=1.0)
        processes.join([process])
    assert process.exitcode == 1
    last = (tmp_path / "printed").read_text().strip().splitlines()[-1]
    assert "could not be" in last
    assert "503 Service Unavailable (SlowDown), tried" in last
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in last
