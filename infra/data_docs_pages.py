"""Pages of Data Docs out of records of the audit, by Great Expectations' own renderers.

What the renderers give is put on a page of ours (data_docs.html, data_docs.css). Their own page loads styles, scripts
and images from seven hosts, and their index is drawn by scripts: without a network it would stay empty.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import ChoiceLoader, FileSystemLoader

from data_contracts.records import Audit, RuleResult

os.environ["GX_ANALYTICS_ENABLED"] = "false"

from great_expectations import __version__ as gx_version  # noqa: TID251
from great_expectations.core import (  # noqa: TID251
    ExpectationSuiteValidationResult,
    ExpectationValidationResult,
    RunIdentifier,
)
from great_expectations.expectations.expectation import ColumnMapExpectation  # noqa: TID251
from great_expectations.expectations.expectation_configuration import ExpectationConfiguration  # noqa: TID251
from great_expectations.expectations.registry import list_registered_expectation_implementations  # noqa: TID251
from great_expectations.render.components import (  # noqa: TID251
    LegacyDiagnosticRendererType,
    LegacyRendererType,
    RenderedDocumentContent,
    RenderedSectionContent,
    RenderedStringTemplateContent,
    RenderedTableContent,
)
from great_expectations.render.renderer.page_renderer import ValidationResultsPageRenderer  # noqa: TID251
from great_expectations.render.renderer.renderer import renderer  # noqa: TID251
from great_expectations.render.view.view import DefaultJinjaPageView  # noqa: TID251

INDEX = "index.html"
SAID = "expect_what_is_said"


class ExpectWhatIsSaid(ColumnMapExpectation):
    """Stands for a rule that Great Expectations has no words for: shows the record's own. Only for pages."""

    map_metric: ClassVar[str] = "column_values.satisfy"  # without one the class is not registered
    expected: str

    @classmethod
    @renderer(renderer_type=LegacyRendererType.PRESCRIPTIVE)
    def _prescriptive_renderer(
        cls, configuration: Any = None, result: Any = None, runtime_configuration: Any = None
    ) -> Any:
        return [text(configuration.kwargs["expected"])]

    @classmethod
    @renderer(renderer_type=LegacyDiagnosticRendererType.OBSERVED_VALUE)
    def _diagnostic_observed_value_renderer(
        cls, configuration: Any = None, result: Any = None, runtime_configuration: Any = None
    ) -> Any:
        return text(result.result["observed"])


class _Configuration(ExpectationConfiguration):
    """A configuration that may ask for further columns of the page, which no expectation takes as an argument."""

    def to_domain_obj(self) -> Any:
        """Return the expectation, made from its own arguments."""
        arguments = {name: value for name, value in self.kwargs.items() if name != "meta_properties_to_render"}
        return ExpectationConfiguration(type=self.type, kwargs=arguments).to_domain_obj()


class Pages:
    """Renders records of log/audit. Make one for a site: its templates are kept."""

    def __init__(self, run: str) -> None:
        """`run` is the id that the pages show."""
        self._run = run
        self._content = ValidationResultsPageRenderer(run_info_at_end=True)
        self._view = DefaultJinjaPageView()
        ours = FileSystemLoader(Path(__file__).parent)
        self._view.env.loader = ChoiceLoader([ours, *([self._view.env.loader] if self._view.env.loader else [])])

    def window(self, number: int, record: Audit) -> str:
        """Return the page of entry `number` of log/audit."""
        document = self._content.render(_as_validation(self._run, number, record))
        _point_to_index(document)
        return self._page(document, f"{record.stage} window {number}", home=INDEX)

    def index(self, records: Sequence[Audit], with_page: Mapping[int, str]) -> str:
        """Return the table of all windows, newest first, behind the rules that were violated.

        Args:
            records: of log/audit, in order.
            with_page: number of a record to the name of its page.
        """
        rules = _rule_rows(records, with_page)
        windows = [_window_row(number, record, with_page.get(number)) for number, record in enumerate(records)]
        sections = [
            _table_section("Rules", ("Stage", "Rule", "Violated", "Windows", "Violation", "Last violation"), rules),
            _table_section(
                "Windows", ("Window", "Stage", "Verdict", "Rows", "Torn", "Violated", "Judged"), windows[::-1]
            ),
        ]
        document = RenderedDocumentContent(sections=sections, renderer_type="SiteIndexPageRenderer", utm_medium="")
        return self._page(document, "Data Docs", home="")

    def _page(self, document: RenderedDocumentContent, heading: str, *, home: str) -> str:
        title = f"{self._run}: {heading}"
        body = document.to_json_dict() | {"page_title": title, "heading": title, "home": home}
        html = self._view.env.get_template("data_docs.html").render(body)
        return re.sub(r"\n\s*\n+", "\n", html)


def text(said: str, *, href: str = "", classes: Sequence[str] = ()) -> RenderedStringTemplateContent:
    """Return words as Great Expectations' templates take them: escaped, with nothing in them replaced."""
    template: dict[str, Any] = {"template": "$said", "params": {"said": said}, "tag": "a" if href else "span"}
    template["styling"] = {"classes": list(classes), "attributes": {"href": href} if href else {}}
    return RenderedStringTemplateContent(content_block_type="string_template", string_template=template)


def _as_validation(run: str, number: int, record: Audit) -> ExpectationSuiteValidationResult:
    """Return a record as the result of a validation that Great Expectations knows."""
    results = [_as_result(result) for result in record.results]
    good = sum(result.passed for result in record.results)
    judged = datetime.fromtimestamp(record.at, UTC)
    window = {"data_asset_name": f"{record.stage} window {number}", "rows": record.num_rows, "torn": record.num_torn}
    window |= {f"read of {log}": f"up to record {count}" for log, count in sorted(record.covers.items())}
    window |= {"not judged": ", ".join(record.unjudged) or "none"}
    return ExpectationSuiteValidationResult(
        success=good == len(results),
        results=results,
        suite_name=record.stage,
        statistics={
            "evaluated_expectations": len(results),
            "successful_expectations": good,
            "unsuccessful_expectations": len(results) - good,
            "success_percent": 100.0 * good / len(results) if results else None,
        },
        meta={
            "great_expectations_version": gx_version,
            "run_id": RunIdentifier(run_name=run, run_time=judged),
            "batch_spec": window,
        },
    )


def _as_result(result: RuleResult) -> ExpectationValidationResult:
    if result.expectation in list_registered_expectation_implementations():
        kind, found = result.expectation, dict(result.found)
        arguments = {name: _rounded(value) for name, value in result.arguments.items()}
    else:
        column = result.expected.split(":", 1)[0] if ": " in result.expected else result.rule
        kind, arguments = SAID, {"column": column, "expected": result.expected}
        found = {"observed": result.observed}
    does = "stops the run" if result.severity == "stop" else "warns"
    meta = {"attributes": {"rule": f"{result.rule}, {does}"}}
    arguments |= {"meta_properties_to_render": {"Rule": "rule"}}
    return ExpectationValidationResult(
        success=result.passed,
        expectation_config=_Configuration(type=kind, kwargs=arguments, meta=meta),
        result=found,
        meta={},
        exception_info={"raised_exception": False, "exception_message": None, "exception_traceback": None},
    )


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _point_to_index(document: RenderedDocumentContent) -> None:
    """Have the link to the suite lead to the index: a suite has no page here, its bounds change with every window."""
    subheader = document.sections[0].content_blocks[0].subheader
    subheader.string_template["styling"]["params"]["expectation_suite_name"]["attributes"]["href"] = INDEX


def _table_section(name: str, header: Sequence[str], rows: list[list[Any]]) -> RenderedSectionContent:
    table = RenderedTableContent(
        content_block_type="table",
        header=RenderedStringTemplateContent(
            content_block_type="string_template", string_template={"template": name, "tag": "h5"}
        ),
        header_row=list(header),
        table=rows or [[""] * len(header)],
        styling={"classes": ["col-12", "table-responsive"], "body": {"classes": ["table", "table-sm"]}},
    )
    return RenderedSectionContent(section_name=name, content_blocks=[table])


def _window_row(number: int, record: Audit, page: str | None) -> list[Any]:
    violated = ", ".join(result.rule for result in record.results if not result.passed)
    judged = datetime.fromtimestamp(record.at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return [
        text(f"window {number}", href=page or ""),
        record.stage,
        text(record.verdict, classes=[record.verdict]),
        str(record.num_rows),
        str(record.num_torn),
        text(violated),
        judged,
    ]


def _rule_rows(records: Sequence[Audit], with_page: Mapping[int, str]) -> list[list[Any]]:
    windows: Counter[tuple[str, str]] = Counter()
    violated: Counter[tuple[str, str]] = Counter()
    severity: dict[tuple[str, str], str] = {}
    last: dict[tuple[str, str], Any] = {}
    for number, record in enumerate(records):
        for result in record.results:
            key = (record.stage, result.rule)
            windows[key] += 1
            severity[key] = result.severity
            if not result.passed:
                violated[key] += 1
                said = f"window {number}: expected {result.expected}; {result.observed}"
                last[key] = text(said, href=with_page.get(number, ""))
    ranked = sorted(windows, key=lambda key: (-violated[key], key))
    does = {"warn": "warns", "stop": "stops the run"}
    return [
        [*key, str(violated[key]), str(windows[key]), does[severity[key]], last.get(key, text("none"))]
        for key in ranked
    ]
