import re

import pytest
from pydantic import ValidationError

from data_contracts.config import DeepspeedBackend, RunConfig, TorchBackend

HALF = {"type": "local", "path": "somewhere", "dtype": "bfloat16"}
EWMA = {"proximal": {"type": "ewma"}, "loss": {"type": "ppo_ewma"}}
SNAPSHOT = {"proximal": {"type": "snapshot"}, "loss": {"type": "ppo_ewma"}}


def config(stage, algorithm="grpo", model=None, **backend):
    backend = {"type": "deepspeed", "zero_stage": stage, **backend}
    model = model or {"type": "tiny"}
    return RunConfig.model_validate({"train": {"backend": backend}, "algorithm": algorithm, "model": model})


def test_a_run_trains_in_one_process_unless_it_says_otherwise():
    assert RunConfig().train.backend == TorchBackend()
    assert config(3).train.backend == DeepspeedBackend(zero_stage=3)


@pytest.mark.parametrize(
    ("stage", "algorithm", "model", "why"),
    [
        (2, {"advantage": {"type": "opob"}}, None, "advantage 'opob' needs each sample's own gradient"),
        (2, {"update": {"type": "slow_fast"}}, None, "update 'slow_fast' moves weights back"),
        (2, {"advantage": {"type": "gae"}}, None, "advantage 'gae' has a value model"),
        (3, EWMA, None, "proximal 'ewma' keeps whole weights; set zero_stage 2 or lower"),
        (3, SNAPSHOT, None, "proximal 'snapshot' keeps whole weights; set zero_stage 2 or lower"),
        (2, EWMA, HALF, "averages whole float32 weights; set model.dtype float32"),
        (0, "grpo", HALF, "set zero_stage 1 or higher"),
    ],
)
def test_what_ranks_cannot_do_is_refused_in_one_sentence(stage, algorithm, model, why):
    with pytest.raises(ValidationError, match=re.escape(why)) as refused:
        config(stage, algorithm, model)
    (error,) = refused.value.errors()
    assert "train.backend.type torch" in error["msg"]
    RunConfig.model_validate({"algorithm": algorithm, "model": model or {"type": "tiny"}})


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("algorithm", ["grpo", EWMA, SNAPSHOT])
def test_what_they_can_do_is_not(stage, algorithm):
    assert config(stage, algorithm).train.backend.type == "deepspeed"
    assert config(max(stage, 1), model=HALF).train.backend.type == "deepspeed"


def test_offloading_needs_something_split_off():
    assert config(1, offload_optimizer=True).train.backend.type == "deepspeed"
    with pytest.raises(ValidationError, match="offload_optimizer with zero_stage 0"):
        config(0, offload_optimizer=True)


def test_numbers_may_come_as_text_as_they_do_from_a_command_line():
    assert config("3", num_processes="4").train.backend == DeepspeedBackend(zero_stage=3, num_processes=4)
    with pytest.raises(ValidationError, match="zero_stage"):
        config(4)
