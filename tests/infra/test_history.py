import json

import pytest

from data_contracts.config import AdditionEnv, ReasoningGymEnv, RunConfig, TrackingConfig, TrainConfig
from data_contracts.errors import ContractError
from data_contracts.records import BatchRef, Control, Evaluation, Raw, Scored
from infra import history

BATCH = BatchRef(key="batch/0.arrow", num_bytes=1, sha256="0", num_rows=1)


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


def test_a_commit_says_its_metrics_and_what_the_roles_did_with_the_marker_last(make_commit):
    commit = make_commit(7, metrics={"reward/mean": 0.5})
    told = [
        Raw(writer="r", batch=BATCH, groups=(), metrics={"tokens": 30.0, "busy_s": 2.0, "waiting_s": 1.0}),
        Raw(writer="s", batch=BATCH, groups=(), metrics={"tokens": 10.0, "busy_s": 3.0, "waiting_s": 4.0}),
        Scored(writer="v", rollout="r", batch=BATCH, groups=(), metrics={"verify/rows": 4.0}),
    ]
    at_ms = 1_000_000_007_500
    assert history.commit_points(commit, told) == [
        history.Point("reward/mean", 0.5, at_ms, 7),
        history.Point("rollout/busy_s", 5.0, at_ms, 7),
        history.Point("rollout/idle", 0.5, at_ms, 7),
        history.Point("rollout/tokens", 40.0, at_ms, 7),
        history.Point("rollout/tokens_per_s", 8.0, at_ms, 7),
        history.Point("rollout/waiting_s", 5.0, at_ms, 7),
        history.Point("verify/rows", 4.0, at_ms, 7),
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
