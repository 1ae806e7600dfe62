"""A run on an existing Dask cluster: roles go where their resource is, whoever dies is replaced, others may join."""

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from data_contracts.records import Commit, Heartbeat, Raw
from infra.heartbeats import read_heartbeats
from infra.log import Log
from infra.processes import free_port
from infra.runs import Run, create_run, load_run
from tasks.ledger import Ledger
from tasks.supervise import Supervisor
from tests.flows.conftest import Deck, wait_until
from tests.harness import tiny_config

pytestmark = pytest.mark.slow


def alive(run: Run, role: str) -> list[Heartbeat]:
    return [beat for beat in read_heartbeats(run.store, role) if not beat.done and Path(f"/proc/{beat.pid}").exists()]


def version(run: Run) -> int:
    return Log(run.store, "log/commit", Commit).tail() - 1


def start_worker(deck: Deck, name: str, address: str, resource: str, num: int = 1) -> None:
    words = ("distributed.cli.dask_worker", address, "--host", "127.0.0.1", "--nthreads", "1", "--no-dashboard")
    deck.start(name, *words, "--nworkers", str(num), "--resources", f"{resource}=1", "--memory-limit", "0")


def test_workers_are_killed_join_and_leave_and_every_ticket_is_rolled_out_and_trained_once(
    deck: Deck, tmp_path: Path
) -> None:
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    deck.start("scheduler", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", str(port))
    for name, resource, num in (("train", "TRAIN", 1), ("first", "ROLLOUT", 1), ("roles", "ROLE", 4)):
        start_worker(deck, name, address, resource, num)
    config = tiny_config(
        str(tmp_path / "store"),
        steps=60,
        rollout={"max_workers": 3, "claim_block": 2},
        staleness={"max_staleness": 4, "lease_s": 600.0},
        orchestration={"scheduler": address, "heartbeat_limit_s": 600.0},
        audit={"enabled": False},
    )
    run = load_run(create_run(config, "run").store.url)
    Supervisor(run.store).open()
    flow = deck.start("flow", "flows.post_training", run.store.url)

    wait_until(lambda: version(run) >= 8, "version 8")
    os.kill(alive(run, "train")[0].pid, signal.SIGKILL)
    start_worker(deck, "second", address, "ROLLOUT")
    wait_until(lambda: len(alive(run, "rollout")) == 2, "a second rollout worker")
    wait_until(lambda: version(run) >= 20, "version 20")
    os.kill(alive(run, "reward")[0].pid, signal.SIGKILL)
    wait_until(lambda: version(run) >= 30, "version 30")
    deck.processes["first"].send_signal(signal.SIGTERM)
    start_worker(deck, "third", address, "ROLLOUT")
    flow.wait(600)

    assert flow.returncode == 0, deck.output("flow")
    commits = Log(run.store, "log/commit", Commit).read_from(0)
    assert [commit.version for commit in commits] == list(range(61))
    trained = [group.ticket for commit in commits for group in commit.consumed]
    assert len(trained) == len(set(trained)) == 60 * 4
    account = Ledger(run.store, run.config).state.account()
    assert account.issued == account.trained + account.refused + account.in_flight
    writers = [beat.writer for beat in read_heartbeats(run.store, "rollout")]
    assert len(writers) >= 2
    rolled_out = Counter(
        group.ticket
        for writer in writers
        for record in Log(run.store, f"log/raw/{writer}", Raw).read_from(0)
        for group in record.groups
    )
    assert set(rolled_out.values()) == {1}
