import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.algorithm import AlgorithmConfig, MaskedWeights, SequenceMeanTokenMean, TokenMean
from data_contracts.losses import (
    AStarPo,
    Cispo,
    DppoTv,
    Drpo,
    Gmpo,
    Gspo,
    Loss,
    M2po,
    Mhpo,
    MinPro,
    PpoClip,
    PpoEwma,
    Reinforce,
    Sao,
    Sapo,
    Tbpo,
    Topr,
    Vespo,
)
from models.aggregation import AGGREGATIONS, totals_of
from models.importance import WEIGHTS
from models.losses import LOSSES, m2po_margins
from models.step import step_data
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


def test_topr_can_cap_the_ratio_of_all(token_batch):
    logs = [[math.log(1.8)], [math.log(0.5)], [math.log(1.8)]]
    batch = token_batch(
        logs, [[1]] * 3, behavior=[[0.0]] * 3, advantages=[[1.0], [1.0], [-1.0]], rewards=[1.0, 1.0, 0.0]
    )
    total(batch, Topr(cut="all")).backward()
    assert batch.logp.grad.tolist() == pytest.approx([-1 / 3, -0.5 / 3, 1 / 3])


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


def test_ipo_masks_what_moved_too_far_in_either_direction(token_batch):
    given = {"behavior": [[-1.1, -0.6, -0.7]], "advantages": [[-1.0, 1.0, 1.0]]}
    batch = token_batch([[-0.6, -1.1, -0.75]], [[1, 1, 1]], **given)
    token = LOSSES[DppoTv](batch, DppoTv(limit=0.1, sides="both", kl_coefficient=0.0))
    assert token.cut_high.tolist() == [True, False, False]
    assert token.cut_low.tolist() == [False, True, False]
    assert token.loss.tolist() == pytest.approx([0.0, 0.0, -math.exp(-0.05)])
    along = LOSSES[DppoTv](batch, DppoTv(limit=0.1, kl_coefficient=0.0))
    assert not (along.cut_high | along.cut_low).any()


def test_a_star_po_equals_a_loop_over_samples(token_batch):
    logp = [[-1.0, -0.5], [-0.2, -3.0], [-1.5, -9.0]]
    mask, reference = [[1, 1], [1, 1], [1, 0]], [[-0.7, -0.9], [-0.4, -2.0], [-1.0, math.nan]]
    rewards, group, a, b = [1.0, 0.0, 0.5], [0, 0, 1], 0.5, 0.2
    batch = token_batch(logp, mask, reference=torch.tensor(reference), rewards=rewards, group=group, num_groups=2)
    loss = total(batch, AStarPo(value_temperature=a, policy_temperature=b))
    loss.backward()
    want, slopes = 0.0, []
    for i in range(3):
        mine = [r for r, g in zip(rewards, group, strict=True) if g == group[i]]
        best = a * math.log(sum(math.exp(r / a) for r in mine) / len(mine))
        log = sum(x - y for x, y, m in zip(logp[i], reference[i], mask[i], strict=True) if m)
        error = b * log - (rewards[i] - best)
        want += error**2 / 3
        slopes.append([2 * error * b / 3 * m for m in mask[i]])
    assert loss.item() == pytest.approx(want)
    torch.testing.assert_close(batch.logp.grad.view(3, 2), torch.tensor(slopes, dtype=torch.float64))


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


@pytest.mark.parametrize(("ratio", "want"), [(0.5, 0.0669), (1.0, 0.2651), (2.0, 0.4802)])
def test_mhpo_by_hand_with_a_damping_that_is_a_constant(token_batch, ratio, want):
    batch = token_batch([[math.log(ratio)]], [[1]], behavior=[[0.0]], advantages=[[1.0]])
    loss = total(batch, Mhpo())
    assert loss.item() == pytest.approx(-want, abs=1e-4)
    loss.backward()
    slope = 1 - math.tanh(math.log(ratio) / 1.5) ** 2
    assert batch.logp.grad.item() == pytest.approx(loss.item() * slope)


@pytest.mark.parametrize(
    ("advantage", "ratios", "want", "has_gradient"),
    [
        (-1.5, (1.467, 1.467), 0.0, False),
        (-1.5, (1.2, 1.0), 1.5 * math.sqrt(1.2), True),
        (-1.5, (0.5, 0.5), 0.0, False),
        (1.0, (2.0, 2.0), -1.2, False),
        (1.0, (0.5, 0.5), -0.5, True),
    ],
)
def test_tbpo_by_hand(token_batch, advantage, ratios, want, has_gradient):
    logs = [[math.log(r) for r in ratios]]
    batch = token_batch(logs, [[1, 1]], behavior=[[0.0, 0.0]], advantages=[[advantage] * 2])
    loss = total(batch, Tbpo(), SequenceMeanTokenMean())
    loss.backward()
    assert loss.item() == pytest.approx(want, abs=1e-9)
    assert bool((batch.logp.grad != 0).all()) == has_gradient


def test_minpro_weights_a_ratio_by_the_smallest_before_it(token_batch):
    ratios = [1.5, 0.9, 1.1, 9.0]
    logs = [[math.log(r) for r in ratios], [0.1, 0.2, 0.3, 0.4]]
    batch = token_batch(logs, [[1, 1, 1, 0], [0, 0, 0, 1]], behavior=[[0.0] * 4] * 2, advantages=[[1.0] * 4] * 2)
    loss = total(batch, MinPro())
    loss.backward()
    want = [1.5, 0.9 * 1.5, 1.1 * 0.9, 0.0, 0.0, 0.0, 0.0, math.exp(0.4)]
    assert loss.item() == pytest.approx(-sum(want) / 4)
    assert batch.logp.grad.tolist() == pytest.approx([-w / 4 for w in want])  # the minimum is a constant


def test_minpro_clips_the_ratio_if_asked(token_batch):
    batch = token_batch([[math.log(0.5), math.log(2.0)]], [[1, 1]], behavior=[[0.0, 0.0]], advantages=[[1.0, 1.0]])
    token = LOSSES[MinPro](batch, MinPro(clip=0.2))
    assert token.loss.tolist() == pytest.approx([-0.5, -1.2 * 0.5])
    assert token.cut_high.tolist() == [False, True]


def scalar_ppo_ewma(logp, proximal, behavior, advantage, clip=0.2, cap=100.0):
    """Loss and gradient of one token, by cases."""
    adjusted = max(behavior, logp - math.log(cap))
    plain = -advantage * math.exp(logp - adjusted)
    inside = min(max(logp - proximal, math.log(1 - clip)), math.log(1 + clip))
    held = -advantage * math.exp(inside + proximal - adjusted)
    moves = inside == logp - proximal
    return (plain, plain) if plain > held or moves else (held, 0.0)


@given(
    logp=st.floats(-9, 0), proximal=st.floats(-9, 0), behavior=st.floats(-9, 0), advantage=st.sampled_from([-2.0, 0.5])
)
@settings(max_examples=60, deadline=None)
def test_ppo_ewma_equals_a_loop_over_cases(logp, proximal, behavior, advantage):
    leaf = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    values = [torch.tensor([v], dtype=torch.float64) for v in (proximal, behavior, advantage)]
    batch = TokenBatch(
        leaf, values[0], values[1], values[1], values[1], values[1], values[2], torch.ones(1, dtype=torch.bool),
        torch.zeros(1, dtype=torch.int64), 1, torch.ones(1), torch.zeros(1, dtype=torch.int64), 1,
        torch.zeros(1, dtype=torch.int64), 0, torch.ones(1),
    )  # fmt: skip
    batch = replace(batch, behavior=values[1])
    loss = LOSSES[PpoEwma](batch, PpoEwma()).loss
    loss.sum().backward()
    want, gradient = scalar_ppo_ewma(logp, proximal, behavior, advantage)
    assert loss.item() == pytest.approx(want, rel=1e-9)
    edge = min(abs(logp - proximal - math.log(1 + s * 0.2)) for s in (-1, 1))
    if edge > 1e-9:
        assert leaf.grad.item() == pytest.approx(gradient, rel=1e-9, abs=1e-12)


def scalar_drpo(logps, old, rewards, groups, num_groups, cfg):
    """The loss of samples [[token log-probability]] from its definition, with the stop-gradient as a number."""
    total, distances = 0.0, [a - b for row, of in zip(logps, old, strict=True) for a, b in zip(row, of, strict=True)]
    for group in range(num_groups):
        own = [i for i, g in enumerate(groups) if g == group and logps[i]]
        right, wrong = [i for i in own if rewards[i] > 0.5], [i for i in own if rewards[i] <= 0.5]
        if right and wrong:
            s = {i: sum(logps[i]) / len(logps[i]) for i in own}
            w = {i: math.exp((1 - len(logps[i]) / cfg.max_length) / cfg.length_scale) for i in right}
            total += sum(w[i] * s[i] for i in right) / sum(w.values())
            total -= cfg.tau * math.log(sum(math.exp(s[j] / cfg.tau) for j in wrong) / len(wrong))
    kl = sum(math.exp(d) - 1 - d for d in distances) / len(distances)
    return -total / num_groups, kl


def test_drpo_equals_a_loop_over_samples(token_batch):
    cfg = Drpo(max_length=4, kl_strength=50.0, tau=0.7)
    logps = [[-1.0, -2.0, -0.3], [-0.5], [-3.0, -0.1], [-1.5, -0.2], [-0.7]]
    old = [[-1.1, -1.7, -0.4], [-0.5], [-2.5, -0.3], [-1.0, -0.6], [-0.4]]
    rewards, groups = [1.0, 1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0, 1]

    def padded(rows):
        return [row + [math.nan] * (3 - len(row)) for row in rows]

    mask = [[1] * len(row) + [0] * (3 - len(row)) for row in logps]
    batch = token_batch(padded(logps), mask, behavior=padded(old), rewards=rewards, group=groups, num_groups=3)
    loss = total(batch, cfg)
    loss.backward()
    plain, kl = scalar_drpo(logps, old, rewards, groups, 3, cfg)
    hinge = max(cfg.kl_strength * (kl - cfg.kl_limit), 0.0)
    assert loss.item() == pytest.approx(plain + hinge * kl)
    for row in range(5):
        for column in range(len(logps[row])):
            moved = [list(r) for r in logps]
            moved[row][column] += 1e-6
            plain_moved, kl_moved = scalar_drpo(moved, old, rewards, groups, 3, cfg)
            slope = (plain_moved - plain + hinge * (kl_moved - kl)) / 1e-6
            assert batch.logp.grad.view(5, 3)[row, column].item() == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_drpo_lets_short_right_answers_dominate(token_batch):
    mask = [[1] + [0] * 3, [1] * 3 + [0], [1] * 4]
    batch = token_batch([[-1.0] * 4] * 3, mask, rewards=[1.0, 1.0, 0.0], group=[0, 0, 0])
    total(batch, Drpo(max_length=4)).backward()
    pull = -batch.logp.grad.view(3, 4).sum(1)
    assert pull.tolist() == pytest.approx([0.9933, 0.0067, -1.0], abs=1e-4)


@pytest.mark.parametrize("rewards", [[1.0, 1.0], [0.0, 0.0]])
def test_drpo_learns_nothing_from_a_group_without_contrast(token_batch, rewards):
    batch = token_batch([[-1.0], [-2.0]], [[1], [1]], rewards=rewards)
    loss = total(batch, Drpo())
    loss.backward()
    assert loss.item() == 0
    assert batch.logp.grad.tolist() == [0, 0]


def test_all_masked_follows_the_reference(reference, token_batch):
    case = reference("edge.all_masked")
    batch = token_batch([[math.nan, math.inf]] * 2, case["inputs"]["mask"])
    assert total(batch, PpoClip()).item() == case["expected"]["areal"]
    assert total(batch, PpoClip(), SequenceMeanTokenMean()).item() == case["expected"]["trl_grpo"]


def test_responses_cut_off_leave_the_loss_as_in_the_reference(reference, token_batch, make_groups):
    case = reference("mask.truncated")
    inputs, expected = case["inputs"], case["expected"]
    (group,) = make_groups(1, 3)
    group = [
        replace(
            sample,
            response_ids=np.ones(4, np.int32),
            action_mask=np.array(inside, bool),
            behavior_logprobs=np.where(inside, old, np.nan).astype(np.float32),
            policy_versions=np.where(inside, 0, -1),
            finish_reason="length" if is_cut else "stop",
        )
        for sample, inside, old, is_cut in zip(
            group, inputs["mask"], inputs["logp_old"], inputs["truncated"], strict=True
        )
    ]
    data = step_data([group], AlgorithmConfig(truncated="mask"), version=0, max_staleness=None)
    mask = torch.zeros(3, 4)
    mask[torch.tensor(inputs["mask"]).bool()] = data.mask.float()
    assert mask.tolist() == expected["mask_after"]
    batch = token_batch(
        inputs["logp_new"], mask.tolist(), behavior=inputs["logp_old"], advantages=torch.tensor(inputs["adv"])
    )
    cfg = PpoClip(clip_low=0.2, clip_high=0.2)
    assert total(batch, cfg).item() == pytest.approx(expected["loss_token_mean"], rel=1e-6)
    for every, key in ((True, "loss_trl_grpo_all_rows"), (False, "loss_verl_seq_mean_token_mean")):
        loss = total(batch, cfg, SequenceMeanTokenMean(count_empty=every))
        assert loss.item() == pytest.approx(expected[key], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cfg", ALL_LOSSES, ids=lambda cfg: cfg.type)
def test_low_precision_log_probabilities_give_nearly_the_same_loss(token_batch, cfg, dtype):
    rows = dict(
        behavior=[[-1.0, -0.5, -2.0], [-0.5, -1.5, -1.0]],
        advantages=[[1.0] * 3, [-0.5] * 3],
        rewards=[1.0, 0.0],
    )
    logp, mask = [[-1.25, -0.5, -1.75], [-0.5, -1.0, -2.0]], [[1, 1, 1], [1, 1, 0]]  # exact in bfloat16
    exact, rough = (total(token_batch(logp, mask, dtype=d, **rows), cfg) for d in (torch.float64, dtype))
    assert rough.item() == pytest.approx(exact.item(), rel=0.05 if dtype == torch.bfloat16 else 1e-5)


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


@pytest.mark.parametrize(
    "cfg", [c for c in ALL_LOSSES if c.type not in ("a_star_po", "dppo_tv", "drpo")], ids=lambda cfg: cfg.type
)
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
        anchor=behavior,
        reference=behavior,
        behavior=behavior,
        advantages=numbers(-10, 10),
        mask=torch.tensor(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))),
        sequence=torch.arange(tokens) // 2,
        num_sequences=(tokens + 1) // 2,
        rewards=torch.arange((tokens + 1) // 2) % 2.0,
        group=torch.zeros((tokens + 1) // 2, dtype=torch.int64),
        num_groups=1,
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
