import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.algorithm import (
    AdaptiveWeights,
    EwmaProximal,
    FailureVeto,
    InterpolatedProximal,
    KlMaskedWeights,
    MaskedWeights,
    MomentMaskedWeights,
    NoWeights,
    OffContextWeights,
    OffPolicySequenceMask,
    TokenMean,
    TopEntropy,
    TruncatedWeights,
    Veto,
)
from data_contracts.losses import PpoClip
from models.aggregation import AGGREGATIONS, totals_of
from models.importance import FILTERS, PROXIMALS, WEIGHTS, adaptive_share
from models.losses import LOSSES
from models.tokens import TokenBatch, select


@pytest.fixture
def case_batch(reference, token_batch):
    def build(name):
        inputs = reference(name)["inputs"]
        rollout = torch.tensor(inputs["logp_rollout"])
        return token_batch(inputs["logp_old"], inputs["mask"], proximal=inputs["logp_old"], behavior=rollout)

    return build


def weighted(batch, cfg):
    weights, kept = WEIGHTS[type(cfg)](batch, cfg)
    return select(kept, weights).view(3, 4)


def assert_close(got, want):
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncation_matches_the_reference(case_batch, reference, level):
    got = weighted(case_batch("is.tis"), TruncatedWeights(level=level, cap=2.0))
    assert_close(got, reference("is.tis")["expected"][level])


@pytest.mark.parametrize(
    ("level", "key"), [("token", "token_batch_normalised"), ("sequence", "sequence_batch_normalised")]
)
def test_weights_can_be_normalized_over_the_update(case_batch, reference, level, key):
    got = weighted(case_batch("is.tis"), TruncatedWeights(level=level, cap=2.0, normalize=True))
    assert_close(got, reference("is.tis")["expected"][key])


def scalar_kl_kept(proximal, behavior, mask, cfg):
    """Which tokens stay, by plain loops [B][T]."""
    kept = []
    for row, old, inside in zip(proximal, behavior, mask, strict=True):
        found = []
        for p, b in zip(row, old, strict=True):
            d = b - p
            found.append({"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[cfg.estimator])
        own = [f for f, m in zip(found, inside, strict=True) if m]
        whole = {"sum": sum, "mean": lambda x: sum(x) / len(x), "max": max}.get(cfg.over)
        compared = found if whole is None else [whole(own) if own else 0.0] * len(row)
        low = -math.inf if cfg.low is None else cfg.low
        kept.append([bool(m) and low <= c <= cfg.high for c, m in zip(compared, inside, strict=True)])
    return kept


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("over", ["token", "sum", "mean", "max"])
@pytest.mark.parametrize(("low", "high"), [(None, 0.3), (-0.35, 0.25), (0.021, 5.0)])
def test_what_diverges_leaves_the_loss(case_batch, reference, estimator, over, low, high):
    inputs = reference("is.mis")["inputs"]
    cfg = KlMaskedWeights(estimator=estimator, over=over, low=low, high=high)
    batch = case_batch("is.mis")
    weights, kept = WEIGHTS[KlMaskedWeights](batch, cfg)
    want = scalar_kl_kept(inputs["logp_old"], inputs["logp_rollout"], inputs["mask"], cfg)
    assert kept.view(3, 4).tolist() == want
    assert (weights == 1).all()
    weights, again = WEIGHTS[KlMaskedWeights](batch, cfg.model_copy(update={"weight": "ratio"}))
    assert torch.equal(kept, again)
    assert_close(weights[batch.mask], (batch.proximal - batch.behavior)[batch.mask].exp().tolist())


def test_the_band_of_the_geometric_mean_is_that_of_the_mean_divergence(case_batch):
    """Geo-RS by two names: the mean of k1 is minus the log of the geometric mean of ratios."""
    batch = case_batch("is.mis")
    band = MaskedWeights(level="geometric", low=0.8, high=1.3, weight="one")
    k1 = KlMaskedWeights(estimator="k1", over="mean", low=-math.log(1.3), high=-math.log(0.8))
    assert torch.equal(WEIGHTS[MaskedWeights](batch, band)[1], WEIGHTS[KlMaskedWeights](batch, k1)[1])


def test_weights_can_be_held_above_a_floor(case_batch):
    batch = case_batch("is.tis")
    plain, _ = WEIGHTS[TruncatedWeights](batch, TruncatedWeights(cap=2.0))
    held, kept = WEIGHTS[TruncatedWeights](batch, TruncatedWeights(cap=2.0, floor=0.7))
    assert torch.equal(held, plain.clamp(min=0.7))
    assert (plain < 0.7)[batch.mask].any()
    assert torch.equal(kept, batch.mask)


def guided_batch(reference, token_batch):
    inputs = reference("loss.oc_grpo")["inputs"]
    rows = [[-1e9 if not m else v for v, m in zip(*pair, strict=True)]
            for pair in zip(inputs["logp_old_guided_prompt"], inputs["mask"], strict=True)]  # fmt: skip
    return token_batch(
        inputs["logp_new"], inputs["mask"], proximal=inputs["logp_old"], behavior=torch.tensor(rows),
        advantages=torch.tensor(inputs["adv"]), guided=inputs["is_guided_rollout"],
    )  # fmt: skip


def test_guided_rollouts_are_weighed_by_what_the_guidance_did(reference, token_batch):
    batch, expected = guided_batch(reference, token_batch), reference("loss.oc_grpo")["expected"]
    weights, kept = WEIGHTS[OffContextWeights](batch, OffContextWeights())
    assert_close(weights.view(3, 4), expected["weight"])
    token = LOSSES[PpoClip](batch, PpoClip(clip_low=0.2, clip_high=0.2))
    loss = AGGREGATIONS[TokenMean](
        select(kept, weights * token.loss), batch, TokenMean(), totals_of(batch.mask, batch.sequence, 3)
    )
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-6)
    loss.backward()
    assert batch.logp.grad is not None
    assert_close(batch.logp.grad.view(3, 4), expected["grad_logp"])


def test_guidance_can_be_weighed_by_response(reference, token_batch):
    batch = guided_batch(reference, token_batch)
    weights, _ = WEIGHTS[OffContextWeights](batch, OffContextWeights(level="geometric"))
    # row 0: log-ratios -0.3, 0.2, -4.9, 0; row 2: -0.7, -0.4, 0.1
    want = [math.exp(-5.0 / 4)] * 4 + [1.0] * 4 + [math.exp(-1.0 / 3)] * 3
    assert weights.tolist()[:11] == pytest.approx(want)


def test_without_guidance_every_token_counts_once(token_batch):
    batch = token_batch([[0.0, 0.0]], [[1, 1]], proximal=[[-1.0, -1.0]], behavior=[[-2.0, -0.5]])
    weights, kept = WEIGHTS[OffContextWeights](batch, OffContextWeights())
    assert weights.tolist() == [1.0, 1.0]
    assert kept.all()


@given(logs=st.lists(st.floats(-3, 3), max_size=9), limit=st.sampled_from([0.04, 0.5, 2.0]))
@settings(max_examples=50, deadline=None)
def test_the_largest_log_ratios_leave_until_the_rest_is_near(logs, limit):
    flat = torch.tensor([*logs, math.nan], dtype=torch.float64)
    mask = torch.tensor([True] * len(logs) + [False])
    batch = plain_batch(flat, mask)
    weights, kept = WEIGHTS[MomentMaskedWeights](batch, MomentMaskedWeights(limit=limit))
    assert weights.tolist() == [1.0] * len(mask)
    left = sorted(x**2 for x in logs)  # take the largest away, one by one
    while len(left) > 1 and sum(left) / len(left) >= limit:
        left.pop()
    assert int(kept.sum()) == len(left)
    assert sorted(x**2 for x, k in zip(logs, kept.tolist(), strict=False) if k) == pytest.approx(left)


def plain_batch(log, mask):
    zero, one = torch.zeros_like(log), torch.ones_like(log)
    lone = torch.zeros(1, dtype=torch.int64)
    return TokenBatch(
        logp=zero, proximal=log, start=log, anchor=zero, reference=zero, behavior=zero, advantages=one, mask=mask,
        sequence=torch.zeros(len(log), dtype=torch.int64), num_sequences=1, rewards=one[:1], group=lone, num_groups=1,
        versions=torch.zeros(len(log), dtype=torch.int64), version=0, entropy=zero,
    )  # fmt: skip


def test_the_tokens_of_which_the_policy_was_least_sure_stay(token_batch):
    entropy = [[0.5, math.nan, 0.1, 0.9], [0.3, 0.2, 0.8, 0.0]]
    batch = token_batch([[0.0] * 4] * 2, [[1, 0, 1, 1], [1, 1, 1, 1]], entropy=entropy)
    kept = FILTERS[TopEntropy](batch, TopEntropy(share=0.3))  # three of seven
    assert torch.nonzero(kept)[:, 0].tolist() == [0, 3, 6]
    assert FILTERS[TopEntropy](batch, TopEntropy(share=1.0)).equal(batch.mask)
    nothing = token_batch([[0.0]], [[0]])
    assert not FILTERS[TopEntropy](nothing, TopEntropy()).any()


def test_a_geometric_band_can_reject_without_weighting(token_batch):
    batch = token_batch(
        [[0.0, 0.0]] * 2, [[1, 1]] * 2, proximal=[[-1.0, -1.0]] * 2, behavior=[[-1.1, -0.9], [-1.0, -0.9]]
    )
    weights, kept = WEIGHTS[MaskedWeights](batch, MaskedWeights(level="geometric", low=0.999, high=1.001, weight="one"))
    assert kept.tolist() == [True, True, False, False]
    assert weights.tolist() == [1.0] * 4


def test_adaptive_weights_mix_by_mismatch_and_reliability():
    ratio = torch.tensor([0.5, 1.0, 3.0, 1.5])
    kl = sum(r - 1 - math.log(r) for r in ratio.tolist()) / 4
    mean, square = 1.5, (0.25 + 1 + 9 + 2.25) / 4
    ess, variance = mean**2 / square, square / mean**2 - 1
    assert adaptive_share(ratio, AdaptiveWeights(kl_full=10.0)) == pytest.approx(kl / 10 * ess / (1 + variance))
    assert adaptive_share(ratio, AdaptiveWeights(kl_full=1e-3)) == pytest.approx(ess / (1 + variance))
    assert adaptive_share(torch.ones(3), AdaptiveWeights()) == 0


def test_adaptive_weights_lie_between_one_and_the_ratio(token_batch):
    batch = token_batch([[0.0, 0.0]], [[1, 1]], proximal=[[-1.0, -1.0]], behavior=[[-2.0, -0.5]])
    weights, kept = WEIGHTS[AdaptiveWeights](batch, AdaptiveWeights(kl_full=1e-6))
    share = adaptive_share((batch.proximal - batch.behavior).exp(), AdaptiveWeights(kl_full=1e-6))
    assert weights.tolist() == pytest.approx([1 + share * (math.e - 1), 1 + share * (math.exp(-0.5) - 1)])
    assert kept.all()


def test_the_kept_weights_are_the_proximal_policy(token_batch):
    batch = token_batch([[-1.0]], [[1]], anchor=[[-3.0]], behavior=[[-2.0]])
    assert PROXIMALS[EwmaProximal](batch, EwmaProximal()).tolist() == [-3.0]


def test_failure_veto_drops_what_follows_the_trigger(token_batch):
    logp = [[-1.0, -0.1, -1.0, -0.1], [-1.0, -0.1, -1.0, -1.0], [-1.0, -0.1, -1.0, -1.0]]
    batch = token_batch(
        logp,
        [[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1]],
        behavior=[[-1.0] * 4] * 3,
        advantages=[[-1.0] * 4, [1.0] * 4, [-1.0] * 4],
    )
    kept = FILTERS[FailureVeto](batch, FailureVeto(threshold=1.5)).view(3, 4)
    assert kept.tolist() == [[True, True, False, False], [True] * 4, [True, False, True, True]]


def test_truncation_keeps_every_token(case_batch):
    batch = case_batch("is.tis")
    assert (WEIGHTS[TruncatedWeights](batch, TruncatedWeights())[1] == batch.mask).all()


def test_token_band_matches_the_reference(case_batch, reference):
    got = weighted(case_batch("is.mis"), MaskedWeights(low=0.5, high=2.0))
    assert_close(got, reference("is.mis")["expected"]["token_weight"])


def test_sequence_band_drops_whole_sequences(case_batch, reference):
    got = weighted(case_batch("is.mis"), MaskedWeights(level="sequence", low=0.5, high=2.1))
    assert_close(got[:, 0], reference("is.mis")["expected"]["sequence_weight"])


def test_geometric_weight_is_the_mean_log_ratio(token_batch):
    batch = token_batch([[0.0, 0.0, 0.0]], [[1, 1, 1]], proximal=[[-1.0, -1.0, -1.0]], behavior=[[-1.1, -0.8, -1.9]])
    weights, kept = WEIGHTS[MaskedWeights](batch, MaskedWeights(level="geometric", high=2.0))
    assert weights.tolist() == pytest.approx([math.exp(0.8 / 3)] * 3)
    assert kept.all()


def test_bounds_belong_to_the_band(token_batch):
    batch = token_batch([[0.0, 0.0]], [[1, 1]], proximal=[[0.0, 0.0]], behavior=[[0.0, 0.0]])
    assert WEIGHTS[MaskedWeights](batch, MaskedWeights(low=1.0, high=2.0))[1].all()


@pytest.mark.parametrize(
    "cfg",
    [
        NoWeights(),
        TruncatedWeights(),
        TruncatedWeights(level="sequence"),
        TruncatedWeights(level="geometric", normalize=True),
        MaskedWeights(),
        AdaptiveWeights(),
    ],
)
def test_nothing_masked_reaches_the_weights(token_batch, cfg):
    bad = [[-1.0, math.nan], [math.nan, math.inf]]
    batch = token_batch([[-1.0, -1.0]] * 2, [[1, 0], [0, 0]], proximal=bad, behavior=bad)
    weights, kept = WEIGHTS[type(cfg)](batch, cfg)
    assert select(kept, weights).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_extreme_ratios_stay_finite(token_batch):
    batch = token_batch([[0.0, 0.0]], [[1, 1]], proximal=[[-0.0, -500.0]], behavior=[[-500.0, -0.0]])
    ratio = WEIGHTS[MaskedWeights](batch, MaskedWeights())[0]
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


@pytest.mark.parametrize(("space", "key"), [("log", "loglinear"), ("probability", "linear")])
def test_interpolated_proximal_matches_the_reference(reference, token_batch, space, key):
    case = reference("loss.a3po_prox")
    inputs = case["inputs"]
    batch = token_batch(
        inputs["logp_new_detached"],
        [[1] * 4] * 3,
        behavior=inputs["logp_behave"],
        versions=inputs["versions"],
        version=case["params"]["v_theta"],
    )
    got = PROXIMALS[InterpolatedProximal](batch, InterpolatedProximal(space=space))
    assert_close(got.view(3, 4), case["expected"][key])
    assert not got.requires_grad


def test_opsm_drops_bad_sequences_that_became_unlikely(token_batch):
    logp = [[-2.0, -2.0], [-2.0, -2.0], [-1.1, -1.1]]
    batch = token_batch(logp, [[1, 1]] * 3, behavior=[[-1.0, -1.0]] * 3, advantages=[[-1.0] * 2, [1.0] * 2, [-1.0] * 2])
    kept = FILTERS[OffPolicySequenceMask](batch, OffPolicySequenceMask(delta=0.5))
    assert kept.tolist() == [False, False, True, True, True, True]


def test_veto_drops_the_sequence_of_a_nearly_impossible_token(token_batch):
    logp = [[-1.0, -20.0], [-1.0, -1.0], [-1.0, -20.0]]
    batch = token_batch(logp, [[1, 1], [1, 1], [1, 0]], behavior=[[-1.0, -1.0]] * 3)
    assert FILTERS[Veto](batch, Veto(threshold=1e-4)).tolist() == [False, False, True, True, True, False]


EVERY_WEIGHT = [
    TruncatedWeights(level="sequence"),
    TruncatedWeights(normalize=True),
    TruncatedWeights(level="geometric", normalize=True),
    MaskedWeights(level="geometric"),
    AdaptiveWeights(),
]


@pytest.mark.parametrize("cfg", EVERY_WEIGHT, ids=lambda cfg: f"{cfg.type}-{getattr(cfg, 'level', '')}")
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_finite_log_probabilities_give_finite_weights_and_filters(cfg, data):
    tokens = data.draw(st.integers(1, 8))

    def numbers(low, high):
        return torch.tensor(data.draw(st.lists(st.floats(low, high, width=32), min_size=tokens, max_size=tokens)))

    behavior, logp = numbers(-1000, 0), numbers(-1000, 0)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
    sequence, samples = torch.arange(tokens) // 2, (tokens + 1) // 2
    versions = torch.zeros(tokens, dtype=torch.int64)
    batch = TokenBatch(
        logp=logp, proximal=logp, start=logp, anchor=logp, reference=logp, behavior=behavior,
        advantages=numbers(-10, 10), mask=mask, sequence=sequence, num_sequences=samples, rewards=torch.ones(samples),
        group=torch.zeros(samples, dtype=torch.int64), num_groups=1, versions=versions, version=3,
        entropy=torch.ones(tokens),
    )  # fmt: skip
    weights, kept = WEIGHTS[type(cfg)](batch, cfg)
    assert weights.isfinite().all()
    assert (weights >= 0).all()
    for choice in (OffPolicySequenceMask(), Veto(), FailureVeto()):
        kept = kept & FILTERS[type(choice)](batch, choice)
    assert not (kept & ~mask).any()
    for space in ("log", "probability"):
        assert PROXIMALS[InterpolatedProximal](batch, InterpolatedProximal(space=space))[mask].isfinite().all()
