"""Data quality: what the audit found, window by window, as the offline page shows it."""

from collections import deque
from dataclasses import dataclass, field
from html import escape

from dashboards import plots
from dashboards.markup import number_cells, section, table
from dashboards.plots import format_number
from data_contracts.records import Audit, RuleResult

MAX_WINDOWS = 500
"""Windows of each stage that courses of statistics go back."""


@dataclass
class RuleUse:
    """One rule of one stage over all windows."""

    stage: str
    last: RuleResult
    num_windows: int = 0
    num_violated: int = 0
    last_violation: RuleResult | None = None


@dataclass
class Quality:
    """The fold over log/audit."""

    num_windows: dict[str, int] = field(default_factory=dict)
    num_rows: dict[str, int] = field(default_factory=dict)
    rules: dict[tuple[str, str], RuleUse] = field(default_factory=dict)
    courses: dict[tuple[str, str], deque[float]] = field(default_factory=dict)
    """(stage, statistic) to its values, oldest first."""

    def audit(self, record: Audit) -> None:
        """Fold one record."""
        stage = record.stage
        self.num_windows[stage] = self.num_windows.get(stage, 0) + 1
        self.num_rows[stage] = self.num_rows.get(stage, 0) + record.num_rows
        for result in record.results:
            use = self.rules.setdefault((stage, result.rule), RuleUse(stage, result))
            use.last = result
            use.num_windows += 1
            if not result.passed:
                use.num_violated += 1
                use.last_violation = result
        for name, value in record.statistics.items():
            self.courses.setdefault((stage, name), deque(maxlen=MAX_WINDOWS)).append(value)

    @property
    def num_violations(self) -> int:
        """Violations over all rules and windows."""
        return sum(use.num_violated for use in self.rules.values())


def data_quality(quality: Quality, data_docs: str = "") -> str:
    """Return the section of the page: every rule with its counts, and the courses of the statistics.

    Args:
        quality: what the audit found.
        data_docs: URL of the Data Docs, relative to the page; empty where there are none.
    """
    if not quality.rules:
        return ""
    windows = ", ".join(f"{quality.num_rows[stage]} {stage} rows in {n}" for stage, n in quality.num_windows.items())
    count = quality.num_violations
    found = f"{count} violation{'' if count == 1 else 's'}"
    lead = f"Windows of data against suites of expectations: {windows} windows; {found}."
    body = f'<div class="card">{_rules(quality)}</div>'
    if data_docs:
        body += f'<p><a href="{escape(data_docs)}">Data Docs: every window on a page of its own</a></p>'
    if quality.courses:
        statistics = f"<summary>{len(quality.courses)} statistics, window by window</summary>{_courses(quality)}"
        body += f'<details class="card">{statistics}</details>'
    return section("Data quality", lead, body)


def _rules(quality: Quality) -> str:
    ranked = sorted(quality.rules.values(), key=lambda use: (-use.num_violated, use.stage, use.last.rule))
    rows = []
    for use in ranked:
        shown = use.last_violation or use.last
        does = {"warn": "warns", "stop": "stops the run"}[shown.severity]
        rows.append(
            f'<tr><td class="mono">{escape(use.last.rule)}</td><td>{escape(use.stage)}</td>'
            f"{number_cells([str(use.num_violated), str(use.num_windows)])}<td>{does}</td>"
            f'<td class="wrap">{escape(shown.expected)}</td><td class="wrap">{escape(shown.observed)}</td></tr>'
        )
    names = ("rule", "stage", "violated", "windows", "violation", "expected", "last seen, violation first")
    return table([(name, name in ("violated", "windows")) for name in names], rows)


def _courses(quality: Quality) -> str:
    rows = [
        f'<tr><td class="mono">{escape(name)}</td><td>{escape(stage)}</td><td>{plots.sparkline(list(values))}</td>'
        f"{number_cells([format_number(values[-1])])}</tr>"
        for (stage, name), values in quality.courses.items()
    ]
    return table([("statistic", False), ("stage", False), ("course", False), ("last", True)], rows)
