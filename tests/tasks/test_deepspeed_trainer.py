"""Real DeepSpeed in two real processes beside the torch trainer in this one: same batches, same weights."""

import importlib.util
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from data_contracts.algorithm import AlgorithmConfig
from data_contracts.config import DeepspeedBackend, RunConfig, TinyModel
from data_contracts.errors import ContractError, RankFailed
from models.optimizer import checkpoint_from_bytes
from models.packing import pack, packed_logprobs
from models.policy import build_policy, copy_weights, policy_files
from models.tiny import build_tokenizer
from models.trainer import Trainer
from tasks.deepspeed_trainer import DeepspeedTrainer, start_ranks

spec = importlib.util.spec_from_file_location("shared", Path(__file__).parents[1] / "models" / "conftest.py")
assert spec is not None and spec.loader is not None
shared = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shared)
make_model, make_groups = shared.make_model.__wrapped__(), shared.make_groups.__wrapped__()

STEPS = 3
SMALL = {"tokens_per_microbatch": 24}
"""Several microbatches for each rank, and not as many for both."""


def config_of(stage, algorithm="grpo", train=None, **backend):
    backend = {"type": "deepspeed", "zero_stage": stage, **backend}
    train = {"max_grad_norm": 0.5, "backend": backend, **(train or {})}
    return RunConfig.model_validate({"steps": 10, "algorithm": algorithm, "train": train})


class Pair:
    """The same policy in a group of ranks and in this process."""

    def __init__(self, config, group=None, dtype=torch.float32):
        model = make_model(dtype=dtype)
        self.files = policy_files(model, build_tokenizer(TinyModel().characters))
        self.start = copy_weights(model)
        backend = config.train.backend
        assert isinstance(backend, DeepspeedBackend)
        self.config, self.dtype = config, dtype
        self.ranks = DeepspeedTrainer(self.files, self.start, config, backend, group)
        self.one = self.fresh()

    def fresh(self):
        """Return a torch trainer at version 0."""
        model = build_policy(self.files, self.dtype, self.start).model
        return Trainer(model, self.config.algorithm, self.config.train, total_steps=self.config.steps)

    def groups(self, version):
        """Return samples with log-probabilities near those of the weights."""
        model = build_policy(self.files, torch.float32, self.one.weights("float32")).model
        found = []
        for group in make_groups(5, 3, seed=version, version=version):
            with torch.no_grad():
                logp = packed_logprobs(model, pack(group))[0].split([int(s.action_mask.sum()) for s in group])
            for i, (sample, values) in enumerate(zip(group, logp, strict=True)):
                behavior = np.full(len(sample.response_ids), np.nan, np.float32)
                noise = np.random.default_rng(i).normal(0, 0.1, len(values))
                behavior[sample.action_mask] = values.numpy() + noise
                group[i] = replace(sample, behavior_logprobs=behavior)
            found.append(group)
        return found

    def step(self, version):
        groups = self.groups(version)
        return [t.step(groups, version=version, max_staleness=0) for t in (self.one, self.ranks)]

    def assert_same(self, atol=2e-6):
        want, got = (trainer.weights("float32") for trainer in (self.one, self.ranks))
        assert want.keys() == got.keys()
        for name, tensor in want.items():
            torch.testing.assert_close(got[name], tensor, rtol=0, atol=atol, msg=name)

    def moved(self):
        now = self.ranks.weights("float32")
        return max((now[name] - tensor.float()).abs().max().item() for name, tensor in self.start.items())


def assert_same_result(want, got):
    assert (got.status, got.evidence, got.num_tokens) == (want.status, want.evidence, want.num_tokens)
    assert got.histograms == want.histograms
    assert got.metrics.keys() == want.metrics.keys()
    for name, value in want.metrics.items():
        if not name.startswith("train/"):  # times, and how the tokens were packed
            assert got.metrics[name] == pytest.approx(value, rel=1e-3, abs=2e-5), name


def with_a_torn_sample(groups):
    torn = np.where(groups[2][1].action_mask, np.inf, np.nan).astype(np.float32)
    groups[2][1] = replace(groups[2][1], behavior_logprobs=torn)
    return groups


@pytest.fixture(scope="module")
def group():
    """Two ranks that find a new policy in every test; importing DeepSpeed takes them longest."""
    group = start_ranks(DeepspeedBackend(zero_stage=3))
    yield group
    group.close()


def test_zero_3_trains_publishes_and_resumes_as_torch_does_and_ends_when_a_rank_is_killed():
    pair = Pair(config_of(3, train=SMALL))
    for version in range(STEPS):
        want, got = pair.step(version)
        assert_same_result(want, got)
    pair.assert_same()
    assert pair.moved() > 5e-4

    body = pair.ranks.checkpoint_bytes()
    resumed = pair.fresh()
    resumed.load_checkpoint_bytes(body)  # of another backend
    assert resumed.checkpoint_bytes() == body
    assert resumed.weights("float32").keys() == pair.start.keys()
    for name, tensor in pair.ranks.weights("float32").items():
        assert torch.equal(resumed.weights("float32")[name], tensor)

    skipped = pair.ranks.step(with_a_torn_sample(pair.groups(STEPS)), version=STEPS, max_staleness=0)
    assert skipped.status == "skipped"
    assert "ticket 2, sample 1" in skipped.evidence
    assert pair.ranks.checkpoint_bytes() == body  # not a bit has moved

    pids = pair.ranks.pids
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RankFailed, match=rf"rank 1 \(process {pids[1]}\) was killed by SIGKILL"):
        pair.ranks.step(pair.groups(STEPS), version=STEPS, max_staleness=0)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


CASES = {
    "small microbatches": ("grpo", SMALL),
    "one large microbatch": ("grpo", {}),
    "two updates with decay": ("grpo", SMALL | {"inner_updates": 2, "weight_decay": 0.1}),
    "loss of the whole update": ({"loss": {"type": "m2po"}, "regularizers": [{"type": "entropy"}]}, SMALL),
    "recomputed proximal": (
        {"proximal": {"type": "recomputed"}, "importance": {"type": "truncated", "level": "sequence"}},
        SMALL | {"inner_updates": 2},
    ),
    "reference": ({"regularizers": [{"type": "kl", "towards": "reference"}]}, SMALL),
    "reward kl": ({"reward_kl": {"coefficient": 0.1}}, SMALL),
    "step size": ({"step_size": {"type": "ess"}}, SMALL),
    "sequences": ("gspo", SMALL),
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_every_stage_trains_as_torch_does(group, stage, case):
    algorithm, train = CASES[case]
    pair = Pair(config_of(stage, algorithm, train), group)
    for version in range(STEPS):
        assert_same_result(*pair.step(version))
    pair.assert_same()
    assert pair.moved() > 5e-4
    tensors, scalars = pair.one.checkpoint_state()
    found, told = checkpoint_from_bytes(pair.ranks.checkpoint_bytes())
    assert told == scalars
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=2e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    "proximal", [{"type": "ewma", "decay": 0.5}, {"type": "snapshot", "lag": 2}], ids=["ewma", "snapshot"]
)
def test_weights_that_are_kept_count_and_are_in_checkpoints(group, stage, proximal):
    pair = Pair(config_of(stage, {"proximal": proximal, "loss": {"type": "ppo_ewma"}}, SMALL), group)
    for version in range(STEPS):
        assert_same_result(*pair.step(version))
    pair.assert_same()
    again = DeepspeedTrainer(pair.files, pair.start, pair.config, pair.config.train.backend, group)
    again.load_checkpoint_bytes(pair.one.checkpoint_bytes())
    pair.ranks = again
    assert_same_result(*pair.step(STEPS))
    pair.assert_same()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_goes_on_under_another_stage_to_the_bit_under_its_own(group, stage):
    pair = Pair(config_of(stage, train=SMALL), group)
    for version in range(2):
        pair.step(version)
    body, groups = pair.ranks.checkpoint_bytes(), pair.groups(2)
    pair.ranks.step(groups, version=2, max_staleness=0)
    straight = pair.ranks.checkpoint_bytes()

    ends = {}
    for other in (stage, (stage + 1) % 4):
        config = config_of(other, train=SMALL)
        ranks = DeepspeedTrainer(pair.files, pair.start, config, config.train.backend, group)
        ranks.load_checkpoint_bytes(body)
        assert ranks.checkpoint_bytes() == body
        ranks.step(groups, version=2, max_staleness=0)
        ends[other] = ranks.checkpoint_bytes()
    assert ends[stage] == straight
    (want, _), (got, _) = (checkpoint_from_bytes(end) for end in (straight, ends[(stage + 1) % 4]))
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-3, atol=2e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_that_is_not_finite_leaves_every_bit(group, stage):
    pair = Pair(config_of(stage, train=SMALL), group)
    pair.step(0)
    body = pair.ranks.checkpoint_bytes()
    groups = with_a_torn_sample(pair.groups(1))
    want, got = (t.step(groups, version=1, max_staleness=0) for t in (pair.one, pair.ranks))
    assert got.status == "skipped"
    assert got.evidence == want.evidence
    assert pair.ranks.checkpoint_bytes() == body
    huge = [[replace(s, reward=s.reward * 1e30) for s in g] for g in pair.groups(1)]
    assert pair.ranks.step(huge, version=1, max_staleness=0).status in ("trained", "skipped")
    pair.ranks.load_checkpoint_bytes(body)
    assert_same_result(*pair.step(1))  # nothing of the lost gradients is left
    pair.assert_same()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_published_weights_are_adopted_whole(group, stage):
    pair = Pair(config_of(stage, train=SMALL), group)
    pair.step(0)
    other = {name: tensor + 0.01 for name, tensor in pair.start.items()}
    for trainer in (pair.one, pair.ranks):
        trainer.adopt_weights(other)
    for name, tensor in pair.ranks.weights("float32").items():
        assert torch.equal(tensor, other[name])
    assert_same_result(*pair.step(1))
    pair.assert_same()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_keeps_float32_masters(group, stage):
    pair = Pair(config_of(stage, train=SMALL), group, torch.bfloat16)
    for version in range(STEPS):
        want, got = pair.step(version)
        assert got.status == "trained"
        assert got.metrics["loss/total"] == pytest.approx(want.metrics["loss/total"], abs=0.02)
    tensors, _ = checkpoint_from_bytes(pair.ranks.checkpoint_bytes())
    published = pair.ranks.weights("bfloat16")
    for name, tensor in published.items():
        assert torch.equal(tensor, tensors[f"weights/{name}"].to(torch.bfloat16))
    assert any((tensors[f"weights/{n}"] != t.float()).any() for n, t in published.items())
    pair.assert_same(atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloaded_optimizer_state_gives_the_same(group, stage):
    pair = Pair(config_of(stage, train=SMALL, offload_optimizer=True), group)
    for version in range(STEPS):
        assert_same_result(*pair.step(version))
    pair.assert_same()


@pytest.mark.slow
def test_one_rank_and_three_go_on_from_the_checkpoint_of_one():
    alone = Pair(config_of(3, train=SMALL, num_processes=1))
    alone.step(0)
    body = alone.ranks.checkpoint_bytes()
    alone.ranks.close()
    three = Pair(config_of(2, train=SMALL, num_processes=3))
    three.ranks.load_checkpoint_bytes(body)
    three.one.load_checkpoint_bytes(body)
    assert_same_result(*three.step(1))
    three.assert_same()
    three.ranks.close()


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused_by_name():
    pair = Pair(config_of(3, num_processes=1))
    other = Trainer(make_model(intermediate_size=64), AlgorithmConfig(), pair.config.train, total_steps=1)
    with pytest.raises(ContractError, match="expected float32"):
        pair.ranks.load_checkpoint_bytes(other.checkpoint_bytes())
