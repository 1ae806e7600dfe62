"""What the curriculum remembers of judged groups: beliefs, groups to use again, successes, parts of groups. Pure.

A source is offered only while it is young enough: sampled by version o, offered by commit c, it is trained at a
version t that is at most c + max_staleness, because the ticket is claimed with weights no newer than c. So o + max_age
>= c + max_staleness keeps t - o <= max_age by construction. The trainer checks again, token by token. That no source
is used too often is promised where groups are accepted (data_contracts/uses.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from data_contracts.curriculum import Curriculum, Place, Source
from data_contracts.curriculum_config import AeroSampler, CurriculumConfig, PilotCommitSampler
from data_contracts.difficulty import Difficulty, unknown
from data_contracts.records import Outcome, Verdict

if TYPE_CHECKING:
    from data_contracts.config import RunConfig


@dataclass(frozen=True)
class Drawing:
    """The numbers that decide what is drawn; the same in every process of a run."""

    config: CurriculumConfig
    seed: int
    groups_per_step: int
    samples_per_group: int
    max_staleness: int | None
    horizon: int
    """Places of the queue: more tickets than are claimed under one state."""

    @classmethod
    def of(cls, config: "RunConfig") -> "Drawing":
        """Return the rules that a resolved config contains."""
        staleness, size = config.staleness, config.groups_per_step
        ahead = staleness.max_unsettled or size if staleness.bound is None else (staleness.bound + 1) * size
        return cls(
            config.curriculum,
            config.seed,
            config.groups_per_step,
            config.samples_per_group,
            staleness.bound,
            4 * (ahead + size),
        )

    def random(self, version: int) -> Random:
        """Return the stream of random numbers behind the state of a commit."""
        return Random(f"{self.seed}/{version}")

    def is_young(self, source: Source, max_age: int, version: int) -> bool:
        """Whether a source that commit `version` offers cannot get too old before it is trained."""
        return source.oldest_version + max_age >= version + (self.max_staleness or 0)

    def may_offer(self, source: Source, state: Curriculum, version: int) -> bool:
        """Whether nobody can be holding the source by a claim under a state that the trainer has not seen yet."""
        if self.max_staleness == 0 or source.ticket not in state.offered:
            return True
        return version - state.offered[source.ticket] > (self.max_staleness or 1)


class News(NamedTuple):
    """What the trainer of a commit has seen since the commit before."""

    known: Mapping[int, Place]
    """Ticket to what it was given, for all that wait for a verdict or have got one since."""
    judged: tuple[Verdict, ...]
    """In ticket order."""
    refused: frozenset[int]
    """Tickets refused by trainers."""


@dataclass
class Memory:
    """The part of the state that is learned; a copy that one commit's news are added to."""

    difficulty: dict[int, Difficulty] = field(default_factory=dict)
    kept: list[Source] = field(default_factory=list)
    successes: dict[int, Source] = field(default_factory=dict)
    parts: dict[int, Source] = field(default_factory=dict)

    @staticmethod
    def of(state: Curriculum) -> "Memory":
        """Return what a state remembers."""
        return Memory(dict(state.difficulty), list(state.kept), dict(state.successes), dict(state.parts))


def learn(state: Curriculum, news: News, drawing: Drawing, version: int) -> Memory:
    """Return what is remembered once commit `version` has learned the news."""
    memory, config = Memory.of(state), drawing.config
    for verdict in news.judged:
        place = news.known.get(verdict.ticket)
        if place is None or place.is_copy or verdict.outcome is None or not verdict.outcome.num_samples:
            continue
        _learn_group(memory, place, verdict, verdict.outcome, drawing, version)
    copied = [place.source.ticket for place in news.known.values() if place.is_copy and place.source is not None]
    before = {place.source.ticket for place in state.open.values() if place.is_copy and place.source is not None}
    new = [ticket for ticket in copied if ticket not in before]
    memory.kept = [
        source.model_copy(update={"uses": source.uses + new.count(source.ticket)})
        for source in memory.kept
        if source.ticket not in news.refused
    ]
    _forget(memory, config, drawing, version)
    return memory


def _learn_group(
    memory: Memory, place: Place, verdict: Verdict, outcome: Outcome, drawing: Drawing, version: int
) -> None:
    prompt, config = place.prompt, drawing.config
    belief = memory.difficulty.get(prompt) or unknown(config.difficulty)
    belief = belief.after(outcome.num_passed, outcome.num_samples, version, config.difficulty)
    memory.difficulty[prompt] = belief
    memory.parts.pop(prompt, None)
    if verdict.batch is None or verdict.group is None or verdict.group.oldest_version < 0:
        return
    source = Source(
        ticket=verdict.ticket, prompt=prompt, batch=verdict.batch, group=verdict.group, score=outcome.spread
    )
    if is_part(place, verdict, outcome, config):
        memory.parts[prompt] = source
    if config.reuse is not None and verdict.accepted and outcome.spread > 0 and not verdict.group.joined:
        memory.kept.append(source)
    if config.successes is not None and belief.mean < config.successes.below and outcome.num_passed:
        memory.successes[prompt] = source.model_copy(update={"group": verdict.group.model_copy(update={"joined": ()})})
    elif config.successes is not None and belief.mean >= config.successes.below:
        memory.successes.pop(prompt, None)


def is_part(place: Place, verdict: Verdict, outcome: Outcome, config: CurriculumConfig) -> bool:
    """Whether a judged group is to be gone on with under a later ticket."""
    sampler = config.sampler
    if verdict.accepted or verdict.group is None:
        return False
    if isinstance(sampler, PilotCommitSampler):
        is_pilot = place.samples > 0 and place.source is None
        return is_pilot and sampler.hard <= outcome.num_passed / outcome.num_samples <= sampler.easy
    if isinstance(sampler, AeroSampler):
        num_joined = sum(len(joined.rows) for joined in verdict.group.joined)
        num_passed = sum(r >= config.difficulty.solved_at for joined in verdict.group.joined for r in joined.rewards)
        return outcome.num_passed + num_passed == 0 and outcome.num_samples + num_joined < sampler.limit
    return False


def _forget(memory: Memory, config: CurriculumConfig, drawing: Drawing, version: int) -> None:
    """Drop what is too old or too much."""
    if config.reuse is not None:
        reuse = config.reuse
        young = [s for s in memory.kept if s.uses < reuse.max_uses and drawing.is_young(s, reuse.max_age, version)]
        memory.kept = sorted(young, key=lambda source: (-source.score, -source.ticket))[: reuse.size]
    if config.successes is not None:
        age = config.successes.max_age
        memory.successes = {p: s for p, s in memory.successes.items() if drawing.is_young(s, age, version)}
    if isinstance(config.sampler, PilotCommitSampler | AeroSampler):
        age = config.sampler.max_age
        memory.parts = {p: s for p, s in memory.parts.items() if drawing.is_young(s, age, version)}


def interleave(places: list[Place], state: Curriculum, memory: Memory, drawing: Drawing, version: int) -> list[Place]:
    """Return the places with earlier groups among them: `reuse.share` of all, drawn in proportion to their scores."""
    reuse = drawing.config.reuse
    if reuse is None:
        return places
    free = [source for source in memory.kept if drawing.may_offer(source, state, version)]
    free = [source for source in free if source.ticket not in _in_hand(state, memory)]
    random = drawing.random(version)
    mixed: list[Place] = []
    queue = iter(places)
    while True:
        number = len(mixed)
        if free and int((number + 1) * reuse.share) > int(number * reuse.share):
            source = random.choices(free, [source.score for source in free])[0]
            free.remove(source)
            mixed.append(Place(prompt=source.prompt, source=source, is_copy=True))
            continue
        place = next(queue, None)
        if place is None:
            return mixed
        mixed.append(place)


def _in_hand(state: Curriculum, memory: Memory) -> set[int]:
    return {place.source.ticket for place in state.open.values() if place.is_copy and place.source is not None}


def measure(state: Curriculum) -> dict[str, float]:
    """Return what a commit tells of its curriculum state."""
    rates = [belief.mean for belief in state.difficulty.values()]
    counts = {
        "curriculum/known_prompts": len(rates),
        "curriculum/kept_groups": len(state.kept),
        "curriculum/successes": len(state.successes),
        "curriculum/parts": len(state.parts),
    }
    told = {name: float(count) for name, count in counts.items() if count}
    return told | ({"curriculum/pass_rate": sum(rates) / len(rates)} if rates else {})
