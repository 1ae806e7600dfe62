import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from data_contracts.algorithm import AlgorithmConfig
from data_contracts.config import TrainConfig
from data_contracts.errors import ContractError
from models.critic import Critic, explained_variance, value_loss
from models.digest import weights_digest
from models.plan import plan_updates
from models.policy import copy_weights
from models.step import step_data
from models.trainer import Trainer, checkpoint_from_bytes, checkpoint_to_bytes

GAE = AlgorithmConfig.model_validate("ppo_gae")
DVPO = AlgorithmConfig.model_validate({"preset": "dvpo", "advantage": {"value": {"warmup_steps": 2}}})
SAO = AlgorithmConfig.model_validate({"preset": "sao_value", "advantage": {"value": {"warmup_steps": 1}}})
OWN = AlgorithmConfig.model_validate(
    {"preset": "ppo_gae", "advantage": {"value": {"trunk": "own", "learning_rate": 3e-3, "updates": 2}}}
)
OF_VERSION_0 = AlgorithmConfig.model_validate(
    {"preset": "dvpo", "advantage": {"value": {"trunk": "policy", "warmup_steps": 2}}}
)
VALUED = [GAE, OWN, DVPO, OF_VERSION_0, SAO]


@pytest.fixture
def make_trainer(make_model):
    def build(algorithm=GAE, train=None, **model):
        return Trainer(make_model(**model), algorithm, train or TrainConfig(), total_steps=10)

    return build


def bits(trainer):
    return checkpoint_to_bytes(*trainer.checkpoint_state())


def critic_of(trainer):
    tensors, _ = trainer.checkpoint_state()
    return {name: t.clone() for name, t in tensors.items() if name.startswith("critic/weights/")}


def test_the_value_loss_takes_the_worse_of_plain_and_clipped():
    values = torch.tensor([0.9, 0.2, -0.8], requires_grad=True)
    old, wanted = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 1.0])
    loss = value_loss(values, wanted, old, 0.5, 3)
    # 0.9 is cut to 0.5, which is the larger error and has no gradient; -0.8 is further off than its clipped -0.5
    assert loss.item() == pytest.approx(0.5 * (0.25 + 0.64 + 3.24) / 3)
    loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -0.8 / 3, -1.8 / 3])
    assert value_loss(values, wanted, old, None, 3).item() == pytest.approx(0.5 * (0.01 + 0.64 + 3.24) / 3)


def test_explained_variance_is_one_for_right_values_and_none_without_variance():
    wanted = torch.tensor([0.0, 1.0, 1.0])
    assert explained_variance(wanted, wanted) == 1
    assert explained_variance(torch.zeros(3), wanted) == 0
    assert explained_variance(torch.ones(3), torch.ones(3)) == 0
    assert explained_variance(wanted[:0], wanted[:0]) == 0


def by_length(groups):
    """Reward what can be seen from the first token on: whether it is large."""
    return [[replace(s, reward=float(s.response_ids[0] > 11)) for s in g] for g in groups]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", [GAE, OWN], ids=lambda a: a.value.trunk)
def test_values_come_to_explain_returns(make_trainer, make_groups, algorithm, dtype):
    trainer = make_trainer(algorithm, dtype=dtype)
    groups = by_length(make_groups(8, 4, tools=False))
    seen = [trainer.step(groups, version=v, max_staleness=None).metrics for v in range(40)]
    assert seen[0]["critic/explained_variance"] == 0
    assert seen[-1]["critic/explained_variance"] > 0.5
    assert seen[-1]["critic/loss"] < 0.5 * seen[0]["critic/loss"]


def test_the_policy_gets_no_gradient_from_values_and_publishes_none(make_trainer, make_groups):
    one = make_trainer(GAE)
    faster = {"preset": "ppo_gae", "advantage": {"value": {"learning_rate": 0.3, "updates": 1}}}
    other = make_trainer(AlgorithmConfig.model_validate(faster))
    for trainer in (one, other):
        trainer.step(make_groups(), version=0, max_staleness=0)
    digests = [weights_digest(copy_weights(t.model)) for t in (one, other)]
    assert digests[0] == digests[1]
    assert critic_of(one).keys() == critic_of(other).keys()
    assert any(not torch.equal(t, critic_of(other)[name]) for name, t in critic_of(one).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", VALUED, ids=lambda a: f"{a.preset}-{a.value.trunk}")
def test_a_restart_continues_bit_for_bit(make_trainer, make_groups, algorithm, dtype):
    train = TrainConfig(inner_updates=2)
    straight, first = (make_trainer(algorithm, train, dtype=dtype) for _ in range(2))
    for version in range(3):
        for trainer in (straight, first):
            assert trainer.step(make_groups(seed=version), version=version, max_staleness=None).status == "trained"
    other = make_trainer(algorithm, train, dtype=dtype)  # made from version 0, as a restart makes it
    other.load_checkpoint(*checkpoint_from_bytes(bits(first)))
    for version in range(3, 5):
        for trainer in (straight, other):
            trainer.step(make_groups(seed=version), version=version, max_staleness=None)
    assert bits(straight) == bits(other)


@pytest.mark.parametrize("algorithm", VALUED, ids=lambda a: f"{a.preset}-{a.value.trunk}")
def test_a_skipped_step_changes_no_bit_of_the_values(make_trainer, make_groups, algorithm):
    trainer = make_trainer(algorithm)
    for version in range(3):
        trainer.step(make_groups(), version=version, max_staleness=None)
    before = bits(trainer)
    groups = make_groups(seed=1)
    groups[0][0] = replace(groups[0][0], reward=math.nan, behavior_logprobs=groups[0][0].behavior_logprobs * np.nan)
    assert trainer.step(groups, version=3, max_staleness=None).status == "skipped"
    assert bits(trainer) == before


@pytest.mark.parametrize("algorithm", VALUED, ids=lambda a: f"{a.preset}-{a.value.trunk}")
def test_microbatches_do_not_change_what_values_learn(make_trainer, make_groups, algorithm):
    large, small = (make_trainer(algorithm, TrainConfig(tokens_per_microbatch=n)) for n in (9999, 30))
    for trainer in (large, small):
        trainer.step(make_groups(6, 3), version=0, max_staleness=None)
    for name, tensor in critic_of(large).items():
        torch.testing.assert_close(critic_of(small)[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("algorithm", [DVPO, OF_VERSION_0], ids=lambda a: a.value.trunk)
def test_the_policy_waits_while_values_are_fitted_and_frozen_values_stay(make_trainer, make_groups, algorithm):
    trainer = make_trainer(algorithm)
    start = weights_digest(copy_weights(trainer.model))
    for version in range(2):
        result = trainer.step(make_groups(seed=version), version=version, max_staleness=None)
        assert result.status == "trained"
        assert result.metrics["optimizer/updates"] == 0
        assert result.metrics["policy/ratio_mean"] > 0
        assert result.metrics["policy/entropy"] > 0
        assert weights_digest(copy_weights(trainer.model)) == start
    fitted = critic_of(trainer)
    result = trainer.step(make_groups(seed=2), version=2, max_staleness=None)
    assert result.metrics["optimizer/updates"] == 1
    assert weights_digest(copy_weights(trainer.model)) != start
    assert all(torch.equal(t, fitted[name]) for name, t in critic_of(trainer).items())


@pytest.mark.parametrize("algorithm", [DVPO, OF_VERSION_0], ids=lambda a: a.value.trunk)
def test_frozen_values_look_at_version_0_and_at_the_token(make_trainer, make_groups, algorithm):
    trainer = make_trainer(algorithm)
    groups = make_groups(2, 3, tools=False, longest=1)  # one token each: same state within a group
    for version in range(2):
        trainer.step(groups, version=version, max_staleness=None)

    def values(step_trainer):
        seen, plain = {}, step_trainer._critic.values
        step_trainer._critic.values = lambda *given: seen.setdefault("values", plain(*given))
        step_trainer.step(groups, version=2, max_staleness=None)
        step_trainer._critic.values = plain
        return seen["values"]

    first = values(trainer)
    assert len(first[:3].unique()) == len({int(s.response_ids[0]) for s in groups[0]})
    assert torch.equal(values(trainer), first)  # the policy has moved since, version 0 has not


def test_one_sample_of_a_prompt_is_enough(make_trainer, make_groups):
    trainer = make_trainer()
    before = weights_digest(copy_weights(trainer.model))
    result = trainer.step(make_groups(6, 1), version=0, max_staleness=0)
    assert result.status == "trained"
    assert weights_digest(copy_weights(trainer.model)) != before


def test_a_step_without_a_token_in_the_loss_teaches_nothing(make_trainer, make_groups):
    trainer = make_trainer()
    before = bits(trainer)
    assert trainer.step(make_groups(version=0), version=5, max_staleness=1).status == "trained"
    assert bits(trainer) == before


def test_a_divergence_in_the_reward_is_taken_off_where_it_is(make_trainer, make_groups):
    cfg = GAE.model_copy(update={"reward_kl": AlgorithmConfig.model_validate("reinforce_pp").reward_kl})
    trainer = make_trainer(AlgorithmConfig.model_validate(cfg.model_dump()))
    result = trainer.step(make_groups(), version=0, max_staleness=0)
    assert result.status == "trained"
    assert "reward/kl" in result.metrics


def test_a_checkpoint_without_values_is_refused(make_trainer, make_groups):
    plain = make_trainer(AlgorithmConfig())
    with pytest.raises(ContractError, match="checkpoint"):
        make_trainer(GAE).load_checkpoint(*checkpoint_from_bytes(bits(plain)))


def test_a_critic_needs_an_algorithm_with_values(make_model):
    with pytest.raises(ValueError, match="grpo"):
        Critic(AlgorithmConfig(), make_model())


@pytest.mark.parametrize("trunk", ["own", "policy"])
def test_the_value_of_an_action_is_read_where_it_leads(make_model, make_groups, trunk):
    """Hidden states are those of a plain forward pass at the token itself, also of the last one."""
    algorithm = AlgorithmConfig.model_validate({"preset": "dvpo", "advantage": {"value": {"trunk": trunk}}})
    model = make_model()
    critic = Critic(algorithm, model)
    data = step_data(make_groups(2, 3), algorithm, version=0, max_staleness=None)
    parts = [p for u in plan_updates(data, inner_updates=1, tokens_per_microbatch=20) for p in u.parts]
    critic.begin_step(data, model)
    if trunk == "policy":
        critic.look(model, parts)
    for part in parts:
        got = critic._features(part)
        want = []
        for sample in (data.samples[i] for i in part.members):
            ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64))[None]
            hidden = make_model().base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
            want.append(hidden[len(sample.prompt_ids) + torch.from_numpy(np.flatnonzero(sample.action_mask))])
        torch.testing.assert_close(got, torch.cat(want), rtol=1e-3, atol=1e-4)
