import json

import pytest

from data_contracts.config import AdditionEnv, ReasoningGymEnv, RunConfig, TrackingConfig, TrainConfig
from data_contracts.errors import ContractError
from data_contracts.records import Control, Curated, Evaluation, Verdict
from infra import history


def curated(metrics: dict[str, float], num_verdicts: int) -> Curated:
    verdicts = tuple(Verdict(ticket=ticket, accepted=True) for ticket in range(num_verdicts))
    return Curated(writer="c", verdicts=verdicts, covers={}, num_accepted=0, num_refused=0, metrics=metrics)


def control(*kinds: str) -> list[Control]:
    return [
        Control.model_validate({"writer": "w", "kind": kind, "role": "reward", "error": f"why {i}", "at": float(i)})
        for i, kind in enumerate(kinds)
    ]


def test_flatten_names_every_leaf_and_cuts_long_values():
    config = RunConfig(train=TrainConfig(learning_rate=0.002), envs=(AdditionEnv(), AdditionEnv(max_operand=9)))
    flat = history.flatten(config)
    assert flat["train.learning_rate"] == "0.002"
    assert flat["envs.1.max_operand"] == "9"
    assert flat["rollout.sampling.stop"] == "[]"
    assert flat["train.schedule"] == "constant", "texts stand without quotes"
    assert flat["deterministic"] == "null"

    long = ReasoningGymEnv(dataset="gcd", instruction="x" * 7000, parameters={"odd(name)": 1})
    flat = history.flatten(RunConfig(envs=(long,)))
    assert len(flat["envs.0.instruction"]) == 6000
    assert flat["envs.0.instruction"].endswith("...")
    assert flat["envs.0.parameters.odd_name_"] == "1"


def test_the_same_env_has_the_same_digest_and_another_has_another():
    one, two, again = (
        history.env_inputs(RunConfig(envs=(env,)))[0]
        for env in (
            ReasoningGymEnv(dataset="gcd"),
            ReasoningGymEnv(dataset="gcd", size=9),
            ReasoningGymEnv(dataset="gcd"),
        )
    )
    assert one == again
    assert one.digest != two.digest
    assert one.name == "reasoning_gym/gcd"
    assert len(one.digest) == 36


def test_policies_share_a_name_exactly_when_their_evaluations_compare():
    base = RunConfig(name="sums")
    assert history.model_name(base).startswith("sums-")
    assert history.model_name(base) == history.model_name(RunConfig(name="sums", seed=7, steps=3))
    assert history.model_name(base) != history.model_name(RunConfig(name="sums", envs=(AdditionEnv(max_operand=9),)))


def test_a_commit_says_its_own_metrics_and_those_it_saw_first_with_the_marker_last(make_commit):
    commit = make_commit(7, metrics={"reward/mean": 0.5})
    gathered = [
        curated({"reward/mean": 9.0, "length/mean": 4.0}, num_verdicts=1),
        curated({"length/mean": 8.0}, num_verdicts=3),
        curated({"length/mean": 1e9}, num_verdicts=0),
    ]
    at_ms = 1_000_000_007_500
    assert history.commit_points(commit, gathered) == [
        history.Point("length/mean", 7.0, at_ms, 7),  # (1 * 4 + 3 * 8) / 4
        history.Point("reward/mean", 0.5, at_ms, 7),
        history.Point("export/commit", 7.0, at_ms, 7),
    ]


def test_an_undeclared_metric_is_refused_by_name(make_commit):
    with pytest.raises(ContractError, match="loss/typo"):
        history.commit_points(make_commit(0, metrics={"loss/typo": 1.0}), [])


def test_a_second_evaluation_of_a_version_moves_the_marker_only():
    evaluation = Evaluation(writer="e", version=20, digest="d", metrics={"eval/reward": 0.4}, at=5.0)
    first = history.evaluation_points(3, evaluation, is_first=True)
    assert [(point.key, point.step) for point in first] == [("eval/reward", 20), ("export/evaluation", 3)]
    assert history.evaluation_points(4, evaluation, is_first=False) == [
        history.Point("export/evaluation", 4.0, 5000, 4)
    ]


def test_accuracy_decides_before_reward():
    both = Evaluation(writer="e", version=0, digest="d", metrics={"eval/reward": 2.0, "eval/accuracy": 0.5})
    assert history.headline(both) == ("eval/accuracy", 0.5)
    neither = Evaluation(writer="e", version=0, digest="d", metrics={})
    assert history.headline(neither) is None


def test_seen_first_is_what_lies_between_two_commits():
    before = {"log/curated": 3, "log/raw/a": 1, "log/claim": 4}
    after = {"log/curated": 5, "log/raw/a": 1, "log/raw/b": 2, "log/claim": 9}
    found = {path: numbers for path, _, numbers in history.seen_first(before, after)}
    assert found == {"log/curated": range(3, 5), "log/raw/b": range(0, 2)}


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((), "running"),
        (("start",), "running"),
        (("start", "stop"), "stopped"),
        (("start", "stop", "start"), "running"),
        (("start", "dead", "end"), "ended"),
        (("start", "stop", "end"), "ended"),
        (("start", "end", "fail"), "failed"),
        (("start", "fail", "start", "end"), "ended"),
    ],
)
def test_what_stands_after_the_newest_start_decides_the_state(kinds: tuple[str, ...], expected: str):
    assert history.run_state(control(*kinds)).kind == expected


def test_a_failed_run_carries_the_error_of_the_role_that_failed():
    state = history.run_state(control("start", "fail", "fail"))
    assert (state.error, state.at_ms) == ("reward: why 1", 1000)


def test_registered_are_every_nth_and_the_last_version():
    config = RunConfig(steps=45, tracking=TrackingConfig(register_every=20))
    assert [version for version in range(46) if history.is_registered(version, config)] == [0, 20, 40, 45]


def test_lineage_names_batches_and_survives_json(make_commit):
    said = history.lineage([make_commit(0), make_commit(3, histograms={"staleness/tokens": {"0": 5.0}})])
    assert said[0]["batches"] == []
    assert said[1]["batches"] == [f"{3:064x}"]
    assert said[1]["tickets"] == [3]
    assert json.loads(json.dumps(said)) == said


def test_keys_keep_only_what_the_server_takes():
    assert history.safe_key("reward/component/format (strict) é") == "reward/component/format _strict_ _"
