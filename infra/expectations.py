"""Great Expectations: holds a window of scalars against checks. Only this file and its Data Docs know it.

It costs seconds to import and tens of milliseconds a window, so it is for processes that nobody waits for, and it sees
windows of numbers, never lists of tokens. Its telemetry and progress bars are off.
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pyarrow as pa

from data_contracts.errors import ConfigError
from data_contracts.records import RuleResult
from data_contracts.suites import Check
from infra.installed import load_function

os.environ["GX_ANALYTICS_ENABLED"] = "false"

import great_expectations as gx  # noqa: TID251
import numpy as np
import pandas as pd
from great_expectations.execution_engine.pandas_execution_engine import PandasExecutionEngine  # noqa: TID251
from great_expectations.expectations.expectation import ColumnMapExpectation, Expectation  # noqa: TID251
from great_expectations.expectations.metrics.map_metric_provider.column_condition_partial import (  # noqa: TID251
    column_condition_partial,
)
from great_expectations.expectations.metrics.map_metric_provider.column_map_metric_provider import (  # noqa: TID251
    ColumnMapMetricProvider,
)

EXAMPLES = 5
"""Violating values that a result shows."""


class _Satisfies(ColumnMapMetricProvider):
    """Asks a user's function which values are as they should be."""

    condition_metric_name = "column_values.satisfy"
    condition_value_keys = ("function", "parameters")

    @column_condition_partial(engine=PandasExecutionEngine)
    def _pandas(cls, column: pd.Series, function: str, parameters: dict[str, Any], **_: Any) -> pd.Series:
        good = load_function(function, "expectation")(column.to_numpy(), **parameters)
        return pd.Series(good, index=column.index, dtype=bool)


class ExpectColumnValuesToSatisfy(ColumnMapExpectation):
    """Every value passes function(values, **parameters) -> [N] bool, named as module:function."""

    map_metric: ClassVar[str] = "column_values.satisfy"
    success_keys: ClassVar[tuple[str, ...]] = ("function", "parameters", "mostly")

    function: str
    parameters: dict[str, Any] = {}


class Validator:
    """Holds windows against checks. Make one per process: its context is kept."""

    def __init__(self) -> None:
        """Open a context that lives in memory alone."""
        self._context = gx.get_context(mode="ephemeral")
        self._context.variables.progress_bars = {"globally": False}  # pyright: ignore[reportAttributeAccessIssue]
        source = self._context.data_sources.add_pandas("windows")
        self._batches = source.add_dataframe_asset("window").add_batch_definition_whole_dataframe("whole")

    def validate(self, window: pa.Table, checks: Sequence[Check]) -> list[RuleResult]:
        """Return one result for every check, in their order.

        Args:
            window: scalar columns without nulls. NaN counts as missing: what must not be missing needs a counting
                column of its own.
            checks: see `data_contracts.suites.make_checks`.

        Raises:
            ConfigError: a check names no expectation, or arguments that it does not take.
        """
        if not checks:
            return []
        suite = gx.ExpectationSuite("window", expectations=[make_expectation(check) for check in checks])
        frame = pd.DataFrame({name: window.column(name).to_numpy() for name in window.column_names})
        batch = self._batches.get_batch(batch_parameters={"dataframe": frame})
        found = batch.validate(suite, result_format={"result_format": "SUMMARY", "partial_unexpected_count": EXAMPLES})
        by_name = {result.expectation_config.meta["rule"]: result for result in found.results}  # pyright: ignore
        return [_result(check, by_name[check.name]) for check in checks]


def make_expectation(check: Check) -> Expectation:
    """Return a check as Great Expectations knows it.

    Raises:
        ConfigError: there is no such expectation, or it does not take these arguments.
    """
    arguments: dict[str, Any] = {"column": check.column, "meta": {"rule": check.name}}
    if ":" in check.expect:
        load_function(check.expect, "expectation")
        return ExpectColumnValuesToSatisfy(**arguments, function=check.expect, parameters=dict(check.arguments))
    name = "Expect" + "".join(word.capitalize() for word in check.expect.split("_"))
    kind = getattr(gx.expectations, name, None)
    if kind is None:
        raise ConfigError(f"rule {check.name}: Great Expectations has no {name}: correct `expect` in the suite")
    try:
        return kind(**arguments, **check.arguments)
    except (TypeError, ValueError) as cause:  # pydantic's errors are ValueErrors
        raise ConfigError(f"rule {check.name}: {name} does not take {dict(check.arguments)}: {cause}") from cause


def _result(check: Check, found: Any) -> RuleResult:
    told: dict[str, Any] = {}
    if ":" not in check.expect and not _failure(found):
        arguments = _plain({"column": check.column, **check.arguments})
        told = {"expectation": f"expect_{check.expect}", "arguments": arguments, "found": _answer(found.result or {})}
    return RuleResult(
        rule=check.name,
        severity=check.severity,
        passed=bool(found.success),
        expected=check.expected,
        observed=_observed(found),
        **told,
    )


def _answer(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a result that Data Docs show."""
    names = ("observed_value", "element_count", "unexpected_count", "missing_count", "partial_unexpected_list")
    percents = ("unexpected_percent", "unexpected_percent_total", "unexpected_percent_nonmissing", "missing_percent")
    return _plain({name: result[name] for name in (*names, *percents) if name in result})


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | bool | int | None) else str(value)


def _failure(found: Any) -> str:
    """Return why an expectation could not be judged; empty when it was."""
    error = found.exception_info or {}
    for one in (error, *(inner for inner in error.values() if isinstance(inner, dict))):
        if one.get("raised_exception"):
            return f"the expectation failed: {one.get('exception_message')}"
    return ""


def _observed(found: Any) -> str:
    """Return what the window holds, in words."""
    if failure := _failure(found):
        return failure
    result = found.result or {}
    if "unexpected_count" in result:
        count, total = result["unexpected_count"], result["element_count"]
        shown = ", ".join(f"{value:.6g}" for value in result.get("partial_unexpected_list", [])[:EXAMPLES])
        return f"{count} of {total} rows not so" + (f", for example {shown}" if count else "")
    value = result.get("observed_value")
    if value is None:
        return "nothing to measure"
    return f"{value:.6g}" if isinstance(value, float | int) else str(value)
