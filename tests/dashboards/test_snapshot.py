import json

import pytest

from dashboards.snapshot import RunReader, Snapshot, headline, snapshot
from data_contracts.config import OrchestrationConfig
from data_contracts.errors import StoreError
from data_contracts.records import Commit, Control, Evaluation
from infra.log import Log
from infra.store import Store
from infra.store_memory import MemoryObjects
from tests.dashboards.build_run import DEATH, START, WORKERS, build_run

LIMIT_S = OrchestrationConfig().heartbeat_limit_s


class CountingObjects(MemoryObjects):
    """Memory that counts reads, and that can be away."""

    def __init__(self) -> None:
        super().__init__("counting")
        self.reads = 0
        self.is_away_after: int | None = None

    def get_many(self, keys):
        self.reads += len(keys)
        if self.is_away_after is not None and self.reads > self.is_away_after:
            raise StoreError("memory://counting: connection refused")
        return super().get_many(keys)


def counting_run(**arguments) -> tuple[CountingObjects, Store]:
    objects = CountingObjects()
    store = Store(objects, "memory://counting").at("run")
    build_run(store, **arguments)
    objects.reads = 0
    return objects, store


def told(run: Snapshot) -> dict[str, object]:
    """What must not depend on how often one looked."""
    names = ("state", "step", "queues", "issued", "trained", "refused_curation", "refused_trainer", "staleness", "late")
    return {name: getattr(run, name) for name in names} | {
        "rewards": [v.reward for v in run.versions],
        "refusals": {kind: tally.count for kind, tally in run.refusals.items()},
        "errors": {kind: tally.count for kind, tally in run.errors.items()},
        "checks": [(c.name, c.is_ok, c.detail) for c in run.checks],
        "roles": {role: (use.busy_s, use.waiting_s, use.tokens, use.writers) for role, use in run.roles.items()},
    }


def test_a_finished_run_is_told_as_it_was_written(root):
    store = root.at("tiny-1")
    builder = build_run(store)
    run = snapshot(store)
    assert (run.run, run.state, run.step, run.steps) == ("tiny-1", "finished", 40, 40)
    assert run.trained == builder.totals["trained"] == 160
    assert run.num_tokens == builder.totals["tokens"]
    assert run.issued == builder.next_ticket
    assert run.refused_curation == builder.totals["refused"]
    assert run.refused_trainer == builder.totals["dropped"] > 0
    assert run.queues.accepted == len(builder.accepted)
    assert run.issued == run.trained + run.refused_curation + run.refused_trainer + run.queues.total
    assert sum(tally.count for tally in run.refusals.values()) == run.refused_curation + run.refused_trainer
    assert [e.version for e in run.evaluations] == [0, 10, 20, 30, 40]
    assert run.reclaimed == 4
    assert set(run.roles) == {"rollout", "reward", "curate", "train", "evaluate"}
    assert run.roles["rollout"].writers == 2


def test_the_books_of_a_sound_run_balance(finished):
    checks = snapshot(finished).checks
    assert [c.name for c in checks if not c.is_ok] == []
    assert len(checks) == 8


def test_a_step_with_a_metric_that_is_not_finite_is_read_like_any_other(finished):
    skipped = snapshot(finished).versions[23]
    assert skipped.status == "skipped"
    assert skipped.metrics["optimizer/grad_norm"] != skipped.metrics["optimizer/grad_norm"]


def test_looking_often_or_once_tells_the_same(root):
    source, target = root.at("source"), root.at("target")
    build_run(source)
    reader = RunReader(target, now=lambda: START)
    # Objects arrive in the order in which they were written: logs of one run interleave by time.
    keys = sorted(source.list(), key=lambda key: (_time(source, key), key))
    for i, key in enumerate(keys):
        target.put_new(key, source.get(key))
        if i % 7 == 0:
            run = reader.refresh()
            assert run.issued == run.trained + run.refused_curation + run.refused_trainer + run.queues.total
    once = RunReader(target, now=lambda: START).refresh()
    assert told(reader.refresh()) == told(once)


def _time(store: Store, key: str) -> float:
    return json.loads(store.get(key)).get("at", 0.0) if key.startswith("log/") else 0.0


def test_a_second_look_reads_only_what_is_new():
    reads = {}
    for steps in (5, 40):
        objects, store = counting_run(steps=steps)
        reader = RunReader(store)
        reader.refresh()
        first, objects.reads = objects.reads, 0
        reader.refresh()
        reads[steps] = (first, objects.reads)
    assert reads[40][0] > 5 * reads[5][0] / 2
    assert reads[40][1] == reads[5][1] == 7 + 2 * len(WORKERS)


def test_a_store_that_fails_in_between_leaves_no_record_half_counted():
    objects, store = counting_run(steps=20)
    expected = told(RunReader(store, now=lambda: START).refresh())
    total, objects.reads = objects.reads, 0
    reader, num_failures = RunReader(store, now=lambda: START), 0
    for allowed in range(0, total, 3):
        objects.reads, objects.is_away_after = 0, allowed
        try:
            reader.refresh()
        except StoreError:
            num_failures += 1
    assert num_failures > 3
    objects.is_away_after = None
    assert told(reader.refresh()) == expected


def test_a_run_of_which_nothing_is_there_yet(root):
    run = snapshot(root.at("new"))
    assert (run.run, run.state, run.step, run.steps, run.reward) == ("new", "empty", -1, None, None)
    assert (run.eta_s, run.age_s, run.duration_s, run.roles) == (None, None, None, {})
    assert run.queues.total == 0


def test_a_run_that_has_only_just_begun(root):
    store = root.at("new")
    build_run(store, until=0, end="")
    run = RunReader(store, now=lambda: START + 5).refresh()
    assert (run.state, run.step, run.steps, run.reward) == ("running", 0, 40, None)
    assert [c.name for c in run.checks if not c.is_ok] == []


def test_time_left_follows_the_pace_of_the_last_commits(root):
    store = root.at("going")
    builder = build_run(store, until=20, end="")
    run = RunReader(store, now=lambda: builder.clock).refresh()
    pace = (run.versions[20].at - run.versions[1].at) / 19
    assert run.state == "running"
    assert run.eta_s == pytest.approx(20 * pace, rel=0.3)


def test_a_run_that_gives_no_sign_of_life_is_silent(root):
    store = root.at("killed")
    builder = build_run(store, until=20, end="")
    assert RunReader(store, now=lambda: builder.clock + LIMIT_S - 1).refresh().state == "running"
    run = RunReader(store, now=lambda: builder.clock + LIMIT_S + 1).refresh()
    assert (run.state, run.eta_s) == ("silent", None)
    assert run.age_s == pytest.approx(LIMIT_S + 1)
    assert all(use.alive == 0 for use in run.roles.values())


def test_a_failed_run_tells_the_roles_own_error(root):
    store = root.at("failed")
    build_run(store, until=20, end="fail")
    run = snapshot(store)
    assert run.state == "failed"
    assert run.error == "train: TrainingDiverged: loss is nan in versions 39 and 40, batch 0123abcd"


def test_a_run_that_goes_on_after_a_stop_is_running_again(root):
    store = root.at("resumed")
    builder = build_run(store, until=10, end="stop")
    reader = RunReader(store, now=lambda: builder.clock)
    assert reader.refresh().state == "stopped"
    builder.append("log/control", Control(writer="super", kind="start", at=builder.tick(1)))
    builder.step(11)
    run = reader.refresh()
    assert (run.state, run.step) == ("running", 11)


def test_a_dead_workers_old_heartbeat_is_not_a_sign_of_life(root):
    store = root.at("one-dead")
    builder = build_run(store, until=DEATH + 4, end="")
    assert builder.dead
    run = RunReader(store, now=lambda: builder.died_at + LIMIT_S + 1).refresh()
    assert run.roles["rollout"].writers == 2
    assert run.roles["rollout"].alive == 1
    assert run.errors["rollout: process died"].count == 1


def test_heartbeats_that_cannot_be_read_tell_nothing(root):
    store = root.at("torn")
    build_run(store, until=2, end="")
    store.put("role/rollout-x.json", b'{"role": "roll')
    store.put("role/other.json", b'{"role": "of another version"}')
    assert set(snapshot(store).roles) == {"rollout", "reward", "curate", "train", "evaluate"}


def test_a_damaged_record_is_told_and_the_rest_is_read(root):
    store = root.at("damaged")
    build_run(store)
    store.put("log/commit/0000000012.json", b"{")
    reader = RunReader(store)
    for _ in range(2):
        run = reader.refresh()
        assert (run.step, run.trained) == (11, 44)
        bad = [c for c in run.checks if not c.is_ok]
        assert [c.name for c in bad] == ["log/commit can be read"]
        assert "log/commit/0000000012.json" in bad[0].detail


def test_books_that_do_not_balance_are_told(root):
    store = root.at("cooked")
    builder = build_run(store, until=3, end="")
    last = Log(store, "log/commit", Commit).read(3)
    assert last is not None
    doubled = last.model_copy(update={"version": 4, "num_trained": 99, "metrics": {"staleness/max": 3.0}})
    builder.append("log/commit", doubled)
    bad = {c.name: c.detail for c in snapshot(store).checks if not c.is_ok}
    assert set(bad) == {
        "no ticket was trained twice",
        "trained: records and their totals agree",
        "staleness stays within its bound",
    }
    assert bad["trained: records and their totals agree"] == "12 counted, 99 told"
    assert bad["staleness stays within its bound"] == "at most 3 versions, bound 2"


def test_the_headline_of_an_evaluation_is_the_best_known_metric():
    def of(**metrics: float) -> tuple[str, float] | None:
        return headline(Evaluation(writer="e", version=1, digest="d", metrics=metrics))

    assert of(**{"eval/reward": 0.5, "eval/accuracy": 0.4}) == ("eval/accuracy", 0.4)
    assert of(**{"eval/reward/sums": 0.1, "eval/reward": 0.5}) == ("eval/reward", 0.5)
    assert of(**{"eval/length": 3.0}) == ("eval/length", 3.0)
    assert of() is None
