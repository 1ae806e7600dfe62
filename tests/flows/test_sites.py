"""Rollout sites that share a run's bucket and nothing else join it, leave it and die; every ticket counts once."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from data_contracts.records import Claim, Commit, Curated
from infra.heartbeats import read_heartbeats
from infra.log import Log
from infra.runs import Run, create_run, load_run
from tasks.ledger import Ledger
from tasks.supervise import Supervisor
from tests.harness import held, tiny_config
from tests.servers import walled
from tests.servers.s3 import S3Server

pytestmark = pytest.mark.slow

REST = ("start", "train", "reward", "curate")


@pytest.fixture
def run(s3_url: str) -> Run:
    """A run that starts no rollout process of its own."""
    config = tiny_config(
        s3_url,
        steps=100,
        rollout={"workers": 0, "claim_block": 2, "sampling": {"max_new_tokens": 11}},
        staleness={"max_staleness": 2, "lease_s": 6.0},
        train={"full_weights_every": 5},
        orchestration={"heartbeat_limit_s": 600.0},
    )
    return load_run(create_run(config, "sites").store.url)


@pytest.fixture
def join(run: Run, s3_server: S3Server, tmp_path: Path):
    """Return a function that has a site of its own join the run."""
    if not walled.is_possible():
        pytest.skip("this machine does not allow unprivileged namespaces")
    port = urlsplit(s3_server.endpoint).port or 0
    started = []

    def start(name: str):
        folder = tmp_path / name
        folder.mkdir()
        stack.enter_context(walled.door(folder, port))
        kept = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
        environment = {**kept, **s3_server.environment, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "flows.cli", "rollout", "--run", run.store.url]
        started.append(walled.start(folder, port, command, environment))
        return started[-1]

    with contextlib.ExitStack() as stack:
        yield start
        for process in started:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(what: Callable[[], bool], limit_s: float = 600.0) -> None:
    give_up = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < give_up
        time.sleep(0.1)


def claims_of(run: Run) -> list[Claim]:
    return Log(run.store, "log/claim", Claim).read_from(0)


def claimers(run: Run) -> set[str]:
    return {claim.writer for claim in claims_of(run)}


def test_two_join_one_dies_one_leaves_in_order_and_every_ticket_counts_once(
    run: Run, join, processes, s3_server: S3Server, tmp_path: Path
) -> None:
    started = processes.start_all(run, REST, **s3_server.environment)
    with held(started[REST.index("train")]):  # or the run might be over before all have joined it
        first, second = join("first"), join("second")
        wait_for(lambda: len(read_heartbeats(run.store, "rollout")) == 2)
    wait_for(lambda: len(claimers(run)) == 2)
    assert Supervisor(run.store).bury_the_dead() == [], "a site's process ids mean nothing here"
    os.kill(first.pid, signal.SIGKILL)  # with everything inside
    assert first.wait() == -signal.SIGKILL
    with held(started[REST.index("train")]):
        third = join("third")
        wait_for(lambda: len(read_heartbeats(run.store, "rollout")) == 3)
    wait_for(lambda: len(claimers(run)) == 3)
    walled.ask_to_leave(tmp_path / "second")
    assert second.wait(timeout=300) == 0
    assert "leaving: finishes the groups it holds" in second.communicate()[0]
    processes.join(started, limit_s=900.0)
    assert third.wait(timeout=300) == 0

    commits = Log(run.store, "log/commit", Commit).read_from(0)
    assert [commit.version for commit in commits] == list(range(run.config.steps + 1))
    trained = [group.ticket for commit in commits for group in commit.consumed]
    assert len(trained) == len(set(trained)) == run.config.steps * run.config.groups_per_step
    judged = [verdict.ticket for r in Log(run.store, "log/curated", Curated).read_from(0) for verdict in r.verdicts]
    assert len(judged) == len(set(judged)), "every ticket has one verdict"
    account = Ledger(run.store, run.config).state.account()
    assert account.issued == account.trained + account.refused

    fresh = [ticket for claim in claims_of(run) if claim.kind == "claim" for ticket in claim.tickets]
    assert fresh == list(range(len(fresh))), "every ticket was claimed once"
    left = [beat for beat in read_heartbeats(run.store, "rollout") if beat.done]
    assert len(left) == 2, "one that left, one that saw the end; the one that was killed says nothing"
