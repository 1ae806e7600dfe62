from dataclasses import replace

import numpy as np
import pytest
import torch

from data_contracts.algorithm import AlgorithmConfig
from models.scores import score_weights
from models.step import step_data


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
