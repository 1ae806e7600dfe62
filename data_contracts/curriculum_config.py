"""The curriculum as data: which prompt a ticket gets, what is known of its difficulty, and what is used again.

The functions behind these classes stand in data_contracts/samplers.py and data_contracts/reuse.py.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from data_contracts.frozen import Frozen


class InOrder(Frozen):
    """Prompts in their seeded order, each once before any comes again."""

    type: Literal["order"] = "order"


class FromPool(Frozen):
    """A sampler that draws again and again from the first `pool` prompts of the order."""

    pool: int = Field(default=1024, gt=0, le=100_000)
    """Prompts drawn from. What is known of each that was drawn is part of every commit: some 50 bytes."""
    by_parts: ClassVar[bool] = False
    """Whether a group may be sampled in parts, under a ticket each, and trained under the last of them."""


class UniformSampler(FromPool):
    """Every prompt of the pool alike."""

    type: Literal["uniform"] = "uniform"


class ThompsonSampler(FromPool):
    """As in VADE: draw each prompt's pass rate p from its posterior, take those with the largest p (1 - p)."""

    type: Literal["thompson"] = "thompson"


class WindowSampler(FromPool):
    """Prompts whose estimated pass rate lies in a window come first, the others only when those are used up."""

    type: Literal["window"] = "window"
    low: float = Field(default=0.15, ge=0, le=1)
    """Lowest pass rate in the window."""
    high: float = Field(default=0.85, ge=0, le=1)
    """Highest pass rate in the window."""

    @model_validator(mode="after")
    def _is_window(self) -> "WindowSampler":
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}: no prompt can be in the window")
        return self


class PilotCommitSampler(FromPool):
    """As Pilot-Commit: a few samples tell whether a prompt is worth a whole group; both are trained as one group.

    A pilot is a ticket of its own that curation settles without training. A prompt in between gets, under a later
    ticket, a whole group, and its pilot's samples are trained with it.
    """

    type: Literal["pilot_commit"] = "pilot_commit"
    by_parts: ClassVar[bool] = True
    pilots: int = Field(default=8, gt=0)
    """Pilots handed out before the groups of each step."""
    pilot_samples: int = Field(default=4, gt=0)
    """Samples of a pilot."""
    easy: float = Field(default=0.75, ge=0, le=1)
    """A prompt whose pilot passes more often is left alone for `rest` commits, one that always passes for good."""
    hard: float = Field(default=0.125, ge=0, le=1)
    """A prompt whose pilot passes less often is left alone for `rest` commits."""
    rest: int = Field(default=50, ge=0)
    """Commits for which a prompt that is too easy or too hard is left alone."""
    max_age: int = Field(default=4, ge=0)
    """Bound in versions on the age of a pilot's samples when they are trained."""


class AeroSampler(FromPool):
    """As AERO: while no sample of a prompt has passed, more are drawn, a few at a time, up to `limit`.

    Every addition is a ticket of its own that names those before; the last one's group is all of them. Set
    curate.rules to `balance` for the choice of samples that goes with it.
    """

    type: Literal["aero"] = "aero"
    by_parts: ClassVar[bool] = True
    explore: int = Field(default=8, gt=0)
    """Samples of the first ticket."""
    more: int = Field(default=2, gt=0)
    """Samples of each further one."""
    limit: int = Field(default=16, gt=0)
    """Samples after which a prompt is given up for now."""
    max_age: int = Field(default=4, ge=0)
    """Bound in versions on the age of the earlier samples when they are trained."""


Sampler = Annotated[
    InOrder | UniformSampler | ThompsonSampler | WindowSampler | PilotCommitSampler | AeroSampler,
    Field(discriminator="type"),
]


class DifficultyConfig(Frozen):
    """What is believed of a prompt's pass rate: a Beta distribution that forgets."""

    solved_at: float = 0.5
    """A sample with this reward or more has passed."""
    prior_passes: float = Field(default=1.0, gt=0)
    """Passes that every prompt begins with."""
    prior_fails: float = Field(default=1.0, gt=0)
    """Failures that every prompt begins with."""
    decay: float = Field(default=0.9, ge=0, le=1)
    """What earlier counts are multiplied by whenever a group of the prompt is judged."""
    forget: float = Field(default=0.998, ge=0, le=1)
    """What the distance from the prior is multiplied by at every commit."""


class ReuseConfig(Frozen):
    """Earlier groups are trained again, each time under a new ticket that names its source."""

    share: float = Field(gt=0, lt=1)
    """Share of tickets that go to earlier groups."""
    max_age: int = Field(gt=0)
    """Bound in versions on the age of their tokens when they are trained, in place of staleness.max_staleness."""
    size: int = Field(default=64, gt=0, le=1024)
    """Groups that are remembered: those with the largest spread of rewards."""
    max_uses: int = Field(default=1, gt=0)
    """How often a group may be used again."""


class SuccessesConfig(Frozen):
    """As in DART: a prompt's last passed response is added to a later group of it in which none has passed."""

    max_age: int = Field(gt=0)
    """Bound in versions on the age of its tokens when they are trained, in place of staleness.max_staleness."""
    below: float = Field(default=0.25, gt=0, le=1)
    """Successes are kept of prompts whose estimated pass rate is lower than this."""


class CurriculumConfig(Frozen):
    """Which prompts are drawn, and what is used again. All of its state is part of the commit."""

    sampler: Sampler = InOrder()
    """Which prompt comes next."""
    difficulty: DifficultyConfig = DifficultyConfig()
    """How pass rates are estimated."""
    reuse: ReuseConfig | None = None
    """Reuse of earlier groups; None trains each once."""
    successes: SuccessesConfig | None = None
    """Earlier successes for groups without one; None adds none."""

    @property
    def is_plain(self) -> bool:
        """Whether nothing has to be remembered of what was judged."""
        return isinstance(self.sampler, InOrder) and self.reuse is None and self.successes is None
