"""Windows of scalars against Great Expectations: real validations, every kind of outcome."""

import numpy as np
import pyarrow as pa
import pytest

from data_contracts.config import AuditConfig, RunConfig
from data_contracts.errors import ConfigError
from data_contracts.features import derive
from data_contracts.suites import STAGES, Check, constants_of, load_suite, make_checks, statistics_of
from data_contracts.trajectory import make_table
from infra.expectations import Validator
from tests.tasks.curation.build_group import different, row

WINDOW = pa.table({"reward": np.array([0.0, 0.5, 1.0, np.nan]), "n_nonfinite_rewards": np.array([0, 0, 0, 1])})


def even(values: np.ndarray, step: float) -> np.ndarray:
    """Every value is a multiple of the step: an expectation of one's own."""
    return values % step == 0


@pytest.fixture(scope="module")
def validator() -> Validator:
    return Validator()


def check(expect: str, column: str = "reward", **arguments: object) -> Check:
    return Check("rule", "warn", column, expect, arguments)


@pytest.mark.parametrize(
    ("asked", "passed", "observed"),
    [
        (check("column_values_to_be_between", min_value=0, max_value=1), True, "0 of 4 rows not so"),
        (check("column_values_to_be_between", max_value=0.5), False, "1 of 4 rows not so, for example 1"),
        (check("column_values_to_be_between", "n_nonfinite_rewards", max_value=0), False, "1 of 4 rows"),
        (check("column_mean_to_be_between", min_value=0.4, max_value=0.6), True, "0.5"),
        (check("column_mean_to_be_between", min_value=0.6), False, "0.5"),
        (check("column_stdev_to_be_between", max_value=0.4), False, "0.5"),
        (check("column_median_to_be_between", max_value=0.4), False, "0.5"),
        (check("column_max_to_be_between", max_value=1), True, "1"),
        (check("column_min_to_be_between", min_value=0.1), False, "0"),
        (check(f"{__name__}:even", step=0.5), True, "0 of 4 rows not so"),
        (check(f"{__name__}:even", step=1.0), False, "1 of 4 rows not so, for example 0.5"),
    ],
)
def test_checks_pass_or_fail_and_show_what_they_saw(
    asked: Check, passed: bool, observed: str, validator: Validator
) -> None:
    (result,) = validator.validate(WINDOW, [asked])
    assert (result.rule, result.severity, result.passed) == ("rule", "warn", passed)
    assert result.observed.startswith(observed)
    assert result.expected == asked.expected


def test_a_column_without_any_number_fails_a_rule_on_its_mean(validator: Validator) -> None:
    window = pa.table({"reward": np.full(3, np.nan)})
    (result,) = validator.validate(window, [check("column_mean_to_be_between", min_value=0)])
    assert not result.passed


def test_results_come_in_the_order_of_the_checks(validator: Validator) -> None:
    checks = [
        Check(f"rule_{i}", "warn", "reward", "column_mean_to_be_between", {"max_value": i / 10}) for i in range(9)
    ]
    results = validator.validate(WINDOW, checks)
    assert [result.rule for result in results] == [asked.name for asked in checks]
    assert [result.passed for result in results] == [i >= 5 for i in range(9)]


def test_no_checks_give_no_results(validator: Validator) -> None:
    assert validator.validate(WINDOW, []) == []


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (check("column_values_to_be_beautiful"), "has no ExpectColumnValuesToBeBeautiful"),
        (check("column_values_to_be_between", minimum=0), "does not take"),
        (check("no.such:function"), "cannot be imported"),
    ],
)
def test_what_is_no_expectation_is_refused_by_name(asked: Check, says: str, validator: Validator) -> None:
    with pytest.raises(ConfigError, match=says):
        validator.validate(WINDOW, [asked])


def test_a_function_that_fails_fails_its_rule_and_no_other(validator: Validator) -> None:
    broken = Check("broken", "warn", "reward", f"{__name__}:even", {"stride": 1})
    fine = Check("fine", "warn", "reward", "column_mean_to_be_between", {"min_value": 0})
    results = validator.validate(WINDOW, [broken, fine])
    assert [result.passed for result in results] == [False, True]
    assert "stride" in results[0].observed


@pytest.mark.parametrize("stage", STAGES)
def test_good_rows_pass_the_shipped_suites(stage, validator: Validator) -> None:
    rows = [row(i // 4, i % 4, tokens) for i, tokens in enumerate(different(16))]
    table = derive(make_table(rows, "raw" if stage == "raw" else "scored"), "raw" if stage == "raw" else "scored")
    if stage == "raw":
        table = table.append_column("round_trip_differs", pa.array([0] * 16))
    if stage == "curated":
        table = table.append_column("staleness", pa.array([0] * 16)).append_column("mismatch_k3", pa.array([1e-3] * 16))
    run = RunConfig.model_validate({"rollout": {"sampling": {"max_new_tokens": 40}}})
    suite = load_suite(stage, AuditConfig())
    history = [statistics_of(table, suite)] * 4
    checks, unjudged = make_checks(suite, AuditConfig(), constants_of(run), history)
    results = validator.validate(table, checks)
    assert [result for result in results if not result.passed] == []
    assert unjudged == []
    assert len(results) == len(suite.rules) + len(suite.history)
