"""What is believed of a prompt's pass rate: a Beta distribution that forgets, updated by judged groups. Pure.

VADE keeps two scales of forgetting: counts decay when a prompt comes up again, and a little at every step.
"""

from typing import NamedTuple

from data_contracts.curriculum_config import DifficultyConfig

LEAST = 1e-3
"""Smallest parameter of the distribution, whatever has decayed."""


class Difficulty(NamedTuple):
    """The belief about one prompt as of commit `at`.

    >>> seen = Difficulty(1.0, 1.0, 0, 0, 0).after(3, 4, 7, DifficultyConfig(decay=0.9, forget=1.0))
    >>> round(seen.passes, 3), round(seen.fails, 3), round(seen.mean, 3)
    (3.9, 1.9, 0.672)
    """

    passes: float
    """First parameter: passes seen and assumed."""
    fails: float
    """Second parameter: failures seen and assumed."""
    passed: int
    """Samples of the newest group that passed."""
    count: int
    """Samples of the newest group."""
    at: int
    """Commit that learned of it."""

    @property
    def mean(self) -> float:
        """Expected pass rate."""
        return self.passes / (self.passes + self.fails)

    @property
    def last_rate(self) -> float:
        """Pass rate of the newest group; NaN when it had no samples."""
        return self.passed / self.count if self.count else float("nan")

    def now(self, version: int, config: DifficultyConfig) -> "Difficulty":
        """Return the belief at a later commit: nearer to the prior, so that what nobody looks at becomes unknown."""
        kept = config.forget ** max(version - self.at, 0)
        passes = config.prior_passes + (self.passes - config.prior_passes) * kept
        fails = config.prior_fails + (self.fails - config.prior_fails) * kept
        return self._replace(passes=max(passes, LEAST), fails=max(fails, LEAST))

    def after(self, passed: int, count: int, version: int, config: DifficultyConfig) -> "Difficulty":
        """Return the belief once commit `version` has learned that `passed` of `count` samples passed."""
        now = self.now(version, config)
        passes = max(config.decay * now.passes + passed, LEAST)
        fails = max(config.decay * now.fails + count - passed, LEAST)
        return Difficulty(passes, fails, passed, count, version)


def unknown(config: DifficultyConfig) -> Difficulty:
    """Return the belief about a prompt that was never drawn."""
    return Difficulty(config.prior_passes, config.prior_fails, 0, 0, 0)
