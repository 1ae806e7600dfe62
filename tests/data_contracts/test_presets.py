import re

import pytest
from pydantic import ValidationError

from data_contracts.algorithm import AlgorithmConfig
from data_contracts.config import RunConfig
from data_contracts.presets import PRESETS, expand


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_whole_configuration_that_survives_json(name):
    cfg = AlgorithmConfig.model_validate(name)
    assert cfg.preset == name
    assert AlgorithmConfig.model_validate_json(cfg.model_dump_json()) == cfg
    assert PRESETS[name].about
    assert PRESETS[name].source


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_differs_from_every_other(name):
    others = [preset.parts for key, preset in PRESETS.items() if key != name]
    assert PRESETS[name].parts not in others


def test_a_word_gives_the_recipe():
    assert RunConfig.model_validate({"algorithm": "gspo"}).algorithm.loss.type == "gspo"


def test_further_fields_replace_those_of_the_recipe():
    cfg = AlgorithmConfig.model_validate({"preset": "gspo", "loss": {"clip_low": 1e-3}, "truncated": "mask"})
    assert (cfg.loss.type, cfg.loss.clip_low, cfg.loss.clip_high) == ("gspo", 1e-3, 4e-4)
    assert cfg.aggregation.type == "seq_mean_token_mean"
    assert cfg.truncated == "mask"


def test_another_kind_replaces_the_recipes_part_whole():
    cfg = AlgorithmConfig.model_validate({"preset": "gspo", "loss": {"type": "cispo"}})
    assert cfg.loss == AlgorithmConfig.model_validate({"loss": {"type": "cispo"}}).loss


def test_an_unknown_preset_names_close_matches():
    with pytest.raises(ValidationError, match=re.escape("there is no preset 'gspoo'; did you mean gspo")):
        AlgorithmConfig.model_validate("gspoo")
    with pytest.raises(ValueError, match="rollflow presets"):
        expand("zzzz")


def test_fields_without_a_preset_stay_as_they_are():
    assert expand({"truncated": "mask"}) == {"truncated": "mask"}


def test_a_recipe_that_contradicts_an_override_is_refused():
    with pytest.raises(ValidationError, match="counted twice"):
        AlgorithmConfig.model_validate({"preset": "tis", "proximal": {"type": "behavior"}})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"algorithm": "oc_grpo"}, "set rollout.guided_samples"),
        ({"algorithm": "branch_grpo"}, "set rollout.branching"),
        ({"rollout": {"guided_samples": 9}}, "exceeds samples_per_group 8"),
        ({"rollout": {"branching": {"trunks": 8}}}, "leaves no sample of 8 to branch off"),
        ({"algorithm": "remax"}, "set rollout.greedy_sample"),
        ({"rollout": {"greedy_sample": True}}, "baseline of algorithm.advantage 'remax' alone"),
        (
            {
                "algorithm": "remax",
                "samples_per_group": 1,
                "rollout": {"greedy_sample": True},
                "curate": {"min_samples": 1},
            },
            "samples_per_group 2",
        ),
        ({"algorithm": "remax", "rollout": {"greedy_sample": True, "branching": {}}}, "no rollout.branching"),
        ({"algorithm": "remax", "rollout": {"greedy_sample": True, "guided_samples": 8}}, "fewer rollout.guided"),
        (
            {
                "algorithm": "remax",
                "rollout": {"greedy_sample": True},
                "curriculum": {"sampler": {"type": "pilot_commit"}},
            },
            "which samples groups in parts",
        ),
        ({"rollout": {"branching": {}, "guided_samples": 1}}, "could not tell its guidance"),
    ],
)
def test_rollouts_that_do_not_fit_an_algorithm_are_refused_with_what_to_do(fields, reason):
    with pytest.raises(ValidationError, match=re.escape(reason)):
        RunConfig.model_validate(fields)


def test_the_methods_that_need_trees_guidance_or_a_greedy_sample_have_them():
    RunConfig.model_validate({"algorithm": "remax", "rollout": {"greedy_sample": True}})
    RunConfig.model_validate({"algorithm": "oc_grpo", "rollout": {"guided_samples": 4}})
    RunConfig.model_validate({"algorithm": "trace", "rollout": {"branching": {"trunks": 2}}})


def test_a_part_of_a_part_replaces_itself_alone():
    value = AlgorithmConfig.model_validate({"preset": "sao_value", "advantage": {"value": {"width": 8}}}).value
    assert value is not None
    assert (value.width, value.updates, value.warmup_steps) == (8, 2, 10)
    frozen = AlgorithmConfig.model_validate({"preset": "dvpo", "advantage": {"value": {"warmup_steps": 3}}}).value
    assert frozen is not None
    assert (frozen.trunk, frozen.clip, frozen.warmup_steps) == ("own", None, 3)
