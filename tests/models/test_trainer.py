import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from data_contracts.algorithm import (
    Advantage,
    AlgorithmConfig,
    ConstantNorm,
    EntropyBonus,
    Gdpo,
    Grpo,
    InterpolatedProximal,
    KlPenalty,
    Loss,
    M2po,
    MaskedWeights,
    OffPolicySequenceMask,
    PpoClip,
    RecomputedProximal,
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    TruncatedWeights,
    Veto,
)
from data_contracts.config import TrainConfig
from models.packing import pack, packed_logprobs
from models.trainer import Trainer, checkpoint_from_bytes, checkpoint_to_bytes

LINEAR = TrainConfig(eps=1e3, learning_rate=1e3, max_grad_norm=1e9)
"""AdamW whose first update is nearly proportional to the gradient, so that weights show it."""


@pytest.fixture
def make_trainer(make_model):
    def build(algorithm=None, train=None, **model):
        return Trainer(make_model(**model), algorithm or AlgorithmConfig(), train or TrainConfig(), total_steps=10)

    return build


def bits(trainer):
    return checkpoint_to_bytes(*trainer.checkpoint_state())


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def on_policy(model, groups):
    """Give samples the log-probabilities that the model itself computes."""
    out = []
    for group in groups:
        with torch.no_grad():
            found = packed_logprobs(model, pack(group))[0].split([int(s.action_mask.sum()) for s in group])
        row = []
        for sample, logp in zip(group, found, strict=True):
            behavior = np.full(len(sample.response_ids), np.nan, np.float32)
            behavior[sample.action_mask] = logp.numpy()
            row.append(replace(sample, behavior_logprobs=behavior))
        out.append(row)
    return out


def test_a_step_equals_the_plain_padded_computation(make_model, make_groups):
    groups = make_groups(4, 3)
    model = make_model()
    trainer = Trainer(make_model(), AlgorithmConfig(), TrainConfig(max_grad_norm=0.5), total_steps=10)
    result = trainer.step(groups, version=0, max_staleness=0)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    total, tokens = torch.zeros(()), 0
    for group in groups:
        rewards = torch.tensor([s.reward for s in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for sample, advantage in zip(group, advantages, strict=True):
            ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64))[None]
            logits = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
            logp = logits.log_softmax(-1).gather(1, ids[0, len(sample.prompt_ids) :, None])[:, 0]
            acted = torch.from_numpy(sample.action_mask)
            ratio = (logp[acted] - torch.from_numpy(sample.behavior_logprobs)[acted]).exp()
            total = total + torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28)).sum()
            tokens += int(acted.sum())
    (total / tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()

    assert result.status == "trained"
    assert result.num_tokens == tokens
    assert result.metrics["loss/policy"] == pytest.approx((total / tokens).item(), abs=1e-5)
    assert result.metrics["optimizer/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights(trainer)[name], parameter, rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(),
        AlgorithmConfig(aggregation=SequenceMeanTokenMean()),
        AlgorithmConfig(aggregation=SequenceMeanTokenSum(count_empty=True)),
        AlgorithmConfig(aggregation=ConstantNorm(length=9), regularizers=(EntropyBonus(coefficient=0.5),)),
        AlgorithmConfig(loss=M2po(floor_low=1e-3, floor_high=1e-3)),
        AlgorithmConfig(loss=M2po(), regularizers=(EntropyBonus(coefficient=0.5), KlPenalty(coefficient=0.5))),
        AlgorithmConfig(proximal=RecomputedProximal(), importance=TruncatedWeights(level="sequence")),
    ],
    ids=lambda a: f"{a.loss.type}-{a.aggregation.type}-{a.importance.type}",
)
def test_microbatches_add_up_to_one_large_batch(make_trainer, make_groups, algorithm):
    groups = make_groups(6, 3)
    large, small = (make_trainer(algorithm, LINEAR.model_copy(update={"tokens_per_microbatch": n})) for n in (9999, 30))
    before = weights(large)
    one, many = (t.step(groups, version=0, max_staleness=0) for t in (large, small))
    assert many.metrics["train/packed_tokens"] >= one.metrics["train/packed_tokens"]
    for name in ("loss/total", "optimizer/grad_norm", "loss/clip_fraction_low", "policy/entropy"):
        assert many.metrics[name] == pytest.approx(one.metrics[name], rel=1e-4, abs=1e-6), name
    moved = 0.0
    for name, tensor in weights(large).items():
        torch.testing.assert_close(weights(small)[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
        moved += (tensor - before[name]).abs().max().item()
    assert moved > 1e-2


def every_algorithm():
    losses = [AlgorithmConfig(loss=kind()) for kind in get_args(get_args(Loss)[0])]
    advantages = [AlgorithmConfig(advantage=kind()) for kind in get_args(get_args(Advantage)[0])]
    decoupled = [
        AlgorithmConfig(proximal=proximal(), importance=importance)
        for proximal in (RecomputedProximal, InterpolatedProximal)
        for importance in (TruncatedWeights(), MaskedWeights(level="geometric"))
    ]
    return [*losses, *advantages, *decoupled, AlgorithmConfig(filters=(OffPolicySequenceMask(), Veto()))]


@pytest.mark.parametrize(
    "algorithm",
    every_algorithm(),
    ids=lambda a: f"{a.advantage.type}-{a.proximal.type}-{a.importance.type}-{a.loss.type}",
)
def test_every_algorithm_trains(make_trainer, make_groups, algorithm):
    groups = [[replace(s, components={"r": s.reward}) for s in g] for g in make_groups(4, 3, version=1)]
    trainer = make_trainer(algorithm, TrainConfig(inner_updates=2))
    before = weights(trainer)
    result = trainer.step(groups, version=2, max_staleness=1)
    assert result.status == "trained", result.evidence
    assert result.metrics["optimizer/updates"] == 2
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


def test_good_answers_become_likelier(make_trainer, make_groups):
    trainer = make_trainer(train=TrainConfig(learning_rate=3e-3))
    groups = [[replace(s, reward=float(i == 0)) for i, s in enumerate(g)] for g in make_groups(4, 3, tools=False)]

    def logp_of_good():
        with torch.no_grad():
            return sum(packed_logprobs(trainer.model, pack(g[:1]))[0].sum().item() for g in groups)

    before = logp_of_good()
    for version in range(5):
        trainer.step(on_policy(trainer.model, groups), version=version, max_staleness=None)
    assert logp_of_good() > before + 1


def test_the_same_input_gives_the_same_bits(make_trainer, make_groups):
    one, other = make_trainer(), make_trainer()
    for version in range(3):
        groups = make_groups(seed=version)
        first = one.step(groups, version=version, max_staleness=None).metrics
        second = other.step(groups, version=version, max_staleness=None).metrics
        timed = {"train/step_s", "train/tokens_per_s"}
        assert {k: v for k, v in first.items() if k not in timed} == {k: v for k, v in second.items() if k not in timed}
    assert bits(one) == bits(other)


CONTINUE = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("conftest_of_models", sys.argv[1])
shared = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shared)
from data_contracts.algorithm import AlgorithmConfig, RecomputedProximal
from data_contracts.config import TrainConfig
from models.trainer import Trainer, checkpoint_from_bytes, checkpoint_to_bytes
make_model, make_groups = shared.make_model.__wrapped__(), shared.make_groups.__wrapped__()
train = TrainConfig(schedule="cosine", warmup_steps=2, inner_updates=2, weight_decay=0.1)
trainer = Trainer(make_model(seed=5), AlgorithmConfig(proximal=RecomputedProximal()), train, total_steps=10)
trainer.load_checkpoint(*checkpoint_from_bytes(Path(sys.argv[2]).read_bytes()))
for version in range(3, 6):
    trainer.step(make_groups(seed=version), version=version, max_staleness=None)
Path(sys.argv[2]).write_bytes(checkpoint_to_bytes(*trainer.checkpoint_state()))
"""


def test_a_new_process_continues_from_a_checkpoint_bit_for_bit(make_trainer, make_groups, tmp_path):
    train = TrainConfig(schedule="cosine", warmup_steps=2, inner_updates=2, weight_decay=0.1)
    trainer = make_trainer(AlgorithmConfig(proximal=RecomputedProximal()), train)
    path = tmp_path / "checkpoint"
    for version in range(6):
        if version == 3:
            path.write_bytes(bits(trainer))
        trainer.step(make_groups(seed=version), version=version, max_staleness=None)
    conftest = Path(__file__).with_name("conftest.py")
    subprocess.run([sys.executable, "-c", CONTINUE, conftest, path], check=True, cwd=Path(__file__).parents[2])
    assert path.read_bytes() == bits(trainer)


def test_loading_a_checkpoint_also_sets_bfloat16_weights(make_trainer, make_groups):
    trainer = make_trainer(dtype=torch.bfloat16)
    trainer.step(make_groups(), version=0, max_staleness=0)
    other = make_trainer(seed=3, dtype=torch.bfloat16)
    other.load_checkpoint(*checkpoint_from_bytes(bits(trainer)))
    assert all(torch.equal(t, weights(trainer)[n]) for n, t in weights(other).items())
    for t in (trainer, other):
        t.step(make_groups(seed=1), version=1, max_staleness=None)
    assert bits(trainer) == bits(other)


def spoil(groups, ticket, **changes):
    return [[replace(s, **changes) if (s.ticket, s.sample) == (ticket, 1) else s for s in g] for g in groups]


@pytest.mark.parametrize("inner_updates", [1, 2])
@pytest.mark.parametrize(
    ("changes", "evidence"),
    [
        ({"reward": math.nan}, "advantage is nan at sampled token 0 of ticket 3, sample 0"),
        ({"reward": math.inf}, "advantage is nan at sampled token 0 of ticket 3, sample 0"),
        (
            {"behavior_logprobs": np.full(9, np.nan)},
            "behavior log-probability is nan at sampled token 0 of ticket 3, sample 1",
        ),
        ({"temperature": 0.0}, "log-probability is nan at sampled token 0 of ticket 3, sample 1"),
    ],
)
def test_a_step_that_is_not_finite_changes_no_bit_and_says_why(
    make_trainer, make_groups, inner_updates, changes, evidence
):
    trainer = make_trainer(train=TrainConfig(inner_updates=inner_updates))
    trainer.step(make_groups(seed=1), version=0, max_staleness=None)
    before = bits(trainer)
    groups = [
        [replace(s, response_ids=np.ones(9, int), action_mask=np.ones(9, bool), behavior_logprobs=np.full(9, -1.0),
                 policy_versions=np.zeros(9, int), reward=float(s.sample)) for s in g]
        for g in make_groups()
    ]  # fmt: skip
    result = trainer.step(spoil(groups, 3, **changes), version=1, max_staleness=None)
    assert result.status == "skipped"
    assert evidence in result.evidence
    assert bits(trainer) == before
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert trainer.step(groups, version=2, max_staleness=None).status == "trained"


def test_an_overflowing_gradient_is_skipped(make_trainer, make_groups):
    trainer = make_trainer(AlgorithmConfig(advantage=Grpo(std="none")))
    before = bits(trainer)
    groups = [[replace(s, reward=s.reward * 3e37) for s in g] for g in make_groups()]
    result = trainer.step(groups, version=0, max_staleness=0)
    assert result.status == "skipped"
    assert "gradient" in result.evidence
    assert bits(trainer) == before


def test_weights_that_would_overflow_are_rolled_back(make_trainer, make_groups):
    trainer = make_trainer(train=TrainConfig(learning_rate=3e38, weight_decay=1.0))
    before = bits(trainer)
    result = trainer.step(make_groups(), version=0, max_staleness=0)
    assert result.status == "skipped"
    assert "weights are not finite after the update" in result.evidence
    assert bits(trainer) == before


def test_tokens_that_are_too_old_leave_the_loss_and_are_counted(make_trainer, make_groups):
    old, fresh = make_groups(2, 3, version=0, tools=False), make_groups(2, 3, seed=1, version=2, tools=False)
    one, other = make_trainer(), make_trainer()
    result = one.step([*old, *fresh], version=2, max_staleness=1)
    assert result.metrics["staleness/excluded_tokens"] == sum(len(s.response_ids) for g in old for s in g)
    assert result.metrics["staleness/max"] == 0
    assert set(result.histograms["staleness/tokens"]) == {"0", "2"}
    strange = [[replace(s, behavior_logprobs=s.behavior_logprobs - 3) for s in g] for g in old]
    other.step([*strange, *fresh], version=2, max_staleness=1)
    assert bits(one) == bits(other)


def test_old_tokens_stay_as_context(make_trainer, make_groups):
    [[sample, *_]] = make_groups(1, 2, tools=False, longest=1)
    build = lambda first: replace(  # noqa: E731
        sample,
        response_ids=np.array([first, 5]),
        action_mask=np.ones(2, bool),
        behavior_logprobs=np.full(2, -1.0, np.float32),
        policy_versions=np.array([0, 3]),
        reward=1.0,
    )
    other = replace(build(7), reward=0.0, sample=1)
    moved = []
    for first in (3, 4):
        trainer = make_trainer(train=LINEAR)
        assert trainer.step([[build(first), other]], version=3, max_staleness=0).num_tokens == 2
        moved.append(weights(trainer)["model.embed_tokens.weight"])
    assert not torch.allclose(moved[0], moved[1])


@pytest.mark.parametrize("reason", ["stale", "truncated", "no groups"])
def test_a_step_without_a_token_in_the_loss_changes_nothing(make_trainer, make_groups, reason):
    trainer = make_trainer(AlgorithmConfig(truncated="mask"))
    trainer.step(make_groups(), version=0, max_staleness=0)
    before = bits(trainer)
    groups = [] if reason == "no groups" else make_groups(2, 2)
    if reason == "truncated":
        groups = [[replace(s, finish_reason="length") for s in g] for g in groups]
    result = trainer.step(groups, version=5, max_staleness=0 if reason == "stale" else None)
    assert (result.status, result.num_tokens, result.metrics["optimizer/updates"]) == ("trained", 0, 0.0)
    assert bits(trainer) == before


def test_groups_without_contrast_leave_fresh_weights_alone(make_trainer, make_groups):
    trainer = make_trainer()
    before = weights(trainer)
    result = trainer.step([[replace(s, reward=0.1) for s in g] for g in make_groups()], version=0, max_staleness=0)
    assert result.metrics["reward/zero_variance_groups"] == 1.0
    assert result.metrics["optimizer/grad_norm"] == 0.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


@pytest.mark.parametrize("inner_updates", [1, 3])
def test_the_recomputed_policy_is_that_of_the_steps_start(make_trainer, make_groups, inner_updates):
    cfg = TrainConfig(inner_updates=inner_updates, learning_rate=3e-3)
    trainer = make_trainer(AlgorithmConfig(proximal=RecomputedProximal(), importance=TruncatedWeights()), cfg)
    metrics = trainer.step(make_groups(6, 3), version=0, max_staleness=0).metrics
    assert metrics["optimizer/updates"] == inner_updates
    assert (metrics["policy/kl_proximal"] > 1e-6) == (inner_updates > 1)
    assert metrics["policy/kl_behavior"] > 1e-3


def test_inner_updates_are_updates_on_parts_of_the_groups(make_trainer, make_groups):
    groups = make_groups(5, 3)
    one, other = make_trainer(train=TrainConfig(inner_updates=2)), make_trainer()
    one.step(groups, version=0, max_staleness=0)
    for part in (groups[:2], groups[2:]):
        other.step(part, version=0, max_staleness=0)
    assert bits(one) == bits(other)


def test_mismatch_is_nothing_when_sampler_and_trainer_agree(make_trainer, make_groups):
    trainer = make_trainer()
    metrics = trainer.step(on_policy(trainer.model, make_groups()), version=0, max_staleness=0).metrics
    assert metrics["policy/mismatch_k3"] == pytest.approx(0, abs=1e-8)
    assert metrics["policy/ess_token"] == pytest.approx(1, abs=1e-6)
    assert metrics["policy/mismatch_tokens"] == metrics["train/tokens"]


def test_importance_weights_scale_the_loss(make_trainer, make_groups):
    groups = make_groups()
    halved = [[replace(s, behavior_logprobs=s.behavior_logprobs - math.log(0.5)) for s in g] for g in groups]
    cfg = AlgorithmConfig(proximal=RecomputedProximal(), importance=TruncatedWeights(cap=1e9), loss=PpoClip())
    one, other = make_trainer(cfg, LINEAR), make_trainer(cfg, LINEAR)
    full = one.step(groups, version=0, max_staleness=0).metrics
    half = other.step(halved, version=0, max_staleness=0).metrics
    for name in ("loss/policy", "loss/weight_mean", "optimizer/grad_norm"):
        assert half[name] == pytest.approx(full[name] / 2, rel=1e-4)


def test_a_gdpo_step_without_components_is_refused(make_trainer, make_groups):
    from data_contracts.errors import ContractError

    with pytest.raises(ContractError, match="gdpo"):
        make_trainer(AlgorithmConfig(advantage=Gdpo())).step(make_groups(), version=0, max_staleness=0)
