"""What each rule finds, and what it spares."""

import numpy as np
import pytest

from data_contracts.config import DuplicateRule, LengthRule, RepetitionRule, TruncationRule
from tasks.curation.duplicates import Recent, duplicates
from tasks.curation.length import length, truncation
from tasks.curation.repetition import repetition
from tests.tasks.curation.build_group import different, group_of

ALONE = Recent(())


def test_length_finds_what_is_too_short_or_too_long() -> None:
    group = group_of([[5] * n for n in (1, 2, 3, 4)])
    assert length(group, LengthRule(min_tokens=2, max_tokens=3)).tolist() == [True, False, False, True]
    assert not length(group, LengthRule()).any()


def test_truncation_finds_what_was_cut_off() -> None:
    group = group_of([[5], [6]], {1: {"finish_reason": "length"}})
    assert truncation(group, TruncationRule()).tolist() == [False, True]


def test_repetition_finds_circles_and_spares_short_responses() -> None:
    circle, straight = [1, 2, 3, 4] * 16, different(1, 64)[0]
    group = group_of([circle, straight, circle[:31], straight[:32] + straight[:32]])
    assert repetition(group, RepetitionRule()).tolist() == [True, False, False, False]
    assert repetition(group, RepetitionRule(max_repeated=0.4)).tolist() == [True, False, False, True]


def test_of_equal_responses_the_first_one_stays() -> None:
    a, b = different(2)
    assert duplicates(group_of([a, b, a, a]), DuplicateRule(), ALONE).tolist() == [False, False, True, True]


def test_equal_short_answers_are_no_duplicates() -> None:
    assert not duplicates(group_of([[1] * 15] * 3), DuplicateRule(min_tokens=16), ALONE).any()


@pytest.mark.parametrize(("num_changed", "is_found"), [(0, True), (4, True), (60, False)])
def test_near_duplicates_are_found_by_what_they_share(num_changed: int, is_found: bool) -> None:
    (tokens,) = different(1, 200)
    other = [token + 1 if i < num_changed else token for i, token in enumerate(tokens)]
    group = group_of([tokens, other])
    assert duplicates(group, DuplicateRule(similarity=0.8), ALONE).tolist() == [False, is_found]
    assert duplicates(group, DuplicateRule(), ALONE).tolist() == [False, num_changed == 0]


def test_what_is_like_a_left_out_row_is_judged_against_those_that_stay() -> None:
    # Neighbours share 0.66 of their shingles, the ends 0.43: only the middle one goes.
    (tokens,) = different(1, 400)
    middle = [token + 1 if i < 80 else token for i, token in enumerate(tokens)]
    end = [token + 1 if i < 160 else token for i, token in enumerate(tokens)]
    group = group_of([tokens, middle, end])
    assert duplicates(group, DuplicateRule(similarity=0.55), ALONE).tolist() == [False, True, False]


@pytest.mark.parametrize("similarity", [1.0, 0.9])
def test_responses_of_recent_groups_are_known_as_far_as_the_window_goes(similarity: float) -> None:
    rule = DuplicateRule(window=2, similarity=similarity)
    recent = Recent([rule])
    first, second, third = (different(2, seed=seed) for seed in range(3))
    for responses in (first, second, third):
        recent.add(group_of(responses))
    again = group_of([first[0], third[1]])
    assert duplicates(again, rule, recent).tolist() == [False, True]
    assert not duplicates(again, DuplicateRule(similarity=similarity), recent).any()


def test_a_copy_of_the_memory_leaves_the_memory_alone() -> None:
    rule = DuplicateRule(window=1)
    recent = Recent([rule])
    recent.copy().add(group_of(different(1)))
    assert recent.newest(1) == []
    assert np.array_equal(duplicates(group_of(different(1)), rule, recent), [False])
