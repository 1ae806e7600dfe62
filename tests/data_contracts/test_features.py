"""Scalars derived from trajectories: the numbers worked by hand, nothing hidden by NaN."""

import math

import numpy as np
import pytest

from data_contracts import features
from data_contracts.trajectory import make_table
from tests.tasks.curation.build_group import row

NAN = math.nan
FAILED = {"finish_reason": "error", "error": "lost", "reward": NAN, "reward_error": "no response: lost"}


def test_features_of_a_batch_are_those_worked_by_hand() -> None:
    half_sampled = {
        "action_mask": [True, False, True],
        "behavior_logprobs": [-1.0, NAN, -3.0],
        "policy_versions": [4, -1, 2],
        "used_versions": [2, 4],
        "used_digests": ["a", "b"],
        "finish_reason": "length",
    }
    rows = [row(7, 0, [5, 9, 3], **half_sampled), row(7, 1, [], **FAILED), row(8, 0, [1] * 6), row(8, 2, [2] * 6)]
    table = features.derive(make_table(rows, "scored"), "scored").to_pydict()
    assert set(table) == set(features.FEATURES)
    assert table["num_tokens"] == [3, 0, 6, 6]
    assert table["num_sampled"] == [2, 0, 6, 6]
    assert table["min_token_id"] == [3, 0, 1, 2]
    assert table["max_token_id"] == [9, 0, 1, 2]
    assert table["logprob_mean"][0] == -2.0
    assert math.isnan(table["logprob_mean"][1])
    assert table["logprob_min"][0] == -3.0
    assert math.isnan(table["logprob_min"][1])
    assert table["oldest_version"] == [2, -1, 0, 0]
    assert table["num_versions"] == [2, 0, 1, 1]
    assert table["truncated"] == [1, 0, 0, 0]
    assert table["failed"] == [0, 1, 0, 0]
    assert table["reward_failed"] == [0, 1, 0, 0]
    assert table["repetition"] == [0.0, 0.0, 2 / 3, 2 / 3]
    assert table["zero_variance"] == [1, 1, 1, 1]
    assert table["n_nonfinite_logprobs"] == [0, 0, 0, 0]


def test_values_that_are_not_finite_are_counted() -> None:
    broken = row(0, 0, [1, 2, 3], behavior_logprobs=[-1.0, NAN, -math.inf], reward=math.inf)
    table = features.derive(make_table([broken, row(0, 1, [1])], "scored"), "scored").to_pydict()
    assert table["n_nonfinite_logprobs"] == [2, 0]
    assert table["n_nonfinite_rewards"] == [1, 0]
    assert table["logprob_mean"][0] == -1.0


def test_raw_features_are_those_that_need_no_reward() -> None:
    names = features.derive(make_table([row(0, 0, [1, 2])], "raw"), "raw").column_names
    assert set(names) == set(features.FEATURES) - set(features.SCORED_ONLY)


def test_a_batch_without_rows_has_features_without_rows() -> None:
    assert features.derive(make_table([row(0, 0, [1])], "raw").slice(0, 0), "raw").num_rows == 0


def test_features_of_a_slice_are_those_of_its_rows() -> None:
    table = make_table([row(i, 0, list(range(i, i + 9))) for i in range(4)], "scored")
    assert features.derive(table.slice(1, 2), "scored").equals(features.derive(table, "scored").slice(1, 2))


def jaccard(left: list[int], right: list[int], width: int) -> float:
    sets = [{tuple(tokens[i : i + width]) for i in range(len(tokens) - width + 1)} for tokens in (left, right)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@pytest.mark.parametrize("num_changed", [0, 30, 120, 400])
def test_resemblance_estimates_the_share_of_common_shingles(num_changed: int) -> None:
    rng = np.random.default_rng(num_changed)
    estimates, truths = [], []
    for _ in range(16):
        left = rng.integers(0, 1000, 400)
        right = left.copy()
        right[:num_changed] += 1000
        both = features.sketch(np.concatenate([left, right]), np.array([400, 400]), 4)
        estimates.append(features.resemblance(both[:1], both[1:])[0, 0])
        truths.append(jaccard(left.tolist(), right.tolist(), 4))
    assert abs(np.mean(estimates) - np.mean(truths)) < 0.05  # 16 estimates with an error of 0.06 each


def test_rows_too_short_for_a_shingle_resemble_nothing() -> None:
    short = features.sketch(np.array([1, 2, 1, 2]), np.array([2, 2]), 4)
    assert features.resemblance(short, short).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_fingerprints_tell_order_length_and_values_apart() -> None:
    rows = [[1, 2, 3], [3, 2, 1], [1, 2], [1, 2, 3, 0], [], [0], [1, 2, 3]]
    prints = features.fingerprints(np.array(sum(rows, [])), np.array([len(r) for r in rows]))
    assert prints[0] == prints[6]
    assert len(set(prints.tolist())) == len(rows) - 1


def test_repetition_counts_what_came_before_in_the_same_row_only() -> None:
    rows = [[1, 2, 1, 2, 1], [1, 2, 1, 2], [9]]
    shares = features.repetition(np.array(sum(rows, [])), np.array([5, 4, 1]), 2)
    assert shares.tolist() == [2 / 4, 1 / 3, 0.0]
