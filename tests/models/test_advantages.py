import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.algorithm import (
    AsymRe,
    Ddca,
    Gd2po,
    Gdpo,
    Gpg,
    Grpo,
    MaxRl,
    McGrpo,
    Opo,
    Opob,
    Otb,
    PassAtK,
    ReinforcePlusPlus,
    Remax,
    Rloo,
)
from data_contracts.errors import ContractError
from models.advantages import ADVANTAGES, Outcomes


def outcomes(rewards, group, lengths=None, components=None) -> Outcomes:
    names = sorted(set(group), key=list(group).index)
    lengths = lengths or [1] * len(rewards)
    sequence = torch.repeat_interleave(torch.arange(len(rewards)), torch.tensor(lengths))
    return Outcomes(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor([names.index(g) for g in group]),
        len(names),
        torch.ones(len(sequence), dtype=torch.bool),
        sequence,
        {name: torch.tensor(values, dtype=torch.float64) for name, values in (components or {}).items()},
    )


def advantages(cfg, *args, **kwargs) -> torch.Tensor:
    return ADVANTAGES[type(cfg)](outcomes(*args, **kwargs), cfg)


def assert_close(got, want):
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_grpo_matches_the_reference_but_gives_a_lone_sample_nothing(reference):
    case = reference("adv.grpo_std")
    got = advantages(Grpo(eps=1e-6), case["inputs"]["rewards"], case["inputs"]["group"])
    assert_close(got, [*case["expected"]["adv"][:-1], 0.0])


def test_grpo_without_std_is_dr_grpo(reference):
    case = reference("adv.dr_grpo")
    got = advantages(Grpo(std="none"), case["inputs"]["rewards"], case["inputs"]["group"])
    assert_close(got, [*case["expected"]["adv"][:-1], 0.0])


@pytest.mark.parametrize(
    ("std", "divisor"), [("unbiased", math.sqrt(1 / 3)), ("biased", 0.5), ("batch", math.sqrt(1 / 3))]
)
def test_grpo_divides_by_the_chosen_deviation(std, divisor):
    assert_close(advantages(Grpo(std=std, eps=0), [1, 0, 0, 1], "aaaa"), [x / divisor for x in (0.5, -0.5, -0.5, 0.5)])


def test_batch_deviation_spans_all_groups():
    got = advantages(Grpo(std="batch", eps=0), [1.0, 0.0, 5.0, 5.0], "aabb")
    std = torch.tensor([1.0, 0.0, 5.0, 5.0], dtype=torch.float64).std().item()
    assert_close(got, [0.5 / std, -0.5 / std, 0.0, 0.0])


def test_rloo_compares_with_the_others(reference):
    case = reference("adv.rloo")
    got = advantages(Rloo(), case["inputs"]["rewards"], case["inputs"]["group"])
    assert_close(got, case["expected"]["adv_vectorized_singleton_zero"])


def test_opo_weights_the_baseline_by_length(reference):
    case = reference("adv.opo")
    per_token = advantages(Opo(), case["inputs"]["rewards"], case["inputs"]["group"], case["inputs"]["lengths"])
    first = torch.tensor([0, 4, 6, 12])
    assert_close(per_token[first], case["expected"]["adv"])


def test_mc_grpo_uses_the_lower_median(reference):
    case = reference("adv.mc_grpo")
    rewards = case["inputs"]["rewards"]
    assert_close(advantages(McGrpo(), rewards, "aaaaa"), case["expected"]["adv_math_script"])
    assert_close(advantages(McGrpo(rescale=True), rewards, "aaaaa"), case["expected"]["adv_gsm_script_rescaled"])


def test_opob_matches_the_reference(reference):
    case = reference("adv.vcpo_opob")
    inputs, expected = case["inputs"], case["expected"]
    weights = [n**2 * w**2 for n, w in zip(inputs["score_grad_norm"], inputs["seq_is_ratio"], strict=True)]
    assert weights == pytest.approx(expected["weights"])
    given_weights = replace(outcomes(inputs["rewards"], "aaa"), score_weights=torch.tensor(weights).double())
    assert_close(ADVANTAGES[Opob](given_weights, Opob(normalize=False)), expected["reward_minus_baseline"])
    want = [x / expected["group_std_biased"] for x in expected["reward_minus_baseline"]]
    assert_close(ADVANTAGES[Opob](given_weights, Opob()), want)


def test_gdpo_normalizes_each_component_and_then_the_step(reference):
    case = reference("adv.gdpo_seq")
    rows = case["inputs"]["rewards_per_func"]
    components = {"a": [row[0] for row in rows], "b": [row[1] for row in rows]}
    got = advantages(Gdpo(), [sum(row) for row in rows], "aaaabbbb", components=components)
    assert_close(got, case["expected"]["adv"])


def test_gdpo_names_a_component_that_is_not_there():
    with pytest.raises(ContractError, match="style"):
        advantages(Gdpo(component_weights={"style": 2.0}), [0, 1], "aa", components={"correct": [0, 1]})


def test_gdpo_skips_missing_values():
    nan = float("nan")
    got = advantages(Gdpo(), [0, 1, 0, 1], "aaaa", components={"a": [0, 1, 0, 1], "b": [nan, nan, nan, nan]})
    assert got.isfinite().all()
    assert got[1] > 0 > got[0]


@pytest.mark.parametrize(
    ("cfg", "want"),
    [
        (MaxRl(), [1, -1, -1, 1]),
        (AsymRe(shift=-0.1), [0.6, -0.4, -0.4, 0.6]),
        (Gpg(), [1, -1, -1, 1]),
    ],
)
def test_short_formulas_by_hand(cfg, want):
    assert_close(advantages(cfg, [1.0, 0.0, 0.0, 1.0], "aaaa"), [float(x) for x in want])


def test_maxrl_is_zero_without_any_success():
    assert advantages(MaxRl(), [0, 0, -1, 1], "aaaa").tolist() == [0, 0, 0, 0]


def test_reinforce_pp_whitens_over_tokens():
    got = advantages(ReinforcePlusPlus(), [1.0, 0.0], "ab", [2, 2])
    assert got.tolist() == pytest.approx([0.8660254, 0.8660254, -0.8660254, -0.8660254], abs=1e-6)


def test_reinforce_pp_baseline_centers_groups_first():
    plain = advantages(ReinforcePlusPlus(group_baseline=True), [5.0, 4.0, 1.0, 0.0], "aabb")
    assert plain.tolist() == pytest.approx([0.8660254, -0.8660254, 0.8660254, -0.8660254], abs=1e-6)


def scalar_gd2po(components, groups, lengths, drop, threshold):
    """Per-token advantages by plain loops."""
    size = len(groups)
    rows = [[] for _ in range(size)]
    for values in components:
        for i in range(size):
            own = [values[j] for j in range(size) if groups[j] == groups[i]]
            mean = sum(own) / len(own)
            std = math.sqrt(sum((v - mean) ** 2 for v in own) / (len(own) - 1))
            rows[i].append((values[i] - mean) / (std + 1e-6))
    kept = []
    for row in rows:
        conflict = any(v > 1e-8 for v in row) and any(v < -1e-8 for v in row)
        if drop == "weak":
            conflict = conflict and abs(sum(row)) / (sum(abs(v) for v in row) + 1e-8) < threshold
        kept.append(not conflict)
    share = [sum(kept[j] for j in range(size) if groups[j] == g) / groups.count(g) for g in groups]
    tokens = [sum(rows[i]) * share[i] for i in range(size) if kept[i] for _ in range(lengths[i])]
    mean = sum(tokens) / len(tokens)
    spread = math.sqrt(sum((t - mean) ** 2 for t in tokens) / (len(tokens) - 1) + 1e-8)
    return [
        (sum(rows[i]) * share[i] - mean) / spread if kept[i] else 0.0 for i in range(size) for _ in range(lengths[i])
    ]


@pytest.mark.parametrize(("drop", "threshold"), [("all", 0.2), ("weak", 0.2), ("weak", 0.9)])
def test_gd2po_equals_plain_loops(drop, threshold):
    components = [[1.0, 0.0, 1.0, 0.0, 0.2, 0.9], [0.0, 1.0, 1.0, 0.0, 0.1, 0.8]]
    lengths = [1, 2, 1, 3, 2, 1]
    got = advantages(
        Gd2po(drop=drop, threshold=threshold),
        [0.0] * 6,
        "aaaabb",
        lengths,
        components={"x": components[0], "y": components[1]},
    )
    assert_close(got, scalar_gd2po(components, list("aaaabb"), lengths, drop, threshold))


def test_gd2po_without_any_agreement_is_zero():
    got = advantages(Gd2po(drop="all"), [0.0, 0.0], "aa", components={"x": [1.0, 0.0], "y": [0.0, 1.0]})
    assert got.tolist() == [0.0, 0.0]


def test_ddca_by_hand():
    """Two right answers of 100 and 300 tokens: +-0.231, by beta +-0.046."""
    accuracy_only = advantages(Ddca(beta=0), [1, 1], "aa", [100, 300])
    got = advantages(Ddca(), [1, 1], "aa", [100, 300])
    assert accuracy_only.abs().max() == 0
    assert got[[0, -1]].tolist() == pytest.approx([0.2 * 0.2310586, -0.2 * 0.2310586])


def test_only_the_best_of_a_group_counts_for_pass_at_k():
    rewards = [0.5, 1.0, 0.0, 1.0, 1.0, 2.0]
    got = advantages(PassAtK(eps=0), rewards, "aaabbc")
    assert_close(got, [0.0, 0.5 / 0.5, 0.0, 0.0, 0.0, 0.0])
    assert_close(advantages(PassAtK(normalize=False), rewards, "aaabbc"), [0.0, 0.5, 0.0, 0.0, 0.0, 0.0])


def test_ddca_mixes_accuracy_and_length():
    lengths = [1, 3, 7, 2]
    got = advantages(Ddca(beta=0.5), [1.0, 1.0, 0.0, 1.0], "aaaa", lengths)[torch.tensor([0, 1, 4, 11])]
    right = [1, 3, 2]
    mean, std = 2.0, math.sqrt(2 / 3)
    squashed = [1 / (1 + math.exp(-(n - mean) / std)) for n in right]
    middle = sum(squashed) / 3
    length = [-(s - middle) * 3 / 4 for s in squashed]
    accuracy = math.sqrt(3) / 4 / (3 / 4) * 1.0
    want = [accuracy + 0.5 * length[0], accuracy + 0.5 * length[1], -math.sqrt(3), accuracy + 0.5 * length[2]]
    assert got.tolist() == pytest.approx(want, abs=1e-6)


def test_ddca_leaves_one_out_in_both_parts():
    got = advantages(Ddca(beta=1.0, baseline="leave_one_out"), [1.0, 1.0, 0.0], "aaa", [1, 3, 2])
    low, high = (1 / (1 + math.exp(-z)) for z in (-1, 1))
    want = [0.5 - (low - high) * 2 / 3, 0.5 - (high - low) * 2 / 3, -1.0]
    assert got[torch.tensor([0, 1, 4])].tolist() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [1.0, 0.0]])
def test_ddca_has_no_length_part_without_two_right_answers(rewards):
    assert_close(advantages(Ddca(), rewards, "aa", [1, 5]), advantages(Ddca(beta=0), rewards, "aa", [1, 5]).tolist())


def test_remax_compares_with_the_greedy_response_token_by_token():
    """Greedy rewards 0.25 and none; a penalty taken off on the way counts for what comes before it."""
    given = replace(
        outcomes([1.0, 0.0, 0.25, 1.0, 0.0], "aaabb", [2, 1, 3, 1, 1]),
        greedy=torch.tensor([False, False, True, False, False]),
        mask=torch.tensor([True] * 3 + [False] * 3 + [True] * 2),
        penalty=torch.tensor([0.5, 0.125, 0.0, 9.0, 9.0, 9.0, 0.0, 0.0]).double(),
    )
    got = ADVANTAGES[Remax](given, Remax())
    assert_close(got, [1 - 0.625 - 0.25, 1 - 0.125 - 0.25, -0.25, 0, 0, 0, 0, 0])
    assert ADVANTAGES[Remax](replace(given, greedy=None), Remax()).tolist() == [0.0] * 8


def test_opob_can_divide_norms_by_squared_lengths():
    lengths = [2, 1, 4]
    whole = replace(outcomes([1.0, 0.0, 1.0], "aaa", lengths), score_weights=torch.tensor([4.0, 1.0, 16.0]).double())
    per_token = replace(whole, score_weights=torch.ones(3).double())
    got, want = Opob(normalize=False, by_length=True), Opob(normalize=False)
    assert torch.equal(ADVANTAGES[Opob](whole, got), ADVANTAGES[Opob](per_token, want))


def test_the_optimal_baseline_of_a_place_by_hand():
    """Two responses of two tokens and one: weights 1, 3 and 0.5; places 0: (1 0.5 + 0 1)/(1.5), 1: one alone."""
    given = replace(outcomes([1.0, 0.0], "aa", [2, 1]), token_scores=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))
    assert_close(ADVANTAGES[Otb](given, Otb()), [1 - 1 / (1.5 + 1e-8), 0.0, -1 / (1.5 + 1e-8)])


def scalar_otb(rewards, groups, masks, scores, penalty):
    """Per-token advantages [S][T] by plain loops over absolute positions."""
    size = range(len(rewards))
    earned, weights = [], []
    for i in size:
        places = [t for t, m in enumerate(masks[i]) if m]
        token = [(rewards[i] if places and t == places[-1] else 0.0) - penalty[i][t] for t in range(len(masks[i]))]
        earned.append({t: sum(token[u] for u in places if u >= t) for t in places})
        weights.append({t: sum(scores[i][u] for u in places if u <= t) for t in places})
    found = []
    for i in size:
        row = [0.0] * len(masks[i])
        for t in earned[i]:
            others = [j for j in size if groups[j] == groups[i] and t in earned[j]]
            below = sum(weights[j][t] for j in others) + 1e-8
            baseline = sum(earned[j][t] * weights[j][t] for j in others) / below
            if groups.count(groups[i]) == 1:
                baseline = 0.0
            row[t] = earned[i][t] - baseline
        found.append(row)
    return found


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_optimal_token_baseline_equals_plain_loops(data):
    number = data.draw(st.integers(1, 6))
    groups = sorted(data.draw(st.lists(st.sampled_from("abc"), min_size=number, max_size=number)))
    masks = data.draw(st.lists(st.lists(st.booleans(), max_size=5), min_size=number, max_size=number))
    rewards = data.draw(st.lists(st.floats(-2, 2), min_size=number, max_size=number))
    values = st.floats(0.01, 3)
    scores = [data.draw(st.lists(values, min_size=len(m), max_size=len(m))) for m in masks]
    penalty = [data.draw(st.lists(values, min_size=len(m), max_size=len(m))) for m in masks]
    flat = lambda rows: torch.tensor([x for row in rows for x in row], dtype=torch.float64)  # noqa: E731
    given_scores = replace(
        outcomes(rewards, groups, [len(m) for m in masks]),
        mask=flat(masks).bool(),
        token_scores=flat(scores),
        penalty=flat(penalty),
    )
    got = ADVANTAGES[Otb](given_scores, Otb())
    assert got.tolist() == pytest.approx(flat(scalar_otb(rewards, groups, masks, scores, penalty)).tolist(), abs=1e-5)


GROUP_RELATIVE = [
    Grpo(),
    Grpo(std="biased"),
    Grpo(std="batch"),
    Grpo(std="none"),
    Rloo(),
    Opo(),
    MaxRl(),
    McGrpo(),
    Gdpo(),
    Gpg(),
    Opob(),
    Otb(),
    PassAtK(),
]


@pytest.mark.parametrize("cfg", GROUP_RELATIVE, ids=lambda cfg: f"{cfg.type}-{getattr(cfg, 'std', '')}")
@given(value=st.floats(-1e6, 1e6), size=st.integers(2, 9))
@settings(max_examples=30, deadline=None)
def test_equal_rewards_give_exactly_nothing(cfg, value, size):
    rewards = [value] * size + [0.0, 1.0]
    got = advantages(cfg, rewards, "a" * size + "bb", [3] * (size + 2), components={"r": rewards})
    assert (got[: 3 * size] == 0).all()


@pytest.mark.parametrize(
    "cfg",
    [
        *GROUP_RELATIVE,
        AsymRe(),
        ReinforcePlusPlus(),
        Gd2po(),
        Gd2po(drop="all"),
        Ddca(),
        Ddca(baseline="leave_one_out"),
    ],
    ids=lambda cfg: cfg.type,
)
@given(rewards=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12), data=st.data())
@settings(max_examples=50, deadline=None)
def test_finite_rewards_give_finite_advantages(cfg, rewards, data):
    group = data.draw(st.lists(st.sampled_from("abc"), min_size=len(rewards), max_size=len(rewards)))
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=len(rewards), max_size=len(rewards)))
    got = advantages(cfg, rewards, group, lengths, components={"r": rewards})
    assert got.isfinite().all()
    assert len(got) == sum(lengths)
