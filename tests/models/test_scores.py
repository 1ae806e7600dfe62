from dataclasses import replace

import numpy as np
import pytest
import torch

from data_contracts.algorithm import AlgorithmConfig
from data_contracts.config import TrainConfig
from models.objective import Objective
from models.plan import plan_updates
from models.scores import score_weights, token_scores
from models.step import step_data
from models.trainer import Trainer


def test_weights_are_squared_gradient_norms_times_squared_ratios(make_model, make_groups):
    groups = make_groups(2, 2)
    groups[1][1] = replace(groups[1][1], policy_versions=np.where(groups[1][1].action_mask, -9, -1))  # too old
    model = make_model()
    data = step_data(groups, AlgorithmConfig.model_validate("vcpo_opob"), version=0, max_staleness=3)
    got = score_weights(model, data)
    plain = make_model()
    for i, sample in enumerate(data.samples[:3]):
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64))[None]
        logits = plain(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
        logp = logits.log_softmax(-1).gather(1, ids[0, len(sample.prompt_ids) :, None])[:, 0]
        acted = torch.from_numpy(sample.action_mask)
        plain.zero_grad()
        logp[acted].sum().backward()
        norm = sum(p.grad.pow(2).sum().item() for p in plain.parameters())
        log = (logp.detach()[acted] - torch.from_numpy(sample.behavior_logprobs)[acted]).sum().item()
        assert got[i].item() == pytest.approx(norm * np.exp(2 * max(min(log, 20), -20)), rel=1e-3)
    assert got[3] == 0


def plain_logits(model, sample):
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64))[None]
    return model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1] / sample.temperature


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_tokens_score_is_the_squared_gradient_of_its_logprob_by_logits(make_model, make_groups, temperature):
    groups = [[replace(s, temperature=temperature) for s in group] for group in make_groups(2, 2)]
    data = step_data(groups, AlgorithmConfig.model_validate("otb"), version=0, max_staleness=None)
    plan = plan_updates(data, inner_updates=1, tokens_per_microbatch=16)
    model = make_model()
    logp, got = token_scores(model, [part for update in plan for part in update.parts], len(data.mask))
    want, of_token = [], []
    for sample in data.samples:
        logits = plain_logits(model, sample)
        for place in np.flatnonzero(sample.action_mask):
            row = logits[place].detach().requires_grad_()
            one = row.log_softmax(-1)[int(sample.response_ids[place])]
            one.backward()
            assert row.grad is not None
            want.append(row.grad.pow(2).sum().item())
            of_token.append(one.item())
    assert got.tolist() == pytest.approx(want, abs=1e-5)
    assert logp.tolist() == pytest.approx(of_token, abs=1e-4)


@pytest.mark.parametrize("importance", ["none", "truncated"])
def test_a_step_with_the_optimal_token_baseline_weighs_scores_by_squared_weights(
    make_model, make_groups, monkeypatch, importance
):
    """The trainer's advantages are those of its formula with scores and weights computed apart."""
    choices = {"preset": "otb", "importance": {"type": importance}}
    if importance != "none":
        choices |= {"proximal": {"type": "recomputed"}}
    algorithm = AlgorithmConfig.model_validate(choices)
    groups = make_groups(2, 3, seed=3)
    trainer = Trainer(make_model(), algorithm, TrainConfig(inner_updates=2), total_steps=2)
    seen = []
    known = Objective.weigh_scores
    monkeypatch.setattr(Objective, "weigh_scores", lambda *args: seen.append(known(*args)) or seen[-1])
    assert trainer.step(groups, version=0, max_staleness=None).status == "trained"
    data = step_data(groups, algorithm, version=0, max_staleness=None)
    plan = plan_updates(data, inner_updates=1, tokens_per_microbatch=4096)
    logp, scores = token_scores(make_model(), plan[0].parts, len(data.mask))
    weights = (logp - data.behavior).exp().clamp(max=2.0) if importance != "none" else torch.ones_like(logp)
    torch.testing.assert_close(seen[0], (scores * weights**2).double(), rtol=1e-3, atol=1e-6)
