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
    AdaptiveEntropy,
    AdaptiveWeights,
    Advantage,
    AlgorithmConfig,
    ConstantNorm,
    EntropyBonus,
    EssStep,
    EwmaProximal,
    Gdpo,
    Grpo,
    InterpolatedProximal,
    KlPenalty,
    MaskedWeights,
    OffPolicySequenceMask,
    RecomputedProximal,
    Remax,
    RewardKl,
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    SlowFastUpdate,
    SnapshotProximal,
    TruncatedWeights,
    Veto,
)
from data_contracts.config import TrainConfig
from data_contracts.losses import Drpo, Loss, M2po, PpoClip, PpoEwma
from data_contracts.presets import PRESETS
from models.diagnostics import sequence_sample_size
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
        AlgorithmConfig(proximal=RecomputedProximal(), importance=TruncatedWeights(normalize=True)),
        AlgorithmConfig(proximal=RecomputedProximal(), importance=AdaptiveWeights(), loss=PpoClip(dual_clip=2.0)),
        AlgorithmConfig(loss=Drpo(max_length=9, kl_strength=1.0)),
        AlgorithmConfig(regularizers=(KlPenalty(towards="reference", coefficient=0.5, estimator="k1", reweight=True),)),
        AlgorithmConfig.model_validate("minpro"),
        AlgorithmConfig.model_validate("mu_grpo"),
        AlgorithmConfig.model_validate("vcpo"),
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


@pytest.mark.parametrize("preset", PRESETS)
def test_microbatches_of_every_preset_add_up(make_trainer, make_groups, preset):
    groups = [[replace(s, components={"a": s.reward, "b": s.sample % 2}) for s in g] for g in make_groups(6, 3)]
    cfg = AlgorithmConfig.model_validate(preset)
    large, small = (make_trainer(cfg, LINEAR.model_copy(update={"tokens_per_microbatch": n})) for n in (9999, 30))
    groups = on_policy(make_trainer(seed=1).model, groups)  # near enough to be kept, far enough to have ratios
    if isinstance(cfg.advantage, Remax):
        groups = [[*g[:-1], replace(g[-1], temperature=0.0)] for g in groups]
    for trainer in (large, small):
        assert trainer.step(groups, version=0, max_staleness=0).status == "trained"
    for name, tensor in weights(large).items():
        torch.testing.assert_close(weights(small)[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def every_algorithm():
    losses = [AlgorithmConfig(loss=kind()) for kind in get_args(get_args(Loss)[0]) if kind is not PpoEwma]
    advantages = [AlgorithmConfig(advantage=kind()) for kind in get_args(get_args(Advantage)[0])]
    decoupled = [
        AlgorithmConfig(proximal=proximal(), importance=importance)
        for proximal in (RecomputedProximal, InterpolatedProximal)
        for importance in (TruncatedWeights(), MaskedWeights(level="geometric"))
    ]
    presets = [AlgorithmConfig.model_validate(name) for name in PRESETS]
    return [*losses, *advantages, *decoupled, *presets, AlgorithmConfig(filters=(OffPolicySequenceMask(), Veto()))]


@pytest.mark.parametrize(
    "algorithm",
    every_algorithm(),
    ids=lambda a: a.preset or f"{a.advantage.type}-{a.proximal.type}-{a.importance.type}-{a.loss.type}",
)
def test_every_algorithm_trains(make_trainer, make_groups, algorithm):
    version = 2 + (algorithm.value.warmup_steps if algorithm.value else 0)
    groups = [[replace(s, components={"r": s.reward}) for s in g] for g in make_groups(4, 3, version=version - 1)]
    trainer = make_trainer(algorithm, TrainConfig(inner_updates=2))
    if algorithm.value:  # a value model knows nothing at first
        trainer.step(groups, version=0, max_staleness=None)
    before = weights(trainer)
    groups = on_policy(trainer.model, groups)
    if isinstance(algorithm.advantage, Remax):
        groups = [[*g[:-1], replace(g[-1], temperature=0.0)] for g in groups]
    result = trainer.step(groups, version=version, max_staleness=1)
    assert result.status == "trained", result.evidence
    assert result.metrics["optimizer/updates"] == (8 if algorithm.preset == "sfpo" else 2)
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
        ({"temperature": math.nan}, "log-probability is nan at sampled token 0 of ticket 3, sample 1"),
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


def test_the_effective_sample_size_matches_the_reference(reference):
    case = reference("loss.vcpo_lr")
    ratios = case["inputs"]["seq_is_ratio_unclipped"]
    log = torch.tensor(ratios, dtype=torch.float64).log()
    ess = sequence_sample_size(log, torch.ones(3, dtype=torch.bool), torch.arange(3), 3)
    assert ess == pytest.approx(case["expected"]["ess_ratio"])
    base = case["params"]["base_lr"]
    assert base * ess**0.5 == pytest.approx(case["expected"]["lr_sqrt"])


@pytest.mark.parametrize(("rule", "want"), [("sqrt", (2 / 3) ** 0.5), ("linear", 2 / 3)])
def test_a_step_uses_the_smaller_learning_rate(make_trainer, make_groups, rule, want):
    """Weights 1, 1 and 4: effective sample size 36 / (3 * 18)."""
    plain, scaled = make_trainer(), make_trainer(AlgorithmConfig(step_size=EssStep(rule=rule)))
    [group] = make_groups(1, 3, longest=1, tools=False)
    [group] = on_policy(plain.model, [[replace(s, reward=float(i)) for i, s in enumerate(group)]])
    shift = [0.0, 0.0, math.log(4)]
    groups = [[replace(s, behavior_logprobs=s.behavior_logprobs - d) for s, d in zip(group, shift, strict=True)]]
    before = weights(plain)
    one, other = (t.step(groups, version=0, max_staleness=0) for t in (plain, scaled))
    assert other.metrics["optimizer/rate_factor"] == pytest.approx(want, rel=1e-4)
    assert other.metrics["optimizer/learning_rate"] == pytest.approx(want * 3e-4, rel=1e-4)
    assert one.metrics["optimizer/rate_factor"] == 1
    for name, tensor in before.items():
        moved, less = weights(plain)[name] - tensor, weights(scaled)[name] - tensor
        torch.testing.assert_close(less, moved * want, rtol=1e-2, atol=1e-7, msg=name)


def test_averaged_weights_are_the_debiased_average_of_all_weights(make_trainer, make_groups):
    trainer = make_trainer(AlgorithmConfig.model_validate("ppo_ewma"))
    seen = [weights(trainer)]
    for version in range(3):
        trainer.step(make_groups(seed=version), version=version, max_staleness=None)
        seen.append(weights(trainer))
    tensors, _ = trainer.checkpoint_state()
    share = [0.9**3, 0.9**2, 0.9, 1.0]
    for name in seen[0]:
        want = sum(w * s[name] for w, s in zip(share, seen, strict=True)) / sum(share)
        torch.testing.assert_close(tensors[f"memory/average/{name}"], want, rtol=1e-5, atol=1e-6)


def test_the_proximal_policy_is_that_of_the_average_or_of_an_earlier_version(make_trainer, make_groups):
    for proximal in (EwmaProximal(decay=0.9), SnapshotProximal(lag=2)):
        cfg = AlgorithmConfig(proximal=proximal, importance=TruncatedWeights())
        trainer = make_trainer(cfg, TrainConfig(learning_rate=3e-3))
        moved = [
            trainer.step(make_groups(seed=v), version=v, max_staleness=None).metrics["policy/kl_proximal"]
            for v in range(4)
        ]
        assert moved[0] == pytest.approx(0, abs=1e-9)
        assert min(moved[1:]) > 1e-7


def test_a_snapshot_is_the_exact_earlier_version(make_trainer, make_groups, make_model):
    trainer = make_trainer(AlgorithmConfig(proximal=SnapshotProximal(lag=2), importance=TruncatedWeights()))
    old = []
    for version in range(4):
        old.append(weights(trainer))
        trainer.step(make_groups(seed=version), version=version, max_staleness=None)
    tensors, _ = trainer.checkpoint_state()
    kept = sorted({int(name.split("/")[2]) for name in tensors if name.startswith("memory/snapshot/")})
    assert kept == [1, 2, 3]
    for name, tensor in old[1].items():
        assert torch.equal(tensors[f"memory/snapshot/1/{name}"], tensor)


REMEMBERING = [
    AlgorithmConfig.model_validate("ppo_ewma"),
    AlgorithmConfig.model_validate("sfpo"),
    AlgorithmConfig(proximal=SnapshotProximal(lag=2), importance=TruncatedWeights()),
    AlgorithmConfig(regularizers=(AdaptiveEntropy(target=10.0),)),
    AlgorithmConfig(reward_kl=RewardKl(coefficient=0.1)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", REMEMBERING, ids=lambda a: a.preset or a.proximal.type)
def test_what_is_remembered_survives_a_restart_bit_for_bit(make_trainer, make_groups, algorithm, dtype):
    straight, first = make_trainer(algorithm, dtype=dtype), make_trainer(algorithm, dtype=dtype)
    for version in range(3):
        for trainer in (straight, first):
            trainer.step(make_groups(seed=version), version=version, max_staleness=None)
    other = make_trainer(algorithm, dtype=dtype)  # made from version 0, as a restart makes it
    other.load_checkpoint(*checkpoint_from_bytes(bits(first)))
    for version in range(3, 5):
        for trainer in (straight, other):
            trainer.step(make_groups(seed=version), version=version, max_staleness=None)
    assert bits(straight) == bits(other)


@pytest.mark.parametrize("algorithm", REMEMBERING, ids=lambda a: a.preset or a.proximal.type)
def test_a_skipped_step_is_not_remembered(make_trainer, make_groups, algorithm):
    trainer = make_trainer(algorithm)
    trainer.step(make_groups(), version=0, max_staleness=None)
    before = (
        {n: t.clone() for n, t in trainer.checkpoint_state()[0].items() if "/average/" in n},
        trainer._memory.scalars(),
    )
    result = trainer.step(spoil(make_groups(seed=1), 3, reward=math.nan), version=1, max_staleness=None)
    assert result.status == "skipped"
    after = trainer.checkpoint_state()[0]
    assert all(torch.equal(after[name], tensor) for name, tensor in before[0].items())
    assert trainer._memory.scalars() == before[1]


def test_other_weights_leave_the_model_as_it_was(make_trainer, make_groups):
    trainer = make_trainer(AlgorithmConfig(regularizers=(KlPenalty(towards="reference", coefficient=0.1),)))
    own = {name: p.data_ptr() for name, p in trainer.model.named_parameters()}
    for version in range(2):
        trainer.step(make_groups(seed=version), version=version, max_staleness=None)
    assert {name: p.data_ptr() for name, p in trainer.model.named_parameters()} == own


def test_the_pull_towards_version_zero_keeps_weights_near_it(make_trainer, make_groups):
    def distance(coefficient):
        pull = KlPenalty(towards="reference", coefficient=coefficient)
        trainer = make_trainer(AlgorithmConfig(regularizers=(pull,)), TrainConfig(learning_rate=3e-3))
        groups = on_policy(trainer.model, make_groups(tools=False))
        with torch.no_grad():
            start = [packed_logprobs(trainer.model, pack(g))[0] for g in groups]
        for version in range(6):
            trainer.step(groups, version=version, max_staleness=None)
        with torch.no_grad():
            return sum(
                (packed_logprobs(trainer.model, pack(g))[0] - s).pow(2).sum().item()
                for g, s in zip(groups, start, strict=True)
            )

    assert distance(20.0) < 0.5 * distance(1e-6)


def test_a_divergence_in_the_reward_is_taken_off_before_the_baseline(make_trainer, make_groups):
    cfg = AlgorithmConfig(advantage=Grpo(std="none"), reward_kl=RewardKl(coefficient=0.5))
    trainer = make_trainer(cfg)
    groups = make_groups(2, 3, tools=False)
    result = trainer.step(groups, version=0, max_staleness=0)
    model = make_trainer().model
    with torch.no_grad():
        logp = [packed_logprobs(model, pack([s]))[0] for g in groups for s in g]
    kl = [
        float((torch.from_numpy(s.behavior_logprobs) - x).sum())
        for s, x in zip((s for g in groups for s in g), logp, strict=True)
    ]
    assert result.metrics["reward/kl"] == pytest.approx(sum(kl) / 6, rel=1e-4)
    shaped = [
        [replace(s, reward=s.reward - 0.5 * kl[3 * i + j]) for j, s in enumerate(g)] for i, g in enumerate(groups)
    ]
    other = make_trainer(AlgorithmConfig(advantage=Grpo(std="none")))
    other.step(shaped, version=0, max_staleness=0)
    for name, tensor in weights(other).items():
        torch.testing.assert_close(weights(trainer)[name], tensor, rtol=1e-4, atol=2e-6, msg=name)
    assert result.metrics["reward/mean"] == pytest.approx(sum(s.reward for g in groups for s in g) / 6)


def test_the_entropy_coefficient_follows_the_entropy(make_trainer, make_groups):
    rising = make_trainer(AlgorithmConfig(regularizers=(AdaptiveEntropy(target=10.0, change=0.1, largest=0.25),)))
    seen, spent = [], []
    for version in range(4):
        metrics = rising.step(make_groups(seed=version), version=version, max_staleness=None).metrics
        seen.append(metrics["optimizer/entropy_coefficient"])
        spent.append(metrics["loss/regularizers"] / metrics["policy/entropy"])
    assert seen == pytest.approx([0.1, 0.2, 0.25, 0.25])
    assert spent == pytest.approx([0.0, -0.1, -0.2, -0.25], rel=1e-4, abs=1e-9)  # that of the step before
    falling = make_trainer(AlgorithmConfig(regularizers=(AdaptiveEntropy(target=1e-6),)))
    metrics = falling.step(make_groups(), version=0, max_staleness=None).metrics
    assert metrics["optimizer/entropy_coefficient"] == 0


def test_fast_steps_are_taken_back_in_part(make_trainer, make_groups):
    groups = make_groups()
    cfg = AlgorithmConfig(update=SlowFastUpdate(fast_steps=2, keep=0.5))
    trainer, plain = make_trainer(cfg), make_trainer()
    result = trainer.step(groups, version=0, max_staleness=0)
    assert result.metrics["optimizer/updates"] == 3
    start = weights(plain)
    for _ in range(2):
        plain.step(groups, version=0, max_staleness=0)
    middle = {name: start[name] + 0.5 * (tensor - start[name]) for name, tensor in weights(plain).items()}
    with torch.no_grad():
        for name, parameter in plain.model.named_parameters():
            parameter.copy_(middle[name])
    plain.step(groups, version=0, max_staleness=0)
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(trainer)[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_a_gdpo_step_without_components_is_refused(make_trainer, make_groups):
    from data_contracts.errors import ContractError

    with pytest.raises(ContractError, match="gdpo"):
        make_trainer(AlgorithmConfig(advantage=Gdpo())).step(make_groups(), version=0, max_staleness=0)
