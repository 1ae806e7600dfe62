"""A configuration is read once; what is wrong with it is one sentence that names the field."""

import typing
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from data_contracts.config import LocalModel, RunConfig
from data_contracts.errors import ConfigError
from data_contracts.losses import PpoClip
from flows.load import SHIPPED, load_run_config, override
from flows.placement import devices_of


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_config_is_valid(path: Path) -> None:
    assert load_run_config(path).name == path.stem


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "run.toml"
    config.write_text("steps = 10\nseed = 1\n[train]\nlearning_rate = 1e-3\n")
    monkeypatch.setenv("ROLLFLOW_RUN__SEED", "2")
    monkeypatch.setenv("ROLLFLOW_RUN__STEPS", "20")
    resolved = load_run_config(config, ["--steps", "30"])
    assert (resolved.steps, resolved.seed, resolved.train.learning_rate) == (30, 2, 1e-3)


def test_a_run_that_names_no_store_is_where_the_reading_commands_look(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("ROLLFLOW_STORE", raising=False)
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    assert load_run_config("tiny").store == str(tmp_path / "store")
    monkeypatch.setenv("ROLLFLOW_STORE", "s3://bucket/runs")
    assert load_run_config("tiny").store == "s3://bucket/runs"
    assert load_run_config("tiny", ["--store", "elsewhere"]).store == "elsewhere"


def test_what_is_wrong_in_the_environment_is_blamed_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_RUN__STALENESS__MAX_STALENES", "4")
    with pytest.raises(ConfigError, match=r"environment: ROLLFLOW_RUN__\w+: there is no field .*; did you mean"):
        load_run_config("tiny")
    monkeypatch.delenv("ROLLFLOW_RUN__STALENESS__MAX_STALENES")
    monkeypatch.setenv("ROLLFLOW_RUN__STEPS", "many")
    with pytest.raises(ConfigError, match="^environment: steps: input should be a valid integer"):
        load_run_config("tiny")
    monkeypatch.setenv("ROLLFLOW_RUN__STEPS", "3")
    monkeypatch.setenv("ROLLFLOW_RUN__AUDIT__SEVERITY", '{"reward_level": "stop"}')
    assert load_run_config("tiny").audit.severity == {"reward_level": "stop"}
    monkeypatch.delenv("ROLLFLOW_RUN__AUDIT__SEVERITY")
    monkeypatch.setenv("ROLLFLOW_RUN__AUDIT__SEVERITY__REWARD_LEVEL", "stop")
    assert load_run_config("tiny").audit.severity == {"reward_level": "stop"}


def test_a_field_of_another_kind_of_model_is_reached_from_the_command_line() -> None:
    resolved = load_run_config("tiny", ["--model.type", "local", "--model.path", "folder"])
    assert resolved.model == LocalModel(path="folder")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--stepz", "3"], r"^command line: there is no field stepz; did you mean steps"),
        (["--staleness.max_stalenes=3"], r"^command line: there is no field .*; did you mean staleness.max_staleness"),
        (["--steps", "-3"], r"^command line: steps: input should be greater than 0, got '-3'$"),
        (["--staleness.max_staleness", "-1"], r"^command line: staleness.max_staleness: [a-z0-9 ]*, got '-1'$"),
        (["--rollout.engine.slots", "0"], r"^command line: rollout.engine.slots: input should be greater than 0"),
        (["--algorithm.preset", "grop"], r"tiny.toml and command line: algorithm: there is no preset 'grop'"),
        (["--staleness.max_staleness", "unbounded"], "needs max_unsettled"),
        (["--rollout.sampling.temperature", "0"], "temperature: input should be greater than 0"),
        (["--model.type", "local"], "path: field required"),
        (["--curate.min_samples", "9"], "min_samples 9 exceeds samples_per_group 8"),
        (["--train.inner_updates", "99"], "inner_updates 99 exceeds groups_per_step 32"),
        (["--name", "Not A Name"], "name: string should match pattern"),
    ],
)
def test_a_wrong_argument_is_one_sentence_that_names_it(arguments: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_run_config("tiny", arguments)
    assert "\n" not in str(caught.value)


def test_a_preset_is_one_word_and_further_fields_replace_its_own(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('algorithm = "gspo"\n')
    assert load_run_config(config).algorithm.loss.type == "gspo"
    changed = load_run_config(config, ["--algorithm.loss.clip_low", "0.001"]).algorithm
    assert (changed.preset, changed.loss.type, changed.loss.clip_low) == ("gspo", "gspo", 0.001)
    other = load_run_config(config, ["--algorithm.preset", "tis"]).algorithm
    assert (other.loss.type, other.importance.type) == ("ppo_clip", "truncated")


def test_a_preset_replaces_the_algorithm_of_a_frozen_run() -> None:
    frozen = load_run_config("tiny", ["--algorithm.preset", "vcpo"])
    changed = override(frozen, ["--algorithm.preset", "gspo", "--algorithm.truncated", "mask"]).algorithm
    assert (changed.loss.type, changed.step_size.type, changed.truncated) == ("gspo", "fixed", "mask")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--algorithm.preset", "gspoo"], r"algorithm: there is no preset 'gspoo'; did you mean gspo"),
        (["--rollout.sampling.top_p", "0.9"], r"top_p 0\.9 with algorithm loss 'ppo_clip': .*proximal 'recomputed'"),
        (["--rollout.sampling.top_k", "5", "--algorithm.preset", "tis"], r"top_k 5 with algorithm importance"),
    ],
)
def test_an_algorithm_that_cannot_be_right_is_refused_in_one_sentence(arguments: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_run_config("tiny", arguments)
    assert "\n" not in str(caught.value)


def test_a_nucleus_is_fine_where_nothing_is_compared_with_it() -> None:
    words = ["--rollout.sampling.top_p", "0.9", "--algorithm.proximal.type", "recomputed"]
    assert load_run_config("tiny", words).rollout.sampling.top_p == 0.9


def test_a_misspelt_key_in_a_file_is_named(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[train]\nlearning_rat = 1e-3\n")
    with pytest.raises(ConfigError, match=r"train\.learning_rat: there is no such field"):
        load_run_config(config)


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("steps = = 3\n")
    with pytest.raises(ConfigError, match=r"run\.toml: not valid TOML"):
        load_run_config(config)


def test_a_missing_config_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match="no such file.*tiny"):
        load_run_config("no-such-config")


def models_in(kind: type[BaseModel], seen: set[type[BaseModel]]) -> set[type[BaseModel]]:
    """Return every configuration class reachable from `kind`."""
    if kind in seen:
        return seen
    seen.add(kind)
    for field in kind.model_fields.values():
        pending = [field.annotation]
        while pending:
            annotation = pending.pop()
            pending.extend(typing.get_args(annotation))
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                models_in(annotation, seen)
    return seen


def test_every_field_says_what_it_means() -> None:
    undescribed = [
        f"{kind.__name__}.{name}"
        for kind in models_in(RunConfig, set())
        for name, field in kind.model_fields.items()
        if name != "type" and not field.description
    ]
    assert undescribed == []


def test_a_frozen_configuration_is_overridden_by_words_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = RunConfig(steps=7)
    monkeypatch.setenv("ROLLFLOW_RUN__STEPS", "99")
    after = override(before, ["--staleness.max_staleness", "4", "--algorithm.loss.clip_high=0.3"])
    assert (after.steps, after.staleness.max_staleness) == (7, 4)
    assert isinstance(after.algorithm.loss, PpoClip)
    assert after.algorithm.loss.clip_high == 0.3
    assert override(before, []) == before


def test_another_kind_begins_from_its_own_defaults() -> None:
    before = override(RunConfig(), ["--algorithm.loss.clip_high", "0.3"])
    assert override(before, ["--algorithm.loss.type", "reinforce"]).algorithm.loss.type == "reinforce"
    with pytest.raises(ConfigError, match="no_such_kind"):
        override(before, ["--algorithm.loss.type", "no_such_kind"])


@pytest.mark.parametrize(
    ("devices", "complaint"),
    [
        ({"rollout": ["0"]}, r"devices\.rollout is for 1 processes, and there are 2"),
        ({"rollout": ["0", "3"], "train": ["2,3"]}, "devices: 3 named more than once"),
        ({"train": ["gpu0"]}, r"devices\.train"),
        ({"reward": ["0"]}, r"devices\.reward"),
    ],
)
def test_devices_fit_the_processes_and_no_two_share_one(devices: dict[str, list[str]], complaint: str) -> None:
    values = {"rollout": {"workers": 2}, "orchestration": {"devices": devices}}
    with pytest.raises(ValidationError, match=complaint):
        RunConfig.model_validate(values)


def test_every_rank_of_the_trainer_has_a_device() -> None:
    words = ["--train.backend.type", "deepspeed", "--train.backend.collectives", "nccl"]
    values = {"orchestration": {"devices": {"train": ["0,1,2"]}}}
    with pytest.raises(ConfigError, match=r"devices\.train names 3 devices for 2 processes"):
        override(RunConfig.model_validate(values), words)


def test_the_node_of_eight_uses_every_gpu_once() -> None:
    config = load_run_config("node8")
    devices = config.orchestration.devices
    assert (config.rollout.engine.type, config.train.backend.type) == ("vllm", "deepspeed")
    assert sorted(",".join([*devices["rollout"], *devices["train"]]).split(",")) == list("01234567")


def test_each_local_process_sees_its_own_devices_and_workers_of_a_cluster_keep_theirs() -> None:
    values = {"rollout": {"workers": 2}, "orchestration": {"devices": {"rollout": ["0", "1"], "train": ["2,3"]}}}
    config = RunConfig.model_validate(values)
    assert [devices_of(config, "rollout", number) for number in range(2)] == ["0", "1"]
    assert devices_of(config, "train", 0) == "2,3"
    assert devices_of(config, "reward", 0) == ""
    elsewhere = override(config, ["--orchestration.scheduler", "tcp://127.0.0.1:8786"])
    assert devices_of(elsewhere, "train", 0) == ""
