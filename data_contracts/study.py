"""A study: one run for each choice of preset, staleness and seed, compared with each other.

Frozen and closed like a run's configuration, and read once. Every cell of the grid is a run of its own, whose
configuration is the study's `run` with the cell's preset, staleness and seed put in.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field, model_validator

from data_contracts.config import Frozen, RunConfig
from data_contracts.presets import PRESETS, expand


class StudyConfig(Frozen):
    """What is compared."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,20}$")
    """Begins the ids of its runs."""
    about: str = ""
    """What the study asks, for the report."""
    presets: tuple[str, ...] = Field(min_length=1)
    """Algorithms, by preset; the first is what the others are compared with."""
    staleness: tuple[int, ...] = Field(min_length=1)
    """Exact staleness of each group, in versions."""
    seeds: tuple[int, ...] = Field(min_length=1)
    """Prompts and sampling; all cells begin from one warm start."""
    jobs: int = Field(default=2, gt=0)
    """Cells run at once, each in one process on one core."""
    run: dict[str, Any] = {}
    """Fields of every run's configuration."""
    overrides: dict[str, dict[str, Any]] = {}
    """By preset, fields of the configuration of its runs."""

    @model_validator(mode="after")
    def _can_be_run(self) -> "StudyConfig":
        for name in (*self.presets, *self.overrides):
            expand(name)
        idle = sorted(self.overrides.keys() - set(self.presets))
        if idle:
            raise ValueError(f"overrides of {idle} have no effect: these presets are not in the study")
        for fixed in ("seed", "staleness", "algorithm", "name"):
            if fixed in self.run:
                raise ValueError(f"run.{fixed} is set by the grid; leave it out, or use overrides for an algorithm")
        return self

    def cells(self) -> Iterator["Cell"]:
        """Yield every cell, seeds outermost, so that a study that is cut short has whole comparisons."""
        for seed in self.seeds:
            for staleness in self.staleness:
                for preset in self.presets:
                    yield Cell(preset, staleness, seed)

    def run_config(self, cell: "Cell", store: str) -> RunConfig:
        """Return the configuration of a cell's run in the store at a URL.

        Raises:
            ValidationError: a field is wrong.
        """
        values: dict[str, Any] = {"train": {}, **self.run}
        steps = values.get("steps", RunConfig().steps)
        values["train"] = {"checkpoint_every": steps, **values["train"]}  # a cell is begun again, not resumed
        values |= {"name": self.name, "store": store, "seed": cell.seed}
        values["staleness"] = {"max_staleness": cell.staleness, "exact": True}
        values["algorithm"] = {"preset": cell.preset}
        return RunConfig.model_validate(_merge(values, self.overrides.get(cell.preset, {})))

    def run_id(self, cell: "Cell") -> str:
        """Return the id of a cell's run."""
        return f"{self.name}-{cell.preset}-k{cell.staleness}-s{cell.seed}"

    @property
    def warm_start_id(self) -> str:
        """Id of the run that holds the version 0 of all cells."""
        return f"{self.name}-warm"

    def describe(self, preset: str) -> str:
        """Return what a preset does, in one line, with what the study changes of it."""
        changed = f" (changed: {self.overrides[preset]})" if preset in self.overrides else ""
        return f"{PRESETS[preset].about}{changed}"


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    preset: str
    staleness: int
    seed: int


def _merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in changes.items():
        own = merged.get(name)
        merged[name] = _merge(own, value) if isinstance(own, Mapping) and isinstance(value, Mapping) else value
    return merged
