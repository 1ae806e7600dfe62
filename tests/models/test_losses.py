import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.algorithm import (
    Cispo,
    DppoTv,
    Gmpo,
    Gspo,
    Loss,
    M2po,
    MaskedWeights,
    PpoClip,
    Reinforce,
    Sao,
    Sapo,
    SequenceMeanTokenMean,
    TokenMean,
    Topr,
    Vespo,
)
from models.aggregation import AGGREGATIONS, totals_of
from models.importance import WEIGHTS
from models.losses import LOSSES, m2po_margins
from models.tokens import TokenBatch, select

ALL_LOSSES = [kind() for kind in get_args(get_args(Loss)[0])]


def total(batch: TokenBatch, cfg, aggregation=None, importance=None) -> torch.Tensor:
    aggregation = aggregation or TokenMean()
    token = LOSSES[type(cfg)](batch, cfg).loss
    if importance:
        weights, kept = WEIGHTS[type(importance)](batch, importance)
        token = select(kept, token * weights)
    totals = totals_of(batch.mask, batch.sequence, batch.num_sequences)
    return AGGREGATIONS[type(aggregation)](token, batch, aggregation, totals)


@pytest.mark.parametrize(
    ("name", "cfg", "aggregation"),
    [
        ("loss.ppo_clip", PpoClip(clip_low=0.2, clip_high=0.2), None),
        ("loss.ppo_dual_clip", PpoClip(clip_low=0.2, clip_high=0.2, dual_clip=3.0), None),
        ("loss.m2po_tau_active", M2po(budget=0.3), None),
        ("loss.gspo", Gspo(), SequenceMeanTokenMean()),
        ("loss.cispo_verl", Cispo(), None),
        ("loss.sao_dis", Sao(), None),
    ],
)
def test_value_and_gradient_match_the_reference(reference, token_batch, name, cfg, aggregation):
    case = reference(name)
    inputs = case["inputs"]
    old = inputs.get("logp_rollout", inputs["logp_old"])
    batch = token_batch(inputs["logp_new"], inputs["mask"], behavior=old, advantages=inputs["adv"])
    loss = total(batch, cfg, aggregation)
    loss.backward()
    assert loss.item() == pytest.approx(case["expected"]["loss"], rel=1e-6)
    want = torch.tensor(case["expected"]["grad_logp"], dtype=torch.float64)
    torch.testing.assert_close(batch.logp.grad.view(3, 4), want, rtol=1e-6, atol=1e-9)


def test_clip_fractions_match_the_reference(reference, token_batch):
    case = reference("loss.ppo_dual_clip")
    inputs = case["inputs"]
    batch = token_batch(inputs["logp_new"], inputs["mask"], behavior=inputs["logp_old"], advantages=inputs["adv"])
    plain = LOSSES[PpoClip](batch, PpoClip(clip_high=0.2))
    cut = (select(batch.mask, plain.cut_low | plain.cut_high)).sum().item()
    assert cut / batch.mask.sum().item() == pytest.approx(case["expected"]["clipfrac"])
    dual = LOSSES[PpoClip](batch, PpoClip(clip_high=0.2, dual_clip=3.0))
    more = (select(batch.mask, dual.cut_high & ~plain.cut_high)).sum().item()
    assert more / batch.mask.sum().item() == pytest.approx(case["expected"]["clipfrac_lower"])


def test_decoupled_ppo_with_a_token_mask_matches_the_reference(reference, token_batch):
    case = reference("loss.decoupled_ppo_mask")
    inputs = case["inputs"]
    batch = token_batch(
        inputs["logp_new"],
        inputs["mask"],
        proximal=inputs["logp_prox"],
        behavior=inputs["logp_behave"],
        advantages=inputs["adv"],
    )
    loss = total(batch, PpoClip(clip_high=0.2, dual_clip=3.0), importance=MaskedWeights(high=2.0))
    loss.backward()
    assert loss.item() == pytest.approx(case["expected"]["loss"], rel=1e-6)
    want = torch.tensor(case["expected"]["grad_logp"], dtype=torch.float64)
    torch.testing.assert_close(batch.logp.grad.view(3, 4), want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("advantage", "ratio", "want"), [(1, 1.5, -1.2), (1, 0.7, -0.7), (-1, 0.7, 0.8), (-1, 1.5, 1.5), (-1, 5, 3.0)]
)
def test_ppo_clip_by_hand(token_batch, advantage, ratio, want):
    batch = token_batch([[math.log(ratio)]], [[1]], behavior=[[0.0]], advantages=[[advantage]])
    assert total(batch, PpoClip(clip_high=0.2, dual_clip=3.0)).item() == pytest.approx(want)


@pytest.mark.parametrize(("advantage", "want"), [(1.0, -2.490), (-1.0, 2.394)])
def test_sapo_by_hand(token_batch, advantage, want):
    batch = token_batch([[math.log(1.5)]], [[1]], behavior=[[0.0]], advantages=[[advantage]])
    assert total(batch, Sapo()).item() == pytest.approx(want, abs=1e-3)


def test_sapo_has_the_plain_slope_at_ratio_one(token_batch):
    batch = token_batch([[-1.0, -2.0]], [[1, 1]], advantages=[[2.0, -3.0]])
    total(batch, Sapo()).backward()
    assert batch.logp.grad.tolist() == pytest.approx([-1.0, 1.5])


def test_gmpo_by_hand(token_batch):
    batch = token_batch([[0.6, -0.1]], [[1, 1]], behavior=[[0.0, 0.0]], advantages=[[1.0, 1.0]])
    loss = total(batch, Gmpo(), SequenceMeanTokenMean())
    assert loss.item() == pytest.approx(-math.exp(0.15))
    loss.backward()
    assert batch.logp.grad.tolist() == pytest.approx([0.0, -math.exp(0.15) / 2])


def test_topr_caps_the_ratio_of_failures_only(token_batch):
    ratio = math.log(1.8)
    batch = token_batch(
        [[ratio], [ratio]], [[1], [1]], behavior=[[0.0], [0.0]], advantages=[[1.0], [-1.0]], rewards=[1.0, 0.0]
    )
    total(batch, Topr()).backward()
    assert batch.logp.grad.tolist() == pytest.approx([-0.5, 0.5])


@pytest.mark.parametrize(
    ("advantage", "ratio", "want"),
    [(1, 0.5, 1.120), (1, 1, 1.0), (1, 2, 0.199), (-1, 0.5, 0.340), (-1, 1, 1.0), (-1, 2, 1.083)],
)
def test_vespo_by_hand(token_batch, advantage, ratio, want):
    batch = token_batch([[math.log(ratio)]], [[1]], behavior=[[0.0]], advantages=[[advantage]])
    total(batch, Vespo()).backward()
    assert batch.logp.grad.item() == pytest.approx(-advantage * want, abs=1e-3)


def test_dppo_masks_what_moved_too_far_but_keeps_its_pull(token_batch):
    batch = token_batch([[-0.6, -0.6]], [[1, 1]], behavior=[[-1.1, -0.7]], advantages=[[1.0, 1.0]])
    cfg = DppoTv(kl_coefficient=1e-3)
    token = LOSSES[DppoTv](batch, cfg)
    assert token.cut_high.tolist() == [True, False]
    assert token.loss.tolist() == pytest.approx([1e-3 * 0.25, -math.exp(0.1) + 1e-3 * 0.01])


@pytest.mark.parametrize(("ratio", "want"), [(0.61, 0.0), (5.47, 5.47), (6.0, 0.0)])
def test_sao_drops_ratios_outside_the_band(token_batch, ratio, want):
    batch = token_batch([[math.log(ratio)]], [[1]], behavior=[[0.0]], advantages=[[1.0]])
    total(batch, Sao()).backward()
    assert -batch.logp.grad.item() == pytest.approx(want)


def test_m2po_margins_by_hand():
    log, advantages = torch.tensor([0.3, 0.1, 1.0, -2.0]), torch.tensor([1.0, 1.0, 1.0, 1.0])
    assert m2po_margins(log, advantages, M2po()) == (0.3, 0.5)
    low, high = m2po_margins(log, advantages, M2po(floor_low=0.01, floor_high=0.01))
    assert (low, high) == pytest.approx((1 - math.exp(-0.1), math.exp(0.1) - 1))
    assert m2po_margins(log * 0.1, advantages, M2po())[1] > 1000


def test_m2po_reports_the_reference_margins(reference, token_batch):
    case = reference("loss.m2po_tau_active")
    inputs = case["inputs"]
    batch = token_batch(inputs["logp_new"], inputs["mask"], behavior=inputs["logp_old"], advantages=inputs["adv"])
    log = (batch.logp - batch.behavior).detach()[batch.mask]
    low, high = m2po_margins(log, batch.advantages[batch.mask], M2po(budget=0.3))
    assert low == pytest.approx(case["expected"]["clip_low"])
    assert high == pytest.approx(case["expected"]["clip_high"])


def test_reinforce_ignores_the_ratio(token_batch):
    batch = token_batch([[-1.0, -2.0]], [[1, 1]], behavior=[[-5.0, -0.1]], advantages=[[1.0, -2.0]])
    total(batch, Reinforce()).backward()
    assert batch.logp.grad.tolist() == pytest.approx([-0.5, 1.0])


@pytest.mark.parametrize("cfg", ALL_LOSSES, ids=lambda cfg: cfg.type)
def test_masked_tokens_reach_neither_value_nor_gradient(token_batch, cfg):
    bad = math.nan
    rows = dict(behavior=[[-1.0, bad], [bad, bad]], advantages=[[0.5, bad], [bad, math.inf]])
    batch = token_batch([[-1.2, bad], [bad, math.inf]], [[1, 0], [0, 0]], **rows)
    clean = token_batch([[-1.2]], [[1]], behavior=[[-1.0]], advantages=[[0.5]])
    loss, want = total(batch, cfg), total(clean, cfg)
    assert loss.item() == pytest.approx(want.item())
    loss.backward()
    want.backward()
    assert batch.logp.grad.tolist() == pytest.approx([clean.logp.grad.item(), 0.0, 0.0, 0.0])


@pytest.mark.parametrize("cfg", ALL_LOSSES, ids=lambda cfg: cfg.type)
def test_a_batch_without_tokens_costs_nothing(token_batch, cfg):
    batch = token_batch([[-1.0, -2.0]], [[0, 0]])
    loss = total(batch, cfg)
    loss.backward()
    assert loss.item() == 0.0
    assert batch.logp.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("cfg", [c for c in ALL_LOSSES if c.type != "dppo_tv"], ids=lambda cfg: cfg.type)
def test_no_advantage_means_no_gradient(token_batch, cfg):
    batch = token_batch([[-1.0, -2.0]], [[1, 1]], behavior=[[-1.5, -0.5]], advantages=[[0.0, 0.0]])
    loss = total(batch, cfg)
    loss.backward()
    assert loss.item() == 0.0
    assert batch.logp.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("cfg", ALL_LOSSES, ids=lambda cfg: cfg.type)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_finite_inputs_give_finite_losses_and_gradients(cfg, data):
    tokens = data.draw(st.integers(1, 8))
    numbers = lambda low, high: torch.tensor(  # noqa: E731
        data.draw(st.lists(st.floats(low, high, width=32), min_size=tokens, max_size=tokens))
    )
    logp = numbers(-1000, 0).requires_grad_()
    behavior = numbers(-1000, 0)
    batch = TokenBatch(
        logp=logp,
        proximal=behavior,
        start=behavior,
        behavior=behavior,
        advantages=numbers(-10, 10),
        mask=torch.tensor(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))),
        sequence=torch.arange(tokens) // 2,
        num_sequences=(tokens + 1) // 2,
        rewards=torch.zeros((tokens + 1) // 2),
        versions=torch.zeros(tokens, dtype=torch.int64),
        version=0,
        entropy=torch.ones(tokens),
    )
    loss = total(batch, cfg)
    loss.backward()
    assert loss.isfinite()
    assert logp.grad is not None
    assert logp.grad.isfinite().all()
    assert (logp.grad[~batch.mask] == 0).all()
