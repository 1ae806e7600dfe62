import doctest

import pytest

from dashboards import fold as fold_module
from dashboards.fold import Fold, Stage
from data_contracts.records import (
    BatchRef,
    Claim,
    Commit,
    Consumed,
    Control,
    Curated,
    GroupRef,
    PolicyRef,
    Raw,
    Refused,
    Scored,
    Verdict,
)

BATCH = BatchRef(key="batch/x.arrow", num_bytes=1, sha256="0" * 64, num_rows=4)
WEIGHTS = PolicyRef(kind="full", objects=(), digest="d", dtype="float32", num_parameters=1)


def group(ticket: int, attempt: int = 0, oldest_version: int = 0) -> GroupRef:
    return GroupRef(ticket=ticket, attempt=attempt, first_row=0, num_rows=4, oldest_version=oldest_version)


def claim(*tickets: int, kind: str = "claim", next_ticket: int | None = None, writer: str = "w") -> Claim:
    return Claim(
        writer=writer,
        kind=kind,
        tickets=tickets,
        attempt=0 if kind == "claim" else 1,
        version=0,
        curriculum=0,
        deadline=1,
        next_ticket=next_ticket if next_ticket is not None else max(tickets) + 1,
    )


def raw(*tickets: int, at: float = 0.0, **metrics: float) -> Raw:
    return Raw(writer="w", at=at, batch=BATCH, groups=tuple(map(group, tickets)), metrics=metrics)


def scored(*tickets: int, refused: dict[str, str] | None = None) -> Scored:
    return Scored(
        writer="r", rollout="w", batch=BATCH, groups=tuple(group(t) for t in tickets), refused=refused or {}, at=0.0
    )


def curated(*verdicts: Verdict) -> Curated:
    return Curated(writer="c", verdicts=verdicts, covers={}, num_accepted=0, num_refused=0, at=0.0)


def accept(ticket: int, reward: float = 0.5) -> Verdict:
    return Verdict(ticket=ticket, accepted=True, batch=BATCH, group=group(ticket), reward_mean=reward)


def commit(version: int, *tickets: int, oldest_version: int = 0, **fields: object) -> Commit:
    consumed = tuple(
        Consumed(ticket=t, attempt=0, batch=BATCH, group=group(t, oldest_version=oldest_version)) for t in tickets
    )
    told = {"status": "trained", "num_trained": 0, "num_tokens": 0, "checkpoint_version": 0} | fields
    return Commit(writer="t", version=version, consumed=consumed, weights=WEIGHTS, at=0.0, **told)


def test_a_ticket_is_counted_where_it_has_come_to():
    fold = Fold()
    fold.claim(claim(0, 1, 2, 3, 4))
    fold.raw(raw(1, 2, 3, 4))
    fold.scored(scored(2, 3, 4))
    fold.curated(curated(accept(3), accept(4)))
    fold.commit(commit(1, 4))
    assert fold.open == {0: Stage.CLAIMED, 1: Stage.RAW, 2: Stage.SCORED, 3: Stage.ACCEPTED}
    assert (fold.issued, fold.trained) == (5, 1)


def test_a_later_stage_wins_over_an_earlier_one_that_is_read_later():
    fold = Fold()
    fold.claim(claim(0))
    fold.curated(curated(accept(0)))
    fold.raw(raw(0))
    fold.scored(scored(0))
    assert fold.open == {0: Stage.ACCEPTED}


def test_a_late_result_of_a_settled_ticket_opens_nothing():
    fold = Fold()
    fold.claim(claim(0))
    fold.commit(commit(1, 0))
    fold.claim(claim(0, kind="reclaim", next_ticket=1))
    fold.raw(raw(0))
    assert fold.open == {}
    assert fold.reclaimed == 1


def test_the_first_verdict_settles_a_ticket():
    fold = Fold()
    fold.claim(claim(0, 1))
    fold.refused(Refused(writer="t", tickets=(0,), reason="dropped", commit=0, num_refused=1))
    fold.curated(curated(accept(0), Verdict(ticket=1, accepted=False, reason="too short")))
    fold.refused(Refused(writer="t", tickets=(1,), reason="timeout", commit=0, num_refused=2))
    assert (fold.refused_trainer, fold.refused_curation) == (1, 1)
    assert {kind: tally.count for kind, tally in fold.refusals.items()} == {"train: dropped": 1, "curate: too short": 1}
    assert fold.open == {}


def test_a_ticket_that_is_trained_twice_is_a_contradiction():
    fold = Fold()
    fold.claim(claim(0))
    fold.commit(commit(1, 0))
    fold.commit(commit(2, 0))
    assert fold.contradictions == ["commit 2 consumed ticket 0, settled before"]
    assert fold.trained == 1


def test_the_reward_of_a_commit_without_metrics_is_that_of_its_groups():
    fold = Fold()
    fold.claim(claim(0, 1))
    fold.curated(curated(accept(0, 0.25), accept(1, 0.75)))
    fold.commit(commit(1, 0, 1))
    fold.commit(commit(2, metrics={"reward/mean": 0.125}))
    assert [v.reward for v in fold.versions] == [0.5, 0.125]


def test_staleness_comes_from_the_histogram_or_else_from_the_groups():
    fold = Fold()
    fold.claim(claim(0, 1))
    fold.commit(commit(4, 0, 1, oldest_version=1))
    fold.commit(commit(5, histograms={"staleness/tokens": {"0": 30.0, "2": 10.0}}, metrics={"staleness/max": 0.0}))
    assert [v.staleness for v in fold.versions] == [{2: 2.0}, {0: 30.0, 2: 10.0}]
    assert [v.max_staleness for v in fold.versions] == [2, 0.0]
    assert fold.staleness == {0: 30.0, 2: 12.0}


def test_tokens_of_a_commit_are_the_growth_of_the_total():
    fold = Fold()
    fold.commit(commit(0, status="initial", num_tokens=0))
    fold.commit(commit(1, num_tokens=100))
    fold.commit(commit(2, num_tokens=250))
    assert [v.num_tokens for v in fold.versions] == [0, 100, 150]


@pytest.mark.parametrize(
    ("kinds", "state", "error"),
    [
        (["start"], "running", ""),
        (["start", "end"], "finished", ""),
        (["start", "stop"], "stopped", ""),
        (["start", "fail", "stop"], "failed", "train: no"),
        (["start", "stop", "fail"], "failed", "train: no"),
        (["start", "end", "stop"], "finished", ""),
        (["start", "fail", "start"], "running", ""),
        (["start", "stop", "start", "end"], "finished", ""),
        ([], "empty", ""),
    ],
)
def test_the_state_follows_the_control_log(kinds, state, error):
    fold = Fold()
    for kind in kinds:
        fold.control(Control(writer="s", kind=kind, role="train", error="no" if kind == "fail" else ""))
    assert (fold.state, fold.error) == (state, error)


def test_the_first_failure_is_the_one_that_is_told():
    fold = Fold()
    fold.control(Control(writer="s", kind="fail", role="rollout", error="EngineError: out of memory"))
    fold.control(Control(writer="s", kind="fail", role="train", error="RoleFailed: role rollout failed"))
    assert fold.error == "rollout: EngineError: out of memory"
    assert set(fold.errors) == {"rollout: EngineError", "train: RoleFailed"}


def test_errors_are_counted_by_kind_with_the_last_one_in_full():
    fold = Fold()
    fold.claim(claim(0, 1, writer="w"))
    fold.scored(scored(refused={"0": "row 3: timed out after 10 s", "1": "row 7: timed out after 11 s"}))
    fold.control(Control(writer="s", kind="dead", role="supervisor", target="w"))
    assert fold.errors["reward: row #"].count == 2
    assert fold.errors["reward: row #"].example == "ticket 1: row 7: timed out after 11 s"
    assert fold.errors["rollout: process died"].count == 1


def test_the_present_rate_forgets_what_is_long_ago():
    fold = Fold()
    assert fold.rate("rollout", 0.0) is None
    fold.raw(raw(0, at=100.0, tokens=3000.0, busy_s=10.0))
    assert fold.rate("rollout", 100.0) == pytest.approx(300.0)
    assert fold.rate("rollout", 110.0) == pytest.approx(150.0)
    assert fold.rate("rollout", 200.0) == 0.0


def test_docstrings_say_what_happens():
    assert doctest.testmod(fold_module).failed == 0
