"""A worker that cannot rebuild a version gets it in full, from a trainer that may be waiting for that very worker."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data_contracts.errors import DigestMismatch
from data_contracts.records import Commit, Control, PolicyRef
from infra.log import Log
from infra.retention import find_removable
from infra.runs import Run
from models.digest import weights_digest
from tasks.full_weights import WeightsFinder, answer_requests
from tasks.role import Role
from tasks.weights import PolicyReader, publish_delta

ROLES = ("train", "reward", "curate")


def commits_of(run: Run) -> list[Commit]:
    return Log(run.store, "log/commit", Commit).read_from(0)


def control_of(run: Run, kind: str) -> list[Control]:
    return [record for record in Log(run.store, "log/control", Control).read_from(0) if record.kind == kind]


def damage(run: Run, version: int) -> None:
    """Flip a byte of a version's published weights."""
    reference = commits_of(run)[version].weights.objects[0]
    path = Path(run.store.url) / reference.key
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


def test_a_worker_that_starts_where_a_difference_is_torn_gets_full_weights_and_the_run_ends_as_it_should(
    begun: Callable[..., Run], processes
) -> None:
    run = begun(train={"full_weights_every": 100})
    started = processes.start_all(run, (*ROLES, "rollout"), ROLLFLOW_CRASH_POINT="rollout.raw:3")
    processes.join([process for process in started if process.name == "rollout"])
    while len(commits_of(run)) < 3:  # the groups are there: the trainer will commit them and wait for more
        time.sleep(0.05)
    damage(run, 1)
    processes.join([*started[:3], processes.start(run, "rollout")])
    commits = commits_of(run)
    assert [commit.version for commit in commits] == list(range(run.config.steps + 1))
    tickets = [group.ticket for commit in commits for group in commit.consumed]
    assert tickets == list(range(run.config.steps * run.config.groups_per_step))
    (asked, *_), (given, *_) = control_of(run, "full_weights"), control_of(run, "weights")
    assert "DigestMismatch" in asked.error
    assert (asked.version or 0) <= (given.version or 0), "that version, or the newest the trainer has"
    assert given.weights is not None
    assert given.weights.kind == "full"
    assert given.weights.digest == commits[given.version or 0].weights.digest
    assert find_removable(run.store, run.config) == [], "what was given is part of the run"


def add_version(run: Run, version: int) -> tuple[dict[str, torch.Tensor], str]:
    """Commit a version as a difference to the one before, without training it."""
    base, _ = PolicyReader(run.store).weights(version - 1)
    weights = {name: tensor + 0.5 for name, tensor in base.items()}
    reference, _ = publish_delta(run.store, version, "w", weights, base)
    Log(run.store, "log/commit", Commit).append(
        version,
        Commit(
            writer="w",
            version=version,
            status="trained",
            consumed=(),
            weights=reference,
            checkpoint_version=0,
            num_trained=0,
            num_tokens=0,
        ),
    )
    return weights, reference.digest


def test_one_request_a_version_one_answer_and_the_bits_are_those_committed(begun: Callable[..., Run]) -> None:
    run = begun()
    add_version(run, 1)
    newest = add_version(run, 2)
    with Role("rollout", run.store, run.config) as worker, Role("train", run.store, run.config) as trainer:
        finder = WeightsFinder(worker)
        damage(run, 2)
        for _ in range(3):
            assert finder.find(2) is None
        assert len(control_of(run, "full_weights")) == 1
        trainer.check(often=True)
        answer_requests(trainer, 1, PolicyReader(run.store).weights(1)[0])
        assert control_of(run, "weights") == [], "a trainer that does not hold the version yet leaves it for later"
        for _ in range(2):
            answer_requests(trainer, 2, newest[0])
            trainer.check(often=True)
        assert [record.version for record in control_of(run, "weights")] == [2]
        worker.check(often=True)
        found = finder.find(2)
        assert found is not None
        assert found[1] == weights_digest(found[0]) == newest[1]


def test_a_trainer_gives_an_older_version_if_it_can_be_rebuilt_and_else_the_newest(begun: Callable[..., Run]) -> None:
    run = begun()
    newest = {version: add_version(run, version) for version in (1, 2, 3)}[3]
    with Role("rollout", run.store, run.config) as worker, Role("train", run.store, run.config) as trainer:
        worker.tell("full_weights", version=1)
        trainer.check(often=True)
        answer_requests(trainer, 3, newest[0])
        assert [record.version for record in control_of(run, "weights")] == [1]
        damage(run, 2)
        finder = WeightsFinder(worker)
        assert finder.find(2) is None
        trainer.check(often=True)
        answer_requests(trainer, 3, newest[0])
        worker.check(often=True)
        assert sorted(worker.full_weights) == [1, 3]
        with pytest.raises(DigestMismatch, match="version 2 are torn, and the trainer no longer has them"):
            finder.wait_for(lambda: 2)
        version, found = finder.wait_for(lambda: 3)
        assert (version, weights_digest(found)) == (3, newest[1])


def test_full_weights_that_are_torn_too_are_asked_for_again(begun: Callable[..., Run]) -> None:
    run = begun()
    newest = add_version(run, 1)
    damage(run, 1)
    with Role("train", run.store, run.config) as trainer:
        for _ in range(2):
            with Role("rollout", run.store, run.config) as worker:  # a process that starts anew
                worker.check(often=True)
                assert WeightsFinder(worker).find(1) is None
            trainer.check(often=True)
            answer_requests(trainer, 1, newest[0])
            given = control_of(run, "weights")[-1].weights
            assert isinstance(given, PolicyRef)
            (Path(run.store.url) / given.objects[0].key).write_bytes(b"torn")
    assert len({record.weights.objects[0].key for record in control_of(run, "weights") if record.weights}) == 2


def test_wrong_bits_in_a_workers_memory_are_mended_from_the_store_without_asking(begun: Callable[..., Run]) -> None:
    run = begun()
    add_version(run, 1)
    with Role("rollout", run.store, run.config) as worker:
        finder = WeightsFinder(worker)
        found = finder.find(1)
        assert found is not None
        next(iter(found[0].values())).view(-1)[0] += 1  # the very memory that the next difference is made to
        _, digest = add_version(run, 2)
        found = finder.find(2)
        assert found is not None
        assert found[1] == digest == weights_digest(found[0])
    assert control_of(run, "full_weights") == []
