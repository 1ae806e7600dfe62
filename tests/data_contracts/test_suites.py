"""Suites of expectations are files: read strictly, and turned into bounds from the run's own history."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data_contracts.config import AuditConfig, RunConfig
from data_contracts.errors import ConfigError
from data_contracts.suites import (
    STAGES,
    HistoryRule,
    Suite,
    bounds_from,
    check_severities,
    columns_of,
    constants_of,
    load_suite,
    make_checks,
    statistics_of,
)

CONFIG = AuditConfig(min_history=3, history=4)
LEVEL = HistoryRule(name="level", column="reward", statistic="mean", deviations=4.0, margin=0.1)
ONE_RULE = """
[[rules]]
name = "short"
column = "num_tokens"
expect = "column_values_to_be_between"
parameters = { max_value = "$max_new_tokens" }
severity = "stop"
"""


def told(*values: float) -> list[dict[str, float]]:
    return [{"reward/mean": value} for value in values]


@pytest.mark.parametrize("stage", STAGES)
def test_shipped_suites_are_sound(stage) -> None:
    suite = load_suite(stage, AuditConfig())
    assert suite.rules
    assert suite.history
    checks, unjudged = make_checks(suite, AuditConfig(), constants_of(RunConfig()), [])
    assert len(checks) == len(suite.rules)
    assert unjudged == [rule.name for rule in suite.history]


def test_a_users_file_takes_the_place_of_one_shipped_suite(tmp_path: Path) -> None:
    (tmp_path / "raw.toml").write_text(ONE_RULE)
    config = AuditConfig(suites=str(tmp_path))
    assert [rule.name for rule in load_suite("raw", config).rules] == ["short"]
    assert load_suite("scored", config) == load_suite("scored", AuditConfig())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[rules]]\nname = 'x'", "not a suite"),
        (ONE_RULE.replace("num_tokens", "reward"), "no feature reward"),
        (ONE_RULE + ONE_RULE, "two rules are called short"),
        (ONE_RULE.replace("expect =", "expects ="), "expects"),
        (ONE_RULE.replace('"stop"', '"panic"'), "severity"),
        ("no toml", "not a suite"),
    ],
)
def test_a_wrong_suite_is_refused_with_its_file(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "raw.toml").write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        load_suite("raw", AuditConfig(suites=str(tmp_path)))
    assert "raw.toml" in str(caught.value)


def test_bounds_follow_the_median_and_spread_of_recent_windows() -> None:
    low, high = bounds_from(told(9.0, 0.1, 0.2, 0.3, 0.4), LEVEL, CONFIG)  # the first is out of sight
    spread = 4.0 * 1.4826 * 0.1
    assert low == pytest.approx(0.25 - spread)
    assert high == pytest.approx(0.25 + spread)


def test_the_margin_holds_where_history_hardly_moves() -> None:
    assert bounds_from(told(0.5, 0.5, 0.5), LEVEL, CONFIG) == (0.4, 0.6)


def test_one_outlier_in_the_history_does_not_widen_the_bounds() -> None:
    assert bounds_from(told(0.5, 0.5, 50.0), LEVEL, CONFIG) == (0.4, 0.6)


@pytest.mark.parametrize("values", [(), (0.5, 0.5), (0.5, 0.5, math.nan)])
def test_rules_wait_for_enough_history(values: tuple[float, ...]) -> None:
    assert math.isnan(bounds_from(told(*values), LEVEL, CONFIG)[0])
    checks, unjudged = make_checks(Suite(history=(LEVEL,)), CONFIG, {}, told(*values))
    assert (checks, unjudged) == ([], ["level"])


def test_limits_of_the_run_stand_in_for_their_names(tmp_path: Path) -> None:
    (tmp_path / "raw.toml").write_text(ONE_RULE)
    suite = load_suite("raw", AuditConfig(suites=str(tmp_path)))
    run = RunConfig.model_validate({"rollout": {"sampling": {"max_new_tokens": 77}}})
    (check,), _ = make_checks(suite, CONFIG, constants_of(run), [])
    assert check.arguments == {"max_value": 77}
    assert check.severity == "stop"


@pytest.mark.parametrize(
    ("staleness", "limit"),
    [
        ({"max_staleness": 3}, 3),
        ({"max_staleness": 3, "stragglers": "interrupt"}, None),
        ({"max_staleness": "unbounded", "max_unsettled": 64}, None),
    ],
)
def test_a_rule_on_a_limit_that_the_run_lacks_is_left_out(staleness: dict[str, object], limit: int | None) -> None:
    constants = constants_of(RunConfig.model_validate({"staleness": staleness}))
    assert constants["$max_staleness"] == limit
    checks, unjudged = make_checks(load_suite("curated", CONFIG), CONFIG, constants, [])
    assert ("staleness_bound" in unjudged) is (limit is None)
    assert ("staleness_bound" in [check.name for check in checks]) is (limit is not None)


def test_the_config_says_what_a_violation_does() -> None:
    suites = [load_suite(stage, CONFIG) for stage in STAGES]
    config = AuditConfig(severity={"rollouts_succeed": "stop", "length_limit": "off"})
    check_severities(suites, config)
    checks, unjudged = make_checks(suites[0], config, constants_of(RunConfig()), [])
    found = {check.name: check.severity for check in checks}
    assert found["rollouts_succeed"] == "stop"
    assert "length_limit" not in [*found, *unjudged]


def test_a_severity_for_a_rule_that_no_suite_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="lenght_limit"):
        check_severities([load_suite(stage, CONFIG) for stage in STAGES], AuditConfig(severity={"lenght_limit": "off"}))


def test_statistics_leave_out_what_is_no_number() -> None:
    window = pa.table({"reward": np.array([1.0, np.nan, 3.0, np.inf])})
    spread = HistoryRule(name="spread", column="reward", statistic="std", deviations=1, margin=0)
    assert statistics_of(window, Suite(history=(LEVEL, spread))) == {
        "reward/mean": 2.0,
        "reward/std": pytest.approx(math.sqrt(2)),
    }
    nothing = statistics_of(window.slice(1, 1), Suite(history=(LEVEL,)))
    assert math.isnan(nothing["reward/mean"])


def test_stages_know_their_columns() -> None:
    raw, scored, curated = (set(columns_of(stage)) for stage in STAGES)
    assert raw - scored == {"round_trip_differs"}, "asked once, where the tokens are new"
    assert scored < curated
    assert curated - scored == {"staleness", "mismatch_k3"}
