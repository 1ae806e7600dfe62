import numpy as np
import pytest

from data_contracts.config import Branching
from tasks.branching import FROM_PROMPT, starts_from, trunk_of

IDS = np.array([5, 6, 7, 8, 9], np.int32)


def places(trunk, cfg, size, ids=IDS, logprobs=(-1.0, -3.0, -0.1, -5.0, -0.2)):
    found = starts_from(trunk, ids, np.array(logprobs), cfg, size)
    return {sample: (start.branch_of, len(start.prefix)) for sample, start in found.items()}


def test_samples_branch_off_the_trunks_in_turn():
    cfg = Branching(trunks=2)
    assert [trunk_of(sample, cfg) for sample in range(7)] == [-1, -1, 0, 1, 0, 1, 0]
    assert [trunk_of(sample, None) for sample in range(3)] == [-1, -1, -1]


def test_they_branch_off_evenly_or_where_a_token_was_unlikely():
    assert places(0, Branching(trunks=1), 5) == {1: (0, 1), 2: (0, 2), 3: (0, 3), 4: (0, 4)}
    assert places(1, Branching(trunks=2), 5) == {3: (1, 2)}
    unlikely = Branching(trunks=1, at="unlikely")
    assert places(0, unlikely, 4) == {1: (0, 3), 2: (0, 1), 3: (0, 4)}
    assert places(0, unlikely, 7)[5] == (0, 3)


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("at", ["evenly", "unlikely"])
def test_nothing_branches_off_a_response_of_less_than_two_tokens(length, at):
    found = starts_from(0, IDS[:length], np.zeros(length), Branching(trunks=1, at=at), 3)
    assert found == {1: FROM_PROMPT, 2: FROM_PROMPT}


@pytest.mark.parametrize("at", ["evenly", "unlikely"])
def test_a_branch_shares_at_least_one_token_and_leaves_at_least_one(at):
    for length in range(2, 9):
        for size in range(2, 12):
            cfg = Branching(trunks=1, at=at)
            for start in starts_from(0, np.arange(length, dtype=np.int32), np.zeros(length), cfg, size).values():
                assert 1 <= len(start.prefix) < length
                assert start.prefix.tolist() == list(range(len(start.prefix)))
