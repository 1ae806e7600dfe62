"""Whatever dies, whenever: no ticket is lost, trained twice or skipped, and the weights are the same bits."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from data_contracts.records import Claim, Commit
from infra.log import Log
from infra.objects import get_batch
from infra.runs import Run, create_run, load_run
from tasks.ledger import Ledger
from tasks.supervise import Supervisor
from tests.harness import tiny_config

ROLES = ("train", "rollout", "reward", "curate")


def commits_of(run: Run) -> list[Commit]:
    return Log(run.store, "log/commit", Commit).read_from(0)


def assert_every_ticket_is_accounted_for(run: Run) -> None:
    commits = commits_of(run)
    assert [commit.version for commit in commits] == list(range(run.config.steps + 1))
    tickets = [group.ticket for commit in commits for group in commit.consumed]
    assert len(tickets) == len(set(tickets)) == run.config.steps * run.config.groups_per_step
    account = Ledger(run.store, run.config).state.account()
    assert account.issued == account.trained + account.refused
    assert account.in_flight == 0


def assert_no_token_is_too_old(run: Run) -> None:
    bound = run.config.staleness.bound
    assert bound is not None
    for commit in commits_of(run)[1:]:
        for group in commit.consumed:
            rows = get_batch(run.store, group.batch, "scored").slice(group.group.first_row, group.group.num_rows)
            oldest = min(min(versions) for versions in rows.column("policy_versions").to_pylist())
            assert commit.version - 1 - oldest <= bound


@pytest.fixture(scope="session")
def undisturbed(_begun: Run, _forkserver, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of all versions of a run in which nothing went wrong."""
    run = create_run(tiny_config(str(tmp_path_factory.mktemp("undisturbed"))), "run")
    for folder in ("policy", "log/commit"):
        shutil.copytree(Path(_begun.store.url) / folder, Path(run.store.url) / folder)
    _forkserver.join(_forkserver.start_all(run, ROLES))
    return [commit.weights.digest for commit in commits_of(run)]


POINTS = [
    "rollout.before_claim:2",
    "rollout.claimed:3",
    "rollout.before_raw:2",
    "rollout.raw:4",
    "reward.before_batch:2",
    "reward.before_scored:3",
    "reward.scored:2",
    "curate.before_verdicts:2",
    "curate.verdicts:3",
    "train.before_start",
    "train.published:2",
    "train.checkpointed:1",
    "train.before_commit:4",
    "train.committed:5",
    "train.committed:6",
]


@pytest.mark.parametrize("point", POINTS)
def test_a_run_killed_whole_at_any_point_resumes_to_the_same_bits(
    point: str, begun: Callable[..., Run], processes, undisturbed: list[str]
) -> None:
    run = begun()
    victim = point.split(".")[0]
    started = processes.start_all(run, ROLES, **{"ROLLFLOW_CRASH_POINT": point})
    processes.join([process for process in started if process.name == victim])
    assert next(p.exitcode for p in started if p.name == victim) == -9, "the crash point was never passed"
    processes.kill_all()
    processes.join(processes.start_all(run, ROLES))
    assert_every_ticket_is_accounted_for(run)
    assert [commit.weights.digest for commit in commits_of(run)] == undisturbed


def test_a_worker_that_dies_alone_is_replaced_and_its_tickets_are_rolled_out_again(
    begun: Callable[..., Run], processes, undisturbed: list[str]
) -> None:
    run = begun()
    started = processes.start_all(run, ("train", "reward", "curate"))
    victim = processes.start(run, "rollout", ROLLFLOW_CRASH_POINT="rollout.claimed:2")
    processes.join([victim])
    assert victim.exitcode == -9
    assert len(Supervisor(run.store).bury_the_dead()) == 1
    processes.join([*started, processes.start(run, "rollout")])
    assert_every_ticket_is_accounted_for(run)
    claims = Log(run.store, "log/claim", Claim).read_from(0)
    assert [claim.attempt for claim in claims if claim.kind == "reclaim"] == [1]
    assert [commit.weights.digest for commit in commits_of(run)] == undisturbed


@pytest.mark.parametrize("stragglers", ["wait", "interrupt", "drop"])
def test_with_two_workers_and_a_death_the_bound_holds_for_every_token(
    stragglers: str, begun: Callable[..., Run], processes
) -> None:
    run = begun(staleness={"max_staleness": 2, "stragglers": stragglers}, steps=8)
    started = processes.start_all(run, ("train", "reward", "curate", "rollout"))
    victim = processes.start(run, "rollout", ROLLFLOW_CRASH_POINT="rollout.claimed:2")
    processes.join([victim, *started])
    assert victim.exitcode == -9
    assert_every_ticket_is_accounted_for(load_run(run.store.url))
    if stragglers != "interrupt":  # there, older tokens stay as context and are out of the loss
        assert_no_token_is_too_old(run)


def test_weights_published_as_differences_are_the_same_bits_also_for_a_worker_that_starts_in_between(
    begun: Callable[..., Run], processes, undisturbed: list[str]
) -> None:
    run = begun(train={"full_weights_every": 4})
    started = processes.start_all(run, ROLES, ROLLFLOW_CRASH_POINT="rollout.raw:4")
    processes.join([process for process in started if process.name == "rollout"])
    processes.kill_all()
    processes.join(processes.start_all(run, ROLES))
    kinds = [commit.weights.kind for commit in commits_of(run)]
    assert kinds == ["full", "delta", "delta", "delta", "full", "delta", "delta"]
    assert [commit.weights.digest for commit in commits_of(run)] == undisturbed
