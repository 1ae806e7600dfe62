"""What the audit found stands on the page, violations first, escaped and without any network."""

import math

from dashboards.quality import Quality, data_quality
from dashboards.report import render_report, write_report
from dashboards.snapshot import snapshot
from data_contracts.records import Audit, RuleResult
from infra.log import Log
from tests.dashboards.build_run import build_run
from tests.dashboards.test_report import Page


def result(rule: str, *, passed: bool, observed: str = "0 of 8 rows not so") -> RuleResult:
    return RuleResult(rule=rule, severity="warn", passed=passed, expected="reward: at most <1>", observed=observed)


def window(stage: str, *results: RuleResult, mean: float = 0.5) -> Audit:
    return Audit(
        writer="audit", stage=stage, num_rows=8, results=results, statistics={"reward/mean": mean}, covers={}
    )  # fmt: skip


def test_windows_and_violations_are_counted_by_rule_and_stage():
    quality = Quality()
    for passed in (True, False, True):
        quality.audit(window("scored", result("level", passed=passed), result("finite", passed=True)))
    quality.audit(window("raw", result("level", passed=True)))
    assert quality.num_windows == {"scored": 3, "raw": 1}
    assert quality.num_rows == {"scored": 24, "raw": 8}
    assert (quality.rules["scored", "level"].num_windows, quality.rules["scored", "level"].num_violated) == (3, 1)
    assert quality.rules["raw", "level"].num_violated == 0
    assert quality.num_violations == 1


def test_the_section_shows_violations_first_and_escapes_what_it_shows():
    quality = Quality()
    quality.audit(window("scored", result("a_fine", passed=True), result("broken", passed=False, observed="<b>9</b>")))
    quality.audit(window("scored", result("a_fine", passed=True), result("broken", passed=True), mean=math.nan))
    text = data_quality(quality)
    Page(text)
    assert text.index("broken") < text.index("a_fine")
    assert "&lt;b&gt;9&lt;/b&gt;" in text  # the last violation, though the newest window passed
    assert "reward: at most &lt;1&gt;" in text


def test_a_run_without_an_audit_has_no_section():
    assert data_quality(Quality()) == ""


def test_the_report_has_the_section_of_the_records(root):
    store = root.at("tiny")
    build_run(store, steps=3)
    assert "Data quality" not in Page(render_report(snapshot(store))).headings
    Log(store, "log/audit", Audit).append(0, window("scored", result("level", passed=False)))
    assert "Data quality" in Page(render_report(snapshot(store))).headings


def test_the_report_leads_to_data_docs_beside_it_and_beside_the_records(root, tmp_path):
    store = root.at("tiny")
    build_run(store, steps=3)
    Log(store, "log/audit", Audit).append(0, window("scored", result("level", passed=False)))
    page = write_report(store, tmp_path / "tiny.html").read_text()
    (link,) = Page(page).addresses
    assert link == "tiny-data-docs/index.html"
    assert "level" in (tmp_path / link).read_text()
    (link,) = Page(store.get("report.html").decode()).addresses
    assert store.get(link) == (tmp_path / "tiny-data-docs/index.html").read_bytes()
