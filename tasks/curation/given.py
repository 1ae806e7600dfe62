"""What the curriculum has given a ticket beside its prompt: earlier samples to join, and the task of a mere part.

Decided by the state that the ticket's claim names, so by committed state alone, in whatever order results arrive.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from data_contracts.config import RunConfig
from data_contracts.curriculum import Curriculum, Place, Source
from data_contracts.curriculum_config import AeroSampler, PilotCommitSampler
from data_contracts.errors import ContractError, ObjectMissing
from data_contracts.records import BatchRef, Joined, Outcome, Verdict
from infra.objects import get_batch
from infra.store import Store
from tasks.curation import chain
from tasks.curation.duplicates import Recent
from tasks.curation.group import Group
from tasks.reuse import good_rows_of, joined_rows

Given = Callable[[int], tuple[Place, Curriculum] | None]
"""Ticket to what it was given, and the state that says so."""


class Judge:
    """Judges groups of a run by themselves, with what their tickets were given."""

    def __init__(self, store: Store, config: RunConfig, given: Given) -> None:
        self._store, self._config, self._given = store, config, given
        self._alone = Recent(())

    def judge(self, group: Group, batch: BatchRef) -> Verdict:
        """Return the verdict on the good rows of one ticket."""
        curriculum = self._config.curriculum
        found = None if curriculum.is_plain or group.ref.reused is not None else self._given(group.ref.ticket)
        if found is None:
            return chain.verdict_of(chain.judge(group, self._config.curate, self._alone), batch)
        place, state = found
        if group.places.size:
            group = self._joined(group, place, state)
        outcome = outcome_of(group, curriculum.difficulty.solved_at)
        if why := self._is_only_a_part(group, place, outcome):
            verdict = chain.verdict_of(chain.Outcome(group, why, {}), batch)
            # Its samples are trained under a later ticket, so the verdict says where they are.
            return verdict.model_copy(update={"outcome": outcome, "batch": batch})
        verdict = chain.verdict_of(chain.judge(group, self._config.curate, self._alone), batch)
        return verdict.model_copy(update={"outcome": outcome})

    def _joined(self, group: Group, place: Place, state: Curriculum) -> Group:
        """Return the group with earlier parts of it and, where nothing has passed, with an earlier success."""
        sampler, successes = self._config.curriculum.sampler, self._config.curriculum.successes
        joined: list[Joined] = []
        if place.source is not None and isinstance(sampler, PilotCommitSampler | AeroSampler):
            joined = [*place.source.group.joined, *self._read(place.source, sampler.max_age, every=True)]
        group = replace(group, ref=group.ref.model_copy(update={"joined": tuple(joined)}))
        if successes is None or place.prompt not in state.successes or self._num_passed(group.all_rewards):
            return group
        success = self._read(state.successes[place.prompt], successes.max_age, every=False)
        return replace(group, ref=group.ref.model_copy(update={"joined": (*joined, *success)}))

    def _read(self, source: Source, max_age: int, *, every: bool) -> list[Joined]:
        """Return the good rows of an earlier group, or only the first that has passed; none that cannot be read."""
        try:
            table = get_batch(self._store, source.batch, "scored")
            rows = good_rows_of(table, source.group)
        except (ContractError, ObjectMissing):  # torn since: the group stands on its own samples
            return []
        if not every:
            rewards = table.column("reward").to_numpy()
            rows = [row for row in rows if self._num_passed(rewards[row : row + 1])][:1]
        return [joined_rows(table, source, rows, max_age, lent=not every)] if rows else []

    def _num_passed(self, rewards: np.ndarray) -> int:
        return int((rewards >= self._config.curriculum.difficulty.solved_at).sum())

    def _is_only_a_part(self, group: Group, place: Place, outcome: Outcome) -> str:
        """Return why a group is not trained by itself: more of it comes under a later ticket, or never will."""
        sampler, total = self._config.curriculum.sampler, group.all_rewards.size
        told = f"{self._num_passed(group.all_rewards)} of {total} samples passed"
        if not outcome.num_samples:
            return ""
        if isinstance(sampler, PilotCommitSampler) and place.samples and place.source is None:
            rate = outcome.num_passed / outcome.num_samples
            what = "easy" if rate > sampler.easy else "hard" if rate < sampler.hard else "promising"
            return f"pilot_{what}: {told}"
        if isinstance(sampler, AeroSampler) and place.samples and not self._num_passed(group.all_rewards):
            return f"explored: {told}, more are drawn" if total < sampler.limit else ""
        return ""


def outcome_of(group: Group, solved_at: float) -> Outcome:
    """Return what the ticket's own good rows came to."""
    rewards = group.of(group.rows.reward).astype(np.float64)
    return Outcome(
        num_samples=rewards.size,
        num_passed=int((rewards >= solved_at).sum()),
        spread=float(rewards.std()) if rewards.size else 0.0,
    )
