import json
import re
from html.parser import HTMLParser

import pytest

from dashboards.accounts import summarize_config
from dashboards.report import render_report, write_report
from dashboards.sections import rate_over_time
from dashboards.snapshot import snapshot
from data_contracts.config import RunConfig
from data_contracts.records import Commit, Evaluation
from infra.log import Log
from tests.dashboards.build_run import build_run

VOID = {"meta", "rect", "path", "br", "link", "img", "input"}


class Page(HTMLParser):
    """Reads a page strictly: every element is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.headings: list[str] = []
        self.texts: list[str] = []
        self.charts: list[dict] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.addresses += [found[name] for name in ("href", "src", "srcset", "data", "action") if name in found]
        if "data-chart" in found:
            self.charts.append(json.loads(found["data-chart"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)


def test_the_page_is_whole_and_needs_nothing_from_anywhere(finished, tmp_path):
    path = write_report(finished, tmp_path / "report.html")
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.addresses == []
    assert not re.search(r"url\(|@import|https?:", text)
    assert "default-src 'none'" in text


def test_the_page_has_every_part_of_the_run(finished):
    page = Page(render_report(snapshot(finished)))
    sections = [
        "Learning",
        "Staleness",
        "Time",
        "Training",
        "The books",
        "Examples",
        "Versions",
        "History",
        "Configuration",
        "How to go on",
    ]
    assert [h for h in page.headings if h in sections] == sections
    charts = {
        "Reward",
        "Evaluation",
        "Tokens per second",
        "Gradient norm",
        "KL",
        "Clip fraction",
        "Entropy",
        "Importance ratio",
    }
    assert charts <= set(page.headings)
    text = " ".join(page.texts)
    for needed in (
        "160 trained",
        "verifier timed out",
        "all rewards are equal",
        "17+25=",
        "dddd0028" * 8,
        "rollflow show tiny-1a2b3c",
    ):
        assert needed in text


def test_charts_carry_the_runs_own_numbers(finished):
    run = snapshot(finished)
    names = {s["name"]: s for chart in Page(render_report(run)).charts for s in chart["series"]}
    assert names["reward"]["ys"] == [pytest.approx(v.reward, rel=1e-3) for v in run.versions[1:]]
    assert names["accuracy"]["xs"] == [0, 10, 20, 30, 40]
    assert names["norm"]["ys"][22] is None


def test_text_of_a_run_cannot_become_markup(root):
    store = root.at("evil")
    builder = build_run(store, until=3, end="")
    bad = '</p><script>alert(1)</script><img src=x onerror="alert(1)">'
    builder.append(
        "log/eval",
        Evaluation(writer="e", version=3, digest=bad, metrics={bad: 1.0}, examples=({bad: bad, "reward": bad},)),
    )
    last = Log(store, "log/commit", Commit).read(3)
    assert last is not None
    weights = last.weights.model_copy(update={"digest": bad})
    evil = {
        "version": 4,
        "weights": weights,
        "metrics": {bad: 2.0},
        "evidence": bad,
        "consumed": (),
        "status": "skipped",
    }
    builder.append("log/commit", last.model_copy(update=evil))
    builder.append("log/control", builder.control("fail", role=bad, error=bad))
    links = {bad: bad, "script": "javascript:alert(1)", "log": "/tmp/run.log"}
    text = render_report(snapshot(store), links)
    page = Page(text)
    assert text.count("<script>") == 1
    assert "<img" not in text
    assert page.addresses == ["/tmp/run.log"]
    assert "javascript:alert(1)" in page.texts


def test_links_are_kept_absolute_or_relative(finished):
    links = {"MLflow": "http://127.0.0.1:5000/#/x?a=1&b=2", "records": "../store/tiny", "beside": "report.html"}
    page = Page(render_report(snapshot(finished), links))
    assert page.addresses == list(links.values())


@pytest.mark.parametrize("until", [0, 1, 2])
@pytest.mark.parametrize("end", ["", "stop", "fail"])
def test_a_run_that_has_hardly_begun_has_a_page(root, until, end):
    store = root.at("young")
    build_run(store, until=until, end=end)
    page = Page(render_report(snapshot(store)))
    assert ("The run failed." in page.texts) == (end == "fail")
    assert ("rollflow resume young" in page.texts) == (end in ("stop", "fail", ""))


def test_a_run_without_a_single_record_has_a_page(root):
    page = Page(render_report(snapshot(root.at("nothing"))))
    assert "nothing" in page.texts
    assert page.charts == []


def test_a_run_with_a_damaged_record_has_a_page_that_says_so(root):
    store = root.at("damaged")
    build_run(store)
    store.put("log/curated/0000000012.json", b"{")
    text = " ".join(Page(render_report(snapshot(store))).texts)
    assert "log/curated can be read" in text


def test_a_long_run_has_a_page_of_bearable_size(finished):
    run = snapshot(finished)
    versions = [run.versions[1 + i % 40] for i in range(10_000)]
    object.__setattr__(run, "versions", versions)
    assert len(render_report(run)) < 2_000_000


def test_the_rate_over_time_adds_up_to_the_tokens(finished):
    run = snapshot(finished)
    assert run.first_at is not None
    found = rate_over_time(run.activity, ("rollout", "nobody", "train"), run.first_at)
    assert set(found) == {"rollout", "train"}
    for role, (seconds, rates) in found.items():
        width = seconds[1] - seconds[0]
        assert sum(r * width for r in rates if r is not None) == pytest.approx(run.roles[role].tokens)
    assert rate_over_time(run.activity, ("nobody",), 0.0) == {}


def test_a_configuration_is_summed_up_in_a_few_phrases():
    config = RunConfig(staleness={"max_staleness": 0}).model_dump(mode="json")
    assert summarize_config(config) == [
        "tiny model",
        "addition",
        "32 groups × 8 samples",
        "synchronous",
        "learning rate 0.0003",
        "seed 0",
    ]
    assert summarize_config({}) == []
    assert summarize_config({"of": "another version"})[0] == "? model"
