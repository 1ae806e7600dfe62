import dataclasses

import pytest
import torch

from data_contracts.algorithm import AdaptiveEntropy, EntropyBonus, KlPenalty
from models.regularizers import REGULARIZERS, kl_estimate


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_plus"])
def test_kl_estimators_match_the_reference(reference, estimator):
    case = reference("kl.estimators")
    logp = torch.tensor(case["inputs"]["logp_new"], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor(case["inputs"]["mask"], dtype=torch.float64)
    value = kl_estimate(logp - torch.tensor(case["inputs"]["logp_ref"], dtype=torch.float64), estimator) * mask
    value.sum().backward()
    expected = case["expected"][estimator]
    torch.testing.assert_close(value, torch.tensor(expected["value"], dtype=torch.float64), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(logp.grad, torch.tensor(expected["grad"], dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_k1_plus_has_the_value_of_k1_and_the_gradient_of_k2(reference):
    case = reference("kl.estimators")
    x = torch.tensor(case["inputs"]["logp_new"], dtype=torch.float64) - torch.tensor(
        case["inputs"]["logp_ref"], dtype=torch.float64
    )
    x.requires_grad_()
    value = kl_estimate(x, "k1_plus")
    value.sum().backward()
    torch.testing.assert_close(value.detach(), x.detach())
    torch.testing.assert_close(x.grad, x.detach())


def test_reweighted_k3_matches_the_reference(reference, token_batch):
    case = reference("kl.estimators")
    inputs = case["inputs"]
    old, ref = (torch.tensor(inputs[name], dtype=torch.float64) for name in ("logp_old", "logp_ref"))
    batch = token_batch(inputs["logp_new"], inputs["mask"], behavior=old, reference=ref)
    cfg = KlPenalty(towards="reference", estimator="k3", coefficient=1.0, reweight=True)
    value = REGULARIZERS[KlPenalty](batch, cfg)
    value.sum().backward()
    expected = case["expected"]["k3_unbiased"]
    want = torch.tensor(expected["value"], dtype=torch.float64), torch.tensor(expected["grad"], dtype=torch.float64)
    torch.testing.assert_close(value.detach().view(3, 4), want[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(batch.logp.grad.view(3, 4), want[1], rtol=1e-9, atol=1e-12)


def test_a_reweighted_k1_has_the_gradient_of_the_reverse_divergence(token_batch):
    """Over all tokens of a distribution p: d/dp sum p log(p/q), from tokens drawn by another policy."""
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    behavior, reference = torch.tensor([[0.2, 0.3, 0.5]]).log(), torch.tensor([[0.6, 0.3, 0.1]]).log()
    logp = logits.log_softmax(-1)
    (logp.exp() * (logp - reference[0])).sum().backward()
    want = logits.grad.clone()
    logits.grad = None
    logp = logits.log_softmax(-1)
    batch = token_batch([[0.0] * 3], [[1] * 3], behavior=behavior, reference=reference)
    cfg = KlPenalty(towards="reference", estimator="k1", coefficient=1.0, reweight=True)
    expectation = behavior[0].exp() * REGULARIZERS[KlPenalty](dataclasses.replace(batch, logp=logp), cfg)
    expectation.sum().backward()
    torch.testing.assert_close(logits.grad, want, rtol=1e-6, atol=1e-7)


def test_an_adaptive_bonus_uses_its_present_coefficient(token_batch):
    batch = dataclasses.replace(token_batch([[-1.0]], [[1]], entropy=[[2.0]]), entropy_coefficient=0.25)
    assert REGULARIZERS[AdaptiveEntropy](batch, AdaptiveEntropy()).tolist() == [-0.5]


def test_entropy_bonus_lowers_the_loss_by_the_entropy(token_batch):
    batch = token_batch([[-1.0, -1.0]], [[1, 0]], entropy=[[2.0, float("nan")]])
    assert REGULARIZERS[EntropyBonus](batch, EntropyBonus(coefficient=0.1)).tolist() == pytest.approx([-0.2, 0.0])


@pytest.mark.parametrize(("towards", "want"), [("behavior", 0.5 * 0.25), ("proximal", 0.5 * 0.04)])
def test_kl_penalty_pulls_towards_the_chosen_policy(token_batch, towards, want):
    batch = token_batch([[-1.0]], [[1]], behavior=[[-1.5]], proximal=[[-1.2]])
    cfg = KlPenalty(towards=towards, estimator="k2", coefficient=2.0)
    assert REGULARIZERS[KlPenalty](batch, cfg).item() == pytest.approx(2 * want)
