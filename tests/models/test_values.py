import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.algorithm import FrozenValue, Gae
from models.advantages import ADVANTAGES, Outcomes
from models.values import gae, targets, token_rewards, traces


def flat(rows):
    return torch.tensor(rows, dtype=torch.float64).reshape(-1)


def sequences(rows):
    return torch.arange(len(rows)).repeat_interleave(len(rows[0]))


def junk(values, mask):
    """Replace what the mask hides by what must not be looked at."""
    return torch.where(mask, values, torch.nan)


def test_gae_matches_the_reference_whatever_stands_in_masked_places(reference):
    case = reference("adv.gae")
    rows, expected = case["inputs"]["mask"], case["expected"]
    mask, sequence = flat(rows).bool(), sequences(rows)
    rewards, values = (junk(flat(case["inputs"][name]), mask) for name in ("token_rewards", "values"))
    raw = gae(rewards, values, mask, sequence, discount=0.99, trace=0.95)
    torch.testing.assert_close(raw, flat(expected["adv_raw_on_mask"]), rtol=1e-9, atol=1e-12)
    returns = torch.where(mask, raw + values, 0.0)
    torch.testing.assert_close(returns, flat(expected["returns_on_mask"]), rtol=1e-9, atol=1e-12)
    cfg = Gae(discount=0.99, trace=0.95)
    got = targets(cfg, rewards, values, mask, sequence, 2)
    torch.testing.assert_close(got, returns, rtol=1e-9, atol=1e-12)


def test_advantages_are_whitened_after_the_returns_were_made(reference):
    case = reference("adv.gae")
    rows = case["inputs"]["mask"]
    mask, sequence = flat(rows).bool(), sequences(rows)
    inside = flat(case["inputs"]["token_rewards"])
    # the same token rewards as a reward on the last token and a penalty on each
    last = torch.tensor([3, 6])
    rewards = inside[last]
    penalty = -inside.clone()
    penalty[last] = 0
    outcomes = Outcomes(
        rewards, torch.tensor([0, 0]), 1, mask, sequence,
        penalty=junk(penalty, mask), values=junk(flat(case["inputs"]["values"]), mask).float(),
    )  # fmt: skip
    got = ADVANTAGES[Gae](outcomes, Gae(discount=0.99, trace=0.95))[mask]
    want = flat(case["expected"]["adv_whitened_on_mask"])[mask]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def scalar_gae(rewards, values, mask, discount, trace):
    """Work one sequence out, step by step."""
    found, following_value, following = [0.0] * len(mask), 0.0, 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            following = rewards[t] + discount * following_value - values[t] + discount * trace * following
            following_value = values[t]
            found[t] = following
    return found


@given(data=st.data(), discount=st.floats(0.1, 1), trace=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_gae_is_that_of_a_scalar_loop(data, discount, trace):
    rows = data.draw(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=4))
    mask = torch.tensor([m for row in rows for m in row], dtype=torch.bool)
    sequence = torch.tensor([i for i, row in enumerate(rows) for _ in row], dtype=torch.int64)
    numbers = st.lists(st.floats(-10, 10), min_size=len(mask), max_size=len(mask))
    rewards, values = data.draw(numbers), data.draw(numbers)
    own = torch.tensor([trace / (i + 1) for i in range(len(rows))])
    got = gae(torch.tensor(rewards, dtype=torch.float64), torch.tensor(values, dtype=torch.float64), mask, sequence,
              discount=discount, trace=own)  # fmt: skip
    want, start = [], 0
    for i, row in enumerate(rows):
        end = start + len(row)
        want += scalar_gae(rewards[start:end], values[start:end], row, discount, own[i].item())
        start = end
    assert got.tolist() == pytest.approx(want, abs=1e-9)


def test_rewards_land_on_the_last_token_of_the_loss_and_penalties_on_theirs():
    mask = torch.tensor([True, True, False, False, True, False])
    sequence = torch.tensor([0, 0, 0, 1, 2, 2])
    penalty = torch.tensor([0.5, 0.25, math.nan, math.nan, 1.0, math.nan])
    got = token_rewards(torch.tensor([1.0, 7.0, 2.0]), penalty, mask, sequence)
    assert got.tolist() == [-0.5, 0.75, 0, 0, 1.0, 0]
    assert token_rewards(torch.tensor([1.0]), None, torch.zeros(0, dtype=torch.bool), sequence[:0]).numel() == 0


def test_lambda_by_length_is_that_of_sao():
    mask = torch.ones(9, dtype=torch.bool)
    got = traces(Gae(trace_by_length=1.5), mask, torch.tensor([0] * 8 + [1]), 3)
    assert isinstance(got, torch.Tensor)
    assert got.tolist() == pytest.approx([1 - 1 / 12, 1 / 3, 1 / 3])
    assert traces(Gae(trace=0.9), mask, torch.zeros(9, dtype=torch.int64), 1) == 0.9


def test_returns_may_have_a_lambda_of_their_own():
    mask, sequence = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.3, 0.9, 0.2])
    got = targets(Gae(trace=0.0, return_trace=1.0), rewards, values, mask, sequence, 1)
    assert got.tolist() == pytest.approx([1.0, 1.0, 1.0])
    one_step = targets(Gae(trace=0.0), rewards, values, mask, sequence, 1)
    assert one_step.tolist() == pytest.approx([0.9, 0.2, 1.0], abs=1e-6)


def test_a_frozen_value_model_learns_one_step_ahead():
    mask = torch.tensor([True, False, True, True])
    rewards, values = torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([0.3, math.nan, 0.9, 0.2])
    got = targets(FrozenValue(discount=0.5), rewards, values, mask, torch.zeros(4, dtype=torch.int64), 1)
    assert got.tolist() == pytest.approx([0.45, 0.0, 0.1, 1.0], abs=1e-6)


def test_frozen_values_are_advantages_whitened_over_the_step():
    mask = torch.tensor([True, True, True, False])
    outcomes = Outcomes(torch.zeros(1), torch.tensor([0]), 1, mask, torch.zeros(4, dtype=torch.int64),
                        values=torch.tensor([0.2, 0.5, 0.9, math.nan]))  # fmt: skip
    got = ADVANTAGES[FrozenValue](outcomes, FrozenValue())
    assert got[:3].tolist() == pytest.approx([-0.949, -0.095, 1.044], abs=1e-3)


@pytest.mark.parametrize("cfg", [Gae(), Gae(whiten=False, trace_by_length=1.5), FrozenValue()], ids=lambda c: c.type)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_finite_values_give_finite_advantages(cfg, data):
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    count = sum(lengths)
    draw = lambda kind: data.draw(st.lists(kind, min_size=count, max_size=count))  # noqa: E731
    outcomes = Outcomes(
        torch.tensor(data.draw(st.lists(st.floats(-1e6, 1e6), min_size=len(lengths), max_size=len(lengths)))).double(),
        torch.zeros(len(lengths), dtype=torch.int64),
        1,
        torch.tensor(draw(st.booleans()), dtype=torch.bool),
        torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        values=torch.tensor(draw(st.floats(-1e6, 1e6, width=32)), dtype=torch.float32),
    )
    got = ADVANTAGES[type(cfg)](outcomes, cfg)
    assert len(got) == count
    assert got.isfinite().all()
