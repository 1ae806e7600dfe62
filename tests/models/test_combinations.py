"""Recipes with parts of other recipes: what the configuration accepts trains, and what it refuses has a reason."""

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from data_contracts import algorithm as parts
from data_contracts.algorithm import AlgorithmConfig
from data_contracts.config import TrainConfig
from data_contracts.presets import PRESETS
from models.trainer import Trainer

REGULARIZERS = [
    {"type": "entropy"},
    {"type": "adaptive_entropy", "target": 99.0},
    *({"type": "kl", "towards": towards} for towards in ("behavior", "proximal", "reference")),
    {"type": "kl", "towards": "behavior", "estimator": "k1", "reweight": True},
]


def kinds(union: str) -> st.SearchStrategy[dict[str, Any]]:
    """Draw one member of a union with its defaults, by name."""
    members: tuple[type[BaseModel], ...] = get_args(get_args(getattr(parts, union))[0])
    names = [member.model_fields["type"].default for member in members]
    return st.sampled_from([{"type": name} | ({"length": 8} if name == "constant_norm" else {}) for name in names])


OVERRIDES = st.fixed_dictionaries(
    {},
    optional={
        "advantage": kinds("Advantage"),
        "proximal": kinds("Proximal"),
        "importance": kinds("Importance"),
        "loss": kinds("Loss"),
        "filters": st.lists(kinds("Filter"), max_size=2),
        "aggregation": kinds("Aggregation"),
        "regularizers": st.lists(st.sampled_from(REGULARIZERS), max_size=2),
        "step_size": kinds("StepSize"),
        "update": kinds("Update"),
        "truncated": st.sampled_from(["keep", "mask"]),
        "reward_kl": st.just({"coefficient": 0.01}),
    },
)
TRAIN = st.builds(TrainConfig, inner_updates=st.sampled_from([1, 2]), tokens_per_microbatch=st.sampled_from([12, 4096]))


@given(preset=st.sampled_from(sorted(PRESETS)), overrides=OVERRIDES, train=TRAIN)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_the_configuration_accepts_trains(make_model, make_groups, preset, overrides, train):
    try:
        algorithm = AlgorithmConfig.model_validate({"preset": preset, **overrides})
    except ValidationError as refusal:
        for error in refusal.errors():
            assert len(error["msg"]) > 40, error  # a reason, not a word
        return
    warmup = algorithm.value.warmup_steps if algorithm.value else 0
    groups = make_groups(3, 3, version=warmup + 1, longest=5)
    groups = [[replace(s, components={"a": s.reward, "b": float(s.sample)}) for s in g] for g in groups]
    greedy = [replace(g[-1], temperature=0.0) for g in groups]  # as after rollout.greedy_sample
    short = replace(groups[0][0], finish_reason="length")
    hinted = replace(groups[1][0], is_guided=True, policy_versions=np.where(groups[1][0].action_mask, warmup, -1))
    groups = [[short, groups[0][1], greedy[0]], [hinted, groups[1][1], greedy[1]], [*groups[2][:2], greedy[2]]]
    trainer = Trainer(make_model(num_hidden_layers=1), algorithm, train, total_steps=warmup + 2)
    for version in (0, warmup + 1):
        result = trainer.step(groups, version=version, max_staleness=None)
        assert result.status == "trained", result.evidence
        assert all(math.isfinite(value) for value in result.metrics.values())
    assert all(torch.isfinite(tensor).all() for tensor in trainer.weights("float32").values())
