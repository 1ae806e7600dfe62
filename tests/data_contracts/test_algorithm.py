import re
import subprocess
import sys
from typing import get_args

import pytest
from pydantic import ValidationError

from data_contracts import algorithm
from data_contracts.algorithm import AlgorithmConfig

UNIONS = ["Advantage", "Proximal", "Importance", "Loss", "Filter", "Aggregation", "Regularizer"]
SWITCHES = ["StepSize", "Update"]


def members(union: str) -> set[type]:
    return set(get_args(get_args(getattr(algorithm, union))[0]))


def test_every_choice_has_exactly_one_function():
    from models.advantages import ADVANTAGES
    from models.aggregation import AGGREGATIONS
    from models.importance import FILTERS, PROXIMALS, WEIGHTS
    from models.losses import LOSSES
    from models.regularizers import REGULARIZERS

    tables = [ADVANTAGES, PROXIMALS, WEIGHTS, LOSSES, FILTERS, AGGREGATIONS, REGULARIZERS]
    for union, table in zip(UNIONS, tables, strict=True):
        assert members(union) == set(table), union


@pytest.mark.parametrize("union", [*UNIONS, *SWITCHES])
def test_every_choice_and_field_says_what_it_is(union):
    for member in members(union):
        assert member.__doc__
        for name, field in member.model_fields.items():
            assert name == "type" or field.description, f"{member.__name__}.{name}"
    assert all(field.description for field in AlgorithmConfig.model_fields.values())


@pytest.mark.parametrize("union", UNIONS)
def test_types_are_distinct(union):
    types = [member.model_fields["type"].default for member in members(union)]
    assert len(types) == len(set(types))


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"importance": {"type": "truncated"}}, "counted twice"),
        ({"importance": {"type": "masked"}, "proximal": {"type": "behavior"}}, "counted twice"),
        ({"loss": {"type": "sao"}, "proximal": {"type": "recomputed"}}, "counted twice"),
        (
            {"loss": {"type": "dppo_tv"}, "proximal": {"type": "recomputed"}, "importance": {"type": "truncated"}},
            "counted twice",
        ),
        ({"loss": {"type": "reinforce"}, "proximal": {"type": "recomputed"}}, "has no effect"),
        ({"loss": {"type": "ppo_ewma"}}, "plain clipping"),
        (
            {
                "loss": {"type": "ppo_ewma"},
                "proximal": {"type": "ewma"},
                "importance": {"type": "truncated"},
            },
            "counted twice",
        ),
        ({"loss": {"type": "drpo"}, "aggregation": {"type": "seq_mean_token_sum"}}, "one number of its own"),
        ({"loss": {"type": "drpo"}, "filters": [{"type": "veto"}]}, "one number of its own"),
        ({"loss": {"type": "drpo"}, "advantage": {"type": "rloo"}}, "has no effect"),
        ({"regularizers": [{"type": "entropy"}, {"type": "adaptive_entropy"}]}, "two entropy bonuses"),
        ({"loss": {"type": "drpo"}, "advantage": {"type": "gae"}}, "has no effect"),
        ({"loss": {"type": "a_star_po"}, "reward_kl": {}}, "counted twice"),
        ({"loss": {"type": "a_star_po"}, "regularizers": [{"type": "kl", "towards": "reference"}]}, "counted twice"),
        ({"advantage": {"type": "frozen_value"}, "reward_kl": {}}, "has no effect"),
        ({"advantage": {"type": "frozen_value", "value": {"warmup_steps": 0}}}, "greater than 0"),
        ({"reward_kl": {}, "regularizers": [{"type": "kl", "towards": "reference"}]}, "one pull, counted twice"),
        ({"regularizers": [{"type": "kl"}, {"type": "kl", "estimator": "k3"}]}, "the same policy"),
        ({"step_size": {"type": "ess"}, "update": {"type": "slow_fast"}}, "fast steps would be shrunk"),
        (
            {
                "proximal": {"type": "recomputed"},
                "importance": {"type": "moment_masked"},
                "loss": {"type": "m2po"},
            },
            "two forms of one bound",
        ),
        (
            {"importance": {"type": "kl_masked", "low": 1.0, "high": 0.5}, "proximal": {"type": "recomputed"}},
            "no token would",
        ),
        (
            {"importance": {"type": "kl_masked", "high": -0.5}, "proximal": {"type": "recomputed"}},
            "no token would",
        ),
        (
            {"importance": {"type": "truncated", "floor": 2.0}, "proximal": {"type": "recomputed"}},
            "every weight would",
        ),
        ({"importance": {"type": "off_context"}, "proximal": {"type": "ewma"}}, "another correction would be mixed"),
        ({"importance": {"type": "off_context"}}, "counted twice"),
        ({"regularizers": [{"type": "kl", "estimator": "k1"}]}, "zero in expectation"),
        (
            {"importance": {"type": "masked", "low": 3.0, "high": 2.0}, "proximal": {"type": "recomputed"}},
            "no token would",
        ),
    ],
)
def test_contradictions_are_refused_with_a_reason(choices, reason):
    with pytest.raises(ValidationError, match=reason):
        AlgorithmConfig.model_validate(choices)


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"proximal": {"type": "recomputed"}, "importance": {"type": "truncated", "level": "sequence", "cap": 5.0}},
        {"loss": {"type": "reinforce"}, "proximal": {"type": "recomputed"}, "importance": {"type": "masked"}},
        {
            "loss": {"type": "reinforce"},
            "proximal": {"type": "recomputed"},
            "regularizers": [{"type": "kl", "towards": "proximal"}],
        },
        {"loss": {"type": "gspo"}, "aggregation": {"type": "seq_mean_token_mean"}, "filters": [{"type": "veto"}]},
        {"proximal": {"type": "interpolated"}, "importance": {"type": "masked"}},
    ],
)
def test_sensible_combinations_survive_json(choices):
    cfg = AlgorithmConfig.model_validate(choices)
    assert AlgorithmConfig.model_validate_json(cfg.model_dump_json()) == cfg


@pytest.mark.parametrize(
    ("choices", "part"),
    [
        ({}, "loss 'ppo_clip'"),
        ({"loss": {"type": "reinforce"}}, ""),
        ({"loss": {"type": "drpo"}}, "loss 'drpo'"),
        ({"proximal": {"type": "recomputed"}}, ""),
        ({"proximal": {"type": "ewma"}, "loss": {"type": "ppo_ewma"}}, "loss 'ppo_ewma'"),
        ({"proximal": {"type": "interpolated"}}, "proximal 'interpolated'"),
        ({"proximal": {"type": "recomputed"}, "importance": {"type": "truncated"}}, "importance 'truncated'"),
        ({"proximal": {"type": "recomputed"}, "filters": [{"type": "veto"}]}, "filter 'veto'"),
        ({"proximal": {"type": "recomputed"}, "filters": [{"type": "top_entropy"}]}, ""),
        ({"proximal": {"type": "recomputed"}, "step_size": {"type": "ess"}}, "step_size 'ess'"),
        ({"proximal": {"type": "recomputed"}, "reward_kl": {}}, "reward_kl"),
        ({"loss": {"type": "reinforce"}, "regularizers": [{"type": "kl"}]}, "regularizer 'kl'"),
        ({"loss": {"type": "reinforce"}, "regularizers": [{"type": "kl", "towards": "reference"}]}, ""),
    ],
)
def test_what_compares_with_the_behavior_policy_is_known(choices, part):
    assert AlgorithmConfig.model_validate(choices).compared_with_behavior() == part


def test_a_misspelt_field_is_named():
    with pytest.raises(ValidationError, match=re.escape("loss.ppo_clip.clip_hi")):
        AlgorithmConfig.model_validate({"loss": {"type": "ppo_clip", "clip_hi": 0.3}})


def test_reading_the_configuration_loads_no_torch():
    code = (
        "import sys, data_contracts.algorithm, data_contracts.config, data_contracts.metrics\n"
        "heavy = {'torch', 'transformers', 'prefect', 'mlflow'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
