"""Samplers draw from what is believed of prompts, and beliefs follow what was judged."""

import math
import random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts import curriculum_config as configs
from data_contracts.curriculum import Curriculum, Place, Source
from data_contracts.curriculum_config import CurriculumConfig, DifficultyConfig, InOrder
from data_contracts.difficulty import Difficulty, unknown
from data_contracts.records import BatchRef, GroupRef
from data_contracts.reuse import Drawing, Memory, interleave
from data_contracts.samplers import SAMPLERS, View, rank_pool

PRIOR = DifficultyConfig()
BATCH = BatchRef(key="batch/0.arrow", num_bytes=1, sha256="", num_rows=4)


def view(beliefs: dict[int, Difficulty], *, busy=(), parts=None, version: int = 10, seed: int = 0) -> View:
    return View(beliefs, PRIOR, frozenset(busy), parts or {}, version, random.Random(seed))


def source(ticket: int, prompt: int = 0, score: float = 1.0, version: int = 9) -> Source:
    group = GroupRef(ticket=ticket, attempt=0, first_row=0, num_rows=4, oldest_version=version)
    return Source(ticket=ticket, prompt=prompt, batch=BATCH, group=group, score=score)


def prompts(places: list[Place]) -> list[int]:
    return [place.prompt for place in places]


def sampler(kind: str, **fields):
    return CurriculumConfig.model_validate({"sampler": {"type": kind, **fields}}).sampler


def test_every_configurable_sampler_has_a_function():
    union, _ = get_args(configs.Sampler)
    assert set(get_args(union)) == {*SAMPLERS, InOrder}


def test_a_group_moves_the_belief_by_its_samples_and_earlier_ones_decay():
    seen = unknown(PRIOR).after(3, 4, 1, DifficultyConfig(decay=0.9, forget=1.0))
    assert (seen.passes, seen.fails) == pytest.approx((3.9, 1.9))
    assert seen.mean == pytest.approx(0.672, abs=1e-3)
    assert seen.last_rate == 0.75


@settings(max_examples=100, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 20)), max_size=20),
    decay=st.floats(0, 1),
    forget=st.floats(0, 1),
)
def test_beliefs_are_distributions_and_what_nobody_looks_at_becomes_unknown(groups, decay, forget):
    config = DifficultyConfig(decay=decay, forget=forget)
    belief, version = unknown(config), 0
    for passed, wait in groups:
        version += wait
        belief = belief.after(passed, 8, version, config)
        assert belief.passes > 0
        assert belief.fails > 0
        assert 0 < belief.mean < 1
    later = belief.now(version + 10_000, config)
    if forget < 0.99:
        assert later.mean == pytest.approx(unknown(config).mean, abs=1e-3)
    assert abs(later.mean - 0.5) <= abs(belief.mean - 0.5) + 1e-9


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["uniform", "thompson", "window", "pilot_commit", "aero"]),
    pool=st.integers(1, 30),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_every_sampler_draws_each_prompt_of_the_pool_once_and_the_same_again(kind, pool, seed, data):
    some = st.lists(st.integers(0, pool - 1), unique=True)
    beliefs = {p: Difficulty(1 + p, 2.0, p % 5, 4, 9) for p in data.draw(some)}
    busy = data.draw(some)
    parts = {p: source(100 + p, p) for p in data.draw(some)}
    config = sampler(kind, pool=pool)
    places = rank_pool(config, view(beliefs, busy=busy, parts=parts, seed=seed))
    assert sorted(prompts(places)) == list(range(pool))
    assert places == rank_pool(config, view(beliefs, busy=busy, parts=parts, seed=seed))
    if kind in ("uniform", "thompson", "window"):
        assert set(prompts(places)[pool - len(busy) :]) == set(busy), "what is being worked on comes last"


def test_thompson_prefers_prompts_that_pass_about_half_of_the_time():
    beliefs = {0: Difficulty(50, 1, 4, 4, 9), 1: Difficulty(1, 50, 0, 4, 9), 2: Difficulty(25, 25, 2, 4, 9)}
    config = sampler("thompson", pool=3)
    assert all(prompts(rank_pool(config, view(beliefs, seed=seed)))[0] == 2 for seed in range(50))
    first = {prompts(rank_pool(config, view({}, seed=seed)))[0] for seed in range(50)}
    assert first == {0, 1, 2}, "what is unknown is drawn at random"


def test_the_window_takes_the_others_only_when_it_is_used_up():
    beliefs = {0: Difficulty(99, 1, 4, 4, 9), 1: Difficulty(1, 9, 0, 4, 9), 2: Difficulty(5, 5, 2, 4, 9)}
    ranked = prompts(rank_pool(sampler("window", pool=4), view(beliefs)))
    assert set(ranked[:2]) == {2, 3}
    assert ranked[2:] == [1, 0], "nearest to the window first"


def test_pilots_go_before_the_groups_they_decide_about():
    beliefs = {
        0: Difficulty(1, 1, 4, 4, 9),  # always passes: for good
        1: Difficulty(1, 1, 0, 4, 9),  # too hard: rests
        2: Difficulty(1, 1, 0, 4, 1),  # was too hard, has rested
    }
    parts = {3: source(7, 3)}
    config = sampler("pilot_commit", pool=6, pilots=2, pilot_samples=2, rest=5)
    places = rank_pool(config, view(beliefs, parts=parts))
    assert [place.samples for place in places] == [2, 2, 0, 0, 0, 0]
    assert set(prompts(places)[:2]) <= {2, 4, 5}
    assert (places[2].prompt, places[2].source) == (3, parts[3])
    assert set(prompts(places)[4:]) == {0, 1}, "what rests comes last"


def test_aero_goes_on_with_what_has_passed_nothing_so_far():
    parts = {3: source(7, 3)}
    places = rank_pool(sampler("aero", pool=4, explore=4, more=2), view({}, parts=parts))
    assert (places[0].prompt, places[0].samples, places[0].source) == (3, 2, parts[3])
    assert [place.samples for place in places[1:]] == [4, 4, 4]


def drawing(share: float, eta: int = 1) -> Drawing:
    config = CurriculumConfig.model_validate({"reuse": {"share": share, "max_age": 20}})
    return Drawing(config, 0, 4, 4, eta, 40)


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0.01, 0.99), num_places=st.integers(0, 40), num_kept=st.integers(0, 10))
def test_earlier_groups_take_their_share_of_the_places_and_each_is_offered_once(share, num_places, num_kept):
    plain = [Place(prompt=prompt) for prompt in range(num_places)]
    memory = Memory(kept=[source(ticket, score=1 + ticket) for ticket in range(num_kept)])
    mixed = interleave(plain, Curriculum(), memory, drawing(share), 10)
    copies = [place.source.ticket for place in mixed if place.source is not None]
    assert [place for place in mixed if not place.is_copy] == plain
    assert len(copies) == len(set(copies)) <= num_kept
    for end in range(len(mixed) + 1):
        assert sum(place.is_copy for place in mixed[:end]) <= math.floor(end * share)


def test_what_a_state_has_offered_is_not_offered_again_while_somebody_may_hold_it():
    memory = Memory(kept=[source(5)])
    plain = [Place(prompt=prompt) for prompt in range(4)]
    held = Curriculum(offered={5: 9})
    assert not any(place.is_copy for place in interleave(plain, held, memory, drawing(0.5), 10))
    assert any(place.is_copy for place in interleave(plain, held, memory, drawing(0.5), 11))
    assert any(place.is_copy for place in interleave(plain, held, memory, drawing(0.5, eta=0), 10))
