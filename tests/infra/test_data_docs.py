"""Data Docs have every window, say what was expected and seen, and need nothing from anywhere."""

import re
import secrets
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data_contracts.records import Audit, RuleResult
from data_contracts.suites import Check
from infra import data_docs
from infra.data_docs import copy_site, make_site, publish
from infra.expectations import Validator
from infra.log import Log
from infra.store import open_store
from tests.dashboards.test_report import Page

WINDOW = pa.table({"reward": np.array([0.0, 0.5, 1.0, 7.25]), "length": np.array([1, 2, 3, np.nan])})


def rising(values: np.ndarray) -> np.ndarray:
    """Every value is above the one before it: an expectation of one's own."""
    return np.diff(values, prepend=-np.inf) > 0


CHECKS = [
    Check("reward_range", "stop", "reward", "column_values_to_be_between", {"min_value": 0, "max_value": 1}),
    Check("reward_level", "warn", "reward", "column_mean_to_be_between", {"min_value": 0.123456789, "max_value": 9}),
    Check("own_rule", "warn", "reward", f"{__name__}:rising", {}),
    Check("failing_rule", "warn", "reward", f"{__name__}:rising", {"no": 1}),
    Check("no_length", "warn", "length", "column_max_to_be_between", {"max_value": 2}),
]


@pytest.fixture(scope="module")
def records() -> list[Audit]:
    """Two windows that pass and one that does not, as they come back from the log."""
    found = Validator().validate(WINDOW, CHECKS)
    torn = RuleResult(rule="rows_readable", severity="warn", passed=False, expected="<whole>", observed="<b>2</b> torn")
    fine = [result for result in found if result.passed]
    windows = [("raw", fine), ("scored", fine), ("raw", [torn, *found])]
    made = [
        Audit(
            writer="a", stage=stage, num_rows=4, results=tuple(results), unjudged=("not_yet",), covers={"log/raw/w": 3}
        )
        for stage, results in windows
    ]  # fmt: skip
    return [Audit.model_validate_json(record.model_dump_json()) for record in made]


def words(page: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", page.split("<main>", 1)[1]).split())


def test_nothing_on_any_page_comes_from_elsewhere(records: list[Audit]) -> None:
    site = make_site("a-run", records)
    for name, page in site.items():
        addresses = [address for address in Page(page).addresses if not address.startswith("#")]
        assert set(addresses) <= set(site), name
        assert not re.search(r"https?:|url\(|@import|<script|<link|<img|\bon\w+=", page), name
        assert "default-src 'none'" in page


def test_every_window_has_its_row_and_its_page(records: list[Audit]) -> None:
    site = make_site("a-run", records)
    index = words(site["index.html"])
    for number, record in enumerate(records):
        name = f"window-{number:06}.html"
        assert f'href="{name}"' in site["index.html"]
        assert re.search(rf"window {number} {record.stage} {record.verdict} 4 0", index)
        assert f"{record.stage} window {number}" in words(site[name])
        assert all(result.rule in site[name] for result in record.results)
        assert "not_yet" in site[name]


def test_a_violation_is_shown_with_what_was_expected_and_what_was_seen(records: list[Audit]) -> None:
    page = words(make_site("a-run", records)["window-000002.html"])
    assert "values must be greater than or equal to 0 and less than or equal to 1 ." in page
    assert "1 unexpected values found. 25% of 4 total rows." in page
    assert "Sampled Unexpected Values 7.25" in page
    assert "reward_range, stops the run" in page
    assert "mean must be greater than or equal to 0.123457 and less than or equal to 9 . 2.1875" in page
    assert "rising" in page, "an expectation of one's own is shown in the record's words"
    assert "unexpected keyword argument" in page, "and so is one that failed"
    assert "&lt;whole&gt; &lt;b&gt;2&lt;/b&gt; torn" in page
    index = words(make_site("a-run", records)["index.html"])
    assert "raw reward_range 1 1 stops the run window 2: expected reward: column values to be between" in index
    assert "1 of 4 rows not so, for example 7.25" in index


def test_records_that_know_no_expectations_are_shown_in_their_own_words(records: list[Audit]) -> None:
    bare = [
        result.model_copy(update={"expectation": "", "arguments": {}, "found": {}}) for result in records[2].results
    ]
    page = words(make_site("a-run", [records[2].model_copy(update={"results": tuple(bare)})])["window-000000.html"])
    assert "column values to be between (min_value 0, max_value 1) 1 of 4 rows not so, for example 7.25" in page


def test_of_a_long_run_the_newest_windows_and_violations_have_pages_and_the_index_has_all(records: list[Audit]) -> None:
    many = [records[2], *records[:2] * data_docs.MOST_PAGES]
    site = make_site("a-run", many)
    assert len(site) == data_docs.MOST_PAGES + 2
    assert "window-000000.html" in site
    index = words(site["index.html"])
    assert all(f"window {number} " in index for number in range(len(many)))


def test_the_site_is_made_once_for_what_the_audit_has_said(tmp_path: Path, records: list[Audit]) -> None:
    store = open_store(f"memory://{secrets.token_hex(4)}").at("a-run")
    assert not publish(store)
    log = Log(store, "log/audit", Audit)
    for number, record in enumerate(records[:2]):
        log.append(number, record)
    assert publish(store)
    store.put("data_docs/index.html", b"<p>left as it is</p>")
    assert publish(store)
    assert store.get("data_docs/index.html") == b"<p>left as it is</p>"
    log.append(2, records[2])
    assert publish(store)
    copy_site(store, tmp_path / "site")
    assert sorted(path.name for path in (tmp_path / "site").iterdir()) == [
        "index.html", "window-000000.html", "window-000001.html", "window-000002.html",
    ]  # fmt: skip
    assert "window-000002.html" in (tmp_path / "site" / "index.html").read_text()
