"""Curricula in real runs: what a ticket gets depends on committed state alone; what is used again says whose it was."""

from collections.abc import Callable

import pytest

from dashboards.reconcile import reconcile
from data_contracts.curriculum import Curriculum
from data_contracts.records import Commit, Consumed, Curated
from infra.log import Log
from infra.objects import get_batch, get_object
from infra.runs import Run
from tasks.ledger import Ledger
from tasks.replay import Replay

ROLES = ("train", "rollout", "reward", "curate")
POOL = {"pool": 12}
CURRICULA = {
    "thompson": {"sampler": {"type": "thompson", **POOL}, "successes": {"max_age": 9, "below": 1.0}},
    "window": {"sampler": {"type": "window", **POOL}, "reuse": {"share": 0.3, "max_age": 9}},
    "pilot_commit": {
        "sampler": {
            "type": "pilot_commit",
            **POOL,
            "pilots": 2,
            "pilot_samples": 2,
            "hard": 0.0,
            "easy": 1.0,
            "rest": 1,
        },
    },
    "aero": {"sampler": {"type": "aero", **POOL, "explore": 2, "more": 2, "limit": 6}},
}


def commits_of(run: Run) -> list[Commit]:
    return Log(run.store, "log/commit", Commit).read_from(0)


def consumed_of(run: Run) -> list[tuple[int, Consumed]]:
    return [(commit.version, group) for commit in commits_of(run) for group in commit.consumed]


def state_of(run: Run, commit: Commit) -> Curriculum:
    assert commit.curriculum is not None
    return Curriculum.model_validate_json(get_object(run.store, commit.curriculum))


def what_is_drawn(state: Curriculum) -> dict[str, object]:
    """Return a state without the names of batches, which hold times and so differ from run to run."""
    told = state.model_dump(include={"base_ticket", "next_prompt", "returned", "samples", "difficulty"})
    named = {**state.sources, **state.copies, **state.successes, **state.parts}
    return told | {"named": {place: source.ticket for place, source in named.items()}}


def assert_sound(run: Run) -> None:
    """The books balance, what is used again is young enough and the same samples, and a replay gives the same bits."""
    books = reconcile(run.store, deep=True)
    assert books.contradictions == []
    assert books.issued == books.trained + books.refused.total() + books.in_flight.total()
    accepted = {v.ticket: v for r in Log(run.store, "log/curated", Curated).read_from(0) for v in r.verdicts}
    for version, group in consumed_of(run):
        if (reused := group.group.reused) is not None:
            assert version - 1 - reused.oldest_version <= reused.max_age
            source = accepted[reused.ticket]
            assert source.batch is not None
            assert source.group is not None
            old = get_batch(run.store, source.batch, "scored").slice(source.group.first_row, source.group.num_rows)
            new = get_batch(run.store, group.batch, "scored").slice(group.group.first_row, group.group.num_rows)
            for name in ("response_ids", "behavior_logprobs", "policy_versions", "reward", "prompt_id"):
                assert new.column(name).to_pylist() == old.column(name).to_pylist()
        for joined in group.group.joined:
            assert version - 1 - joined.oldest_version <= joined.max_age
            assert joined.ticket < group.ticket
    for step in Replay(run, run.config).steps():
        assert step.difference == ""


@pytest.mark.parametrize(
    "name", ["pilot_commit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("thompson", "window", "aero"))]
)
def test_a_run_killed_whole_draws_the_same_prompts_after_it_is_resumed(
    name: str, begun: Callable[..., Run], processes
) -> None:
    undisturbed = begun("undisturbed", curriculum=CURRICULA[name])
    processes.join(processes.start_all(undisturbed, ROLES))
    assert_sound(undisturbed)
    killed = begun("killed", curriculum=CURRICULA[name])
    started = processes.start_all(killed, ROLES, ROLLFLOW_CRASH_POINT="train.before_commit:4")
    processes.join([process for process in started if process.name == "train"])
    processes.kill_all()
    processes.join(processes.start_all(killed, ROLES))
    assert [c.weights.digest for c in commits_of(killed)] == [c.weights.digest for c in commits_of(undisturbed)]
    for before, after in zip(commits_of(undisturbed)[1:], commits_of(killed)[1:], strict=True):
        assert what_is_drawn(state_of(killed, after)) == what_is_drawn(state_of(undisturbed, before))
    told = [group.group for _, group in consumed_of(undisturbed)]
    if name in ("pilot_commit", "aero", "thompson"):
        assert any(group.joined for group in told), "the case must occur to be tested"
    if name == "window":
        assert any(group.reused is not None for group in told), "the case must occur to be tested"
    last = state_of(undisturbed, commits_of(undisturbed)[-1])
    assert last.difficulty
    assert set(last.difficulty) <= set(range(12))
    assert Ledger(undisturbed.store, undisturbed.config).state.num_in_flight == 0


@pytest.mark.slow
@pytest.mark.parametrize("stragglers", ["wait", "interrupt"])
def test_ahead_of_training_too(stragglers: str, begun: Callable[..., Run], processes) -> None:
    run = begun(
        curriculum={**CURRICULA["thompson"], "reuse": {"share": 0.3, "max_age": 9}},
        staleness={"max_staleness": 2, "stragglers": stragglers},
        steps=10,
    )
    processes.join(processes.start_all(run, ROLES))
    assert_sound(run)
    assert any(group.group.reused is not None for _, group in consumed_of(run)), "the case must occur to be tested"
