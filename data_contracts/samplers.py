"""Samplers: in which order the prompts of a pool are handed out, from what is known of them. Pure functions.

Prompts that are being worked on come last: they would be drawn again and again before anything is learned of them.
To add a sampler: a class in data_contracts/curriculum_config.py, a function here and a line of SAMPLERS.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from data_contracts.curriculum import Place, Source
from data_contracts.curriculum_config import (
    AeroSampler,
    DifficultyConfig,
    FromPool,
    PilotCommitSampler,
    ThompsonSampler,
    UniformSampler,
    WindowSampler,
)
from data_contracts.difficulty import Difficulty, unknown


@dataclass(frozen=True)
class View:
    """What a sampler draws from."""

    difficulty: Mapping[int, Difficulty]
    """Beliefs as of `version`."""
    prior: DifficultyConfig
    busy: frozenset[int]
    """Prompts of tickets that wait for their verdict."""
    parts: Mapping[int, Source]
    """Prompts with a part that may be gone on with."""
    version: int
    random: Random
    """Decided by the run's seed and the version alone."""

    def belief(self, prompt: int) -> Difficulty:
        """Return what is believed of a prompt."""
        return self.difficulty.get(prompt) or unknown(self.prior)


def uniform(sampler: UniformSampler, view: View) -> list[Place]:
    """Return the prompts of the pool in random order."""
    return [Place(prompt=prompt) for prompt in _ranked(range(sampler.pool), view, lambda _: 0.0)]


def thompson(sampler: ThompsonSampler, view: View) -> list[Place]:
    """Return the prompts by p (1 - p) of a pass rate p drawn from each posterior, largest first.

    Advantages of a group vanish where all pass or none; their expected spread is that of a Bernoulli variable.
    """

    def loss(prompt: int) -> float:
        belief = view.belief(prompt)
        rate = view.random.betavariate(belief.passes, belief.fails)
        return -rate * (1 - rate)

    return [Place(prompt=prompt) for prompt in _ranked(range(sampler.pool), view, loss)]


def window(sampler: WindowSampler, view: View) -> list[Place]:
    """Return the prompts whose expected pass rate is in the window, in random order, then the others, nearest first."""

    def distance(prompt: int) -> float:
        mean = view.belief(prompt).mean
        return max(sampler.low - mean, mean - sampler.high, 0.0)

    return [Place(prompt=prompt) for prompt in _ranked(range(sampler.pool), view, distance)]


def pilot_commit(sampler: PilotCommitSampler, view: View) -> list[Place]:
    """Return pilots, then whole groups of prompts whose pilots lie in between, then whole groups of any others.

    The last are what the first steps live on, and steps in which too few pilots lie in between.
    """
    fit = [prompt for prompt in range(sampler.pool) if prompt not in view.busy and prompt not in view.parts]
    awake = [prompt for prompt in fit if not _rests(view.belief(prompt), sampler, view.version)]
    view.random.shuffle(awake)
    pilots = [Place(prompt=prompt, samples=sampler.pilot_samples) for prompt in awake[: sampler.pilots]]
    commits = [Place(prompt=p, source=view.parts[p]) for p in _shuffled(view.parts, view) if p not in view.busy]
    used = {place.prompt for place in (*pilots, *commits)}
    rest = [prompt for prompt in range(sampler.pool) if prompt not in used]

    def tiredness(prompt: int) -> float:
        return float(_rests(view.belief(prompt), sampler, view.version))

    return [*pilots, *commits, *(Place(prompt=prompt) for prompt in _ranked(rest, view, tiredness))]


def aero(sampler: AeroSampler, view: View) -> list[Place]:
    """Return a few more samples for every prompt that has passed none so far, then first samples of the others."""
    more = [prompt for prompt in _shuffled(view.parts, view) if prompt not in view.busy]
    others = [prompt for prompt in range(sampler.pool) if prompt not in more]
    first = _ranked(others, view, lambda _: 0.0)
    return [
        *(Place(prompt=prompt, samples=sampler.more, source=view.parts[prompt]) for prompt in more),
        *(Place(prompt=prompt, samples=sampler.explore) for prompt in first),
    ]


SAMPLERS: dict[type, Callable[[Any, View], list[Place]]] = {
    UniformSampler: uniform,
    ThompsonSampler: thompson,
    WindowSampler: window,
    PilotCommitSampler: pilot_commit,
    AeroSampler: aero,
}
"""Configuration to function(sampler, view) -> places, first come first."""


def rank_pool(sampler: FromPool, view: View) -> list[Place]:
    """Return the places that a sampler fills, first come first; no prompt twice."""
    return SAMPLERS[type(sampler)](sampler, view)


def _rests(belief: Difficulty, sampler: PilotCommitSampler, version: int) -> bool:
    if not belief.count:
        return False
    if belief.passed == belief.count:
        return True
    is_apart = not sampler.hard <= belief.last_rate <= sampler.easy
    return is_apart and version - belief.at < sampler.rest


def _ranked(prompts: Iterable[int], view: View, loss: Callable[[int], float]) -> list[int]:
    """Return the prompts by loss, ties in random order; those that are being worked on last."""
    keyed = [(prompt in view.busy, loss(prompt), view.random.random(), prompt) for prompt in prompts]
    return [prompt for *_, prompt in sorted(keyed)]


def _shuffled(prompts: Iterable[int], view: View) -> list[int]:
    order = sorted(prompts)
    view.random.shuffle(order)
    return order
