"""Suites of expectations: files that a user can edit, turned into checks with bounds for one window of rows.

Pure: what a suite asks of a window follows from the file, the configuration and the statistics of earlier windows.
Who holds a window against the checks is infra/expectations.py.
"""

import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from data_contracts.config import AuditConfig, RunConfig
from data_contracts.errors import ConfigError
from data_contracts.features import FEATURES, SCORED_ONLY

AuditStage = Literal["raw", "scored", "curated"]
STAGES: tuple[AuditStage, ...] = ("raw", "scored", "curated")
Severity = Literal["warn", "stop"]

RAW_FEATURES = {
    "round_trip_differs": (
        "0 or 1",
        "1 when the response's text, encoded again, gives other tokens; looked at in some rows of each batch, else NaN",
    ),
}
"""Features that only stage raw has."""

CURATED_FEATURES = {
    "staleness": (
        "versions",
        "version trained from, less the oldest version that sampled for the row's ticket; 0 for copies of groups",
    ),
    "mismatch_k3": ("nats", "policy/mismatch_k3 of the commit that trained on the row; 0 when it does not tell"),
}
"""Features that only stage curated has."""

STATISTICS: dict[str, str] = {
    "mean": "column_mean_to_be_between",
    "std": "column_stdev_to_be_between",
    "median": "column_median_to_be_between",
    "min": "column_min_to_be_between",
    "max": "column_max_to_be_between",
}
"""Statistic to the expectation that bounds it."""

_SHIPPED = Path(__file__).parent / "expectations"
_MAD_TO_DEVIATION = 1.4826
"""Ratio of the standard deviation to the median absolute deviation of a normal distribution."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^\w+$")
    column: str
    severity: Literal["off", "warn", "stop"] = "warn"


class ValueRule(_Entry):
    """An expectation on one feature."""

    expect: str = Field(pattern=r"^(\w+|[\w.]+:\w+)$")
    parameters: dict[str, Any] = {}


class HistoryRule(_Entry):
    """A bound on a statistic of a feature, from the run's own recent windows."""

    statistic: Literal["mean", "std", "median", "min", "max"]
    deviations: Annotated[float, Field(gt=0)]
    margin: Annotated[float, Field(ge=0)]

    @property
    def key(self) -> str:
        """Name of the statistic in a window's record."""
        return f"{self.column}/{self.statistic}"


class Suite(BaseModel):
    """All rules of one stage."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rules: tuple[ValueRule, ...] = ()
    history: tuple[HistoryRule, ...] = ()


class Check(NamedTuple):
    """A rule with its bounds, ready to be held against a window."""

    name: str
    severity: Severity
    column: str
    expect: str
    """Expectation without `expect_`, or module:function."""
    arguments: Mapping[str, Any]

    @property
    def expected(self) -> str:
        """The check in words."""
        said = ", ".join(f"{name} {_short(value)}" for name, value in self.arguments.items())
        return f"{self.column}: {self.expect.replace('_', ' ') if ':' not in self.expect else self.expect} ({said})"


def load_suite(stage: AuditStage, config: AuditConfig) -> Suite:
    """Return a stage's suite: the user's own file when `config.suites` has one, else the shipped one.

    Raises:
        ConfigError: the file is no suite, or a rule names a feature that the stage does not have.
    """
    own = Path(config.suites) / f"{stage}.toml" if config.suites else None
    path = own if own is not None and own.is_file() else _SHIPPED / f"{stage}.toml"
    try:
        suite = Suite.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, ValidationError) as cause:
        raise ConfigError(f"{path}: not a suite of expectations: {cause}") from cause
    known = columns_of(stage)
    names: set[str] = set()
    for rule in (*suite.rules, *suite.history):
        if rule.column not in known:
            raise ConfigError(f"{path}: rule {rule.name}: stage {stage} has no feature {rule.column}: use {known}")
        if rule.name in names:
            raise ConfigError(f"{path}: two rules are called {rule.name}: give one of them another name")
        names.add(rule.name)
    return suite


def check_severities(suites: Sequence[Suite], config: AuditConfig) -> None:
    """Raise ConfigError when `audit.severity` names a rule that no suite has."""
    names = {rule.name for suite in suites for rule in (*suite.rules, *suite.history)}
    unknown = sorted(set(config.severity) - names)
    if unknown:
        raise ConfigError(f"audit.severity names {unknown}, and no suite has such a rule: use {sorted(names)}")


def columns_of(stage: AuditStage) -> list[str]:
    """Return the features that rows of a stage have."""
    if stage == "raw":
        return [*(name for name in FEATURES if name not in SCORED_ONLY), *RAW_FEATURES]
    return [*FEATURES, *(CURATED_FEATURES if stage == "curated" else ())]


def constants_of(config: RunConfig) -> dict[str, float | None]:
    """Return what `$name` stands for in a suite; None where the run has no such limit."""
    staleness = config.staleness
    return {
        "$max_new_tokens": config.rollout.sampling.max_new_tokens,
        # Interrupted groups keep old tokens as context, outside of the loss: their age is no violation.
        "$max_staleness": None if staleness.stragglers == "interrupt" else staleness.bound,
        "$samples_per_group": config.samples_per_group,
    }


def make_checks(
    suite: Suite,
    config: AuditConfig,
    constants: Mapping[str, float | None],
    history: Sequence[Mapping[str, float]],
) -> tuple[list[Check], list[str]]:
    """Return what a window is held against, and the names of the rules that cannot be judged.

    Args:
        suite: of the window's stage.
        config: severities and how much history there must be.
        constants: from `constants_of`.
        history: `statistics` of earlier windows of the stage, oldest first.
    """
    checks: list[Check] = []
    unjudged: list[str] = []
    for rule in (*suite.rules, *suite.history):
        severity = config.severity.get(rule.name, rule.severity)
        if severity == "off":
            continue
        if isinstance(rule, ValueRule):
            arguments = {name: constants.get(v, v) if isinstance(v, str) else v for name, v in rule.parameters.items()}
            expect = rule.expect
            usable = None not in arguments.values()
        else:
            low, high = bounds_from(history, rule, config)
            arguments, expect = {"min_value": low, "max_value": high}, STATISTICS[rule.statistic]
            usable = math.isfinite(low)
        if usable:
            checks.append(Check(rule.name, severity, rule.column, expect, arguments))
        else:
            unjudged.append(rule.name)
    return checks, unjudged


def bounds_from(history: Sequence[Mapping[str, float]], rule: HistoryRule, config: AuditConfig) -> tuple[float, float]:
    """Return (lowest, highest) allowed value of the rule's statistic; NaN while there is too little history.

    The median of the history, give or take `deviations` times its robust deviation (1.4826 times the median absolute
    deviation) or `margin`, whichever is more.
    """
    told = [window[rule.key] for window in history[-config.history :] if math.isfinite(window.get(rule.key, math.nan))]
    if len(told) < config.min_history:
        return math.nan, math.nan
    middle = statistics.median(told)
    deviation = _MAD_TO_DEVIATION * statistics.median(abs(value - middle) for value in told)
    allowed = max(rule.deviations * deviation, rule.margin)
    return middle - allowed, middle + allowed


def statistics_of(window: pa.Table, suite: Suite) -> dict[str, float]:
    """Return the statistics that the suite's history rules follow; NaN of a column without any number."""
    found: dict[str, float] = {}
    for rule in suite.history:
        values = window.column(rule.column).to_numpy().astype(np.float64)
        values = values[np.isfinite(values)]
        found[rule.key] = float(_COMPUTE[rule.statistic](values)) if values.size > 1 else math.nan
    return found


_COMPUTE = {
    "mean": np.mean,
    "std": lambda values: np.std(values, ddof=1),
    "median": np.median,
    "min": np.min,
    "max": np.max,
}


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
