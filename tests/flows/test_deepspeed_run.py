"""A run whose weights live in two DeepSpeed ranks, one of which is killed in the middle."""

import os
import signal
import threading
import time

import psutil
import pytest

from data_contracts.errors import RankFailed
from data_contracts.records import Commit
from flows.play import play
from infra.log import Log
from tasks.supervise import Supervisor

BACKEND = {"type": "deepspeed", "zero_stage": 3}
OTHERS = ("rollout", "reward", "curate")


def commits_of(run):
    return Log(run.store, "log/commit", Commit).read_from(0)


def kill_a_rank(run, version, killed):
    """Wait for a version, and kill the second of this process's ranks."""
    log = Log(run.store, "log/commit", Commit)
    while log.tail() <= version:
        time.sleep(0.02)
    ranks = [p for p in psutil.Process().children() if "tasks.deepspeed_rank" in p.cmdline()]
    killed.append(sorted(ranks, key=lambda p: p.pid)[1].pid)
    os.kill(killed[0], signal.SIGKILL)


@pytest.mark.slow
def test_the_role_goes_on_from_the_last_commit_after_the_death_of_a_rank(begun, processes):
    run = begun("killed", train={"backend": BACKEND}, orchestration={"heartbeat_limit_s": 600.0})
    supervisor = Supervisor(run.store)
    supervisor.open()
    others = [processes.start(run, name) for name in OTHERS]
    killed: list[int] = []
    killer = threading.Thread(target=kill_a_rank, args=(run, 2, killed), daemon=True)
    killer.start()
    with pytest.raises(RankFailed, match=r"rank 1 .* was killed by SIGKILL"):
        play("train", run.store.url)
    killer.join()
    assert not [p for p in psutil.Process().children() if "tasks.deepspeed_rank" in p.cmdline()]
    before = commits_of(run)
    assert 3 <= len(before) < run.config.steps + 1

    assert play("train", run.store.url) == "done"
    processes.join(others, 600.0)
    commits = commits_of(run)
    assert commits[: len(before)] == before
    assert [commit.version for commit in commits] == list(range(run.config.steps + 1))
    tickets = [group.ticket for commit in commits for group in commit.consumed]
    assert len(tickets) == len(set(tickets)) == run.config.steps * run.config.groups_per_step
    assert commits[-1].weights.digest != commits[0].weights.digest
    assert not psutil.pid_exists(killed[0])


@pytest.mark.slow
def test_a_run_in_ranks_learns_what_a_run_in_one_process_learns(begun, processes):
    found = {}
    for name, backend in (("ranks", BACKEND), ("one", {"type": "torch"})):
        run = begun(name, train={"backend": backend}, orchestration={"heartbeat_limit_s": 600.0})
        processes.join(processes.start_all(run, ("train", *OTHERS)), 600.0)
        found[name] = commits_of(run)
    first = [commits[1].metrics for commits in (found["ranks"], found["one"])]
    for name in ("loss/total", "optimizer/grad_norm", "reward/mean", "policy/entropy", "policy/mismatch_k3"):
        assert first[0][name] == pytest.approx(first[1][name], rel=1e-3, abs=1e-6), name
