import pytest
import torch

from data_contracts.algorithm import EntropyBonus, KlPenalty
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


def test_entropy_bonus_lowers_the_loss_by_the_entropy(token_batch):
    batch = token_batch([[-1.0, -1.0]], [[1, 0]], entropy=[[2.0, float("nan")]])
    assert REGULARIZERS[EntropyBonus](batch, EntropyBonus(coefficient=0.1)).tolist() == pytest.approx([-0.2, 0.0])


@pytest.mark.parametrize(("towards", "want"), [("behavior", 0.5 * 0.25), ("proximal", 0.5 * 0.04)])
def test_kl_penalty_pulls_towards_the_chosen_policy(token_batch, towards, want):
    batch = token_batch([[-1.0]], [[1]], behavior=[[-1.5]], proximal=[[-1.2]])
    cfg = KlPenalty(towards=towards, estimator="k2", coefficient=2.0)
    assert REGULARIZERS[KlPenalty](batch, cfg).item() == pytest.approx(2 * want)
