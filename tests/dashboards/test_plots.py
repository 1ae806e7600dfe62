import doctest
import html
import json
import math
import re

import pytest

from dashboards import live, markup, plots
from dashboards.plots import Series, bars, heat_strip, line_chart, smooth, sparkline, stacked, thin, ticks


def paths(chart: str, kind: str) -> list[str]:
    """The `d` of every path whose class begins with `kind`."""
    return re.findall(rf'<path class="{kind}[^"]*" d="([^"]*)"', chart)


def hover(chart: str) -> dict:
    found = re.search(r'data-chart="([^"]*)"', chart)
    assert found
    return json.loads(html.unescape(found[1]))


@pytest.mark.parametrize("module", [plots, markup, live])
def test_docstrings_say_what_happens(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.13, 0.92), (-3, 1e6), (5, 5), (0, 0), (1e-7, 2e-7), (-2, -1)])
def test_ticks_are_few_and_cover_the_range(low, high):
    found = ticks(low, high)
    assert found[0] <= low + 1e-12
    assert found[-1] >= high - 1e-12
    assert 2 <= len(found) <= 8
    assert found == sorted(set(found))


def test_a_line_breaks_where_a_value_is_missing_or_not_finite():
    chart = line_chart("t", [Series("s", [0, 1, 2, 3, 4, 5], [1.0, 2.0, None, 3.0, math.nan, math.inf])])
    (path,) = paths(chart, "s1 line")
    assert path.count("M") == 2
    assert path.count("L") == 1
    assert "nan" not in chart.lower()
    assert hover(chart)["series"][0]["ys"] == [1.0, 2.0, None, 3.0, None, None]


def test_values_lie_where_the_axis_says():
    chart = line_chart("t", [Series("s", [0, 10], [0.0, 4.0])])
    assert paths(chart, "s1 line") == ["M0.0 1000.0L1000.0 0.0"]
    assert '<i class="yt" style="top:100.00%">0</i>' in chart
    assert '<i class="yt" style="top:0.00%">4</i>' in chart


def test_a_single_point_is_a_dot():
    chart = line_chart("t", [Series("s", [3], [0.5])])
    (dot,) = paths(chart, "s1 points")
    assert dot.startswith("M500.0 ")


@pytest.mark.parametrize("ys", [[], [None, None], [math.nan]])
def test_nothing_to_draw_draws_nothing(ys):
    assert line_chart("t", [Series("s", list(range(len(ys))), ys)]) == ""
    assert heat_strip("t", {}, note="") == ""
    assert sparkline(ys) == ""


def test_text_of_a_run_is_escaped():
    bad = '<script>"&'
    drawn = line_chart(bad, [Series(bad, [0, 1], [0.0, 1.0]), Series("x", [0, 1], [0.0, 1.0])], note=bad, x_name=bad)
    drawn += (
        bars([(bad, 1.0, bad)], title_of={bad: bad}) + stacked([(bad, 1.0, 1)]) + heat_strip(bad, {1: {0: 1}}, note=bad)
    )
    assert "<script>" not in drawn
    assert hover(drawn)["series"][0]["name"] == bad


def test_a_long_series_becomes_means_of_equal_stretches():
    long = Series("s", list(range(1000)), [float(x) for x in range(1000)])
    short = thin(long, 10)
    assert short.ys == [49.5 + 100 * i for i in range(10)]
    assert short.xs == [99 + 100 * i for i in range(10)]
    assert thin(short, 10) is short


def test_smoothing_looks_back_and_passes_over_gaps():
    assert smooth([1.0, 3.0, None, 5.0], 2) == [1.0, 2.0, 3.0, 5.0]
    assert smooth([None, 2.0], 1) == [None, 2.0]


def test_a_heat_strip_is_darkest_where_most_tokens_are():
    strip = heat_strip("t", {1: {0: 3.0, 1: 1.0}, 2: {1: 5.0}}, note="", bound=1)
    cells = re.findall(r'<rect class="cell" x="([\d.]+)" y="([\d.]+)" .*?opacity="([\d.]+)"', strip)
    assert cells == [("0.00", "500.00", "0.78"), ("0.00", "0.00", "0.34"), ("500.00", "0.00", "1.00")]
    assert hover(strip)["series"][0]["ys"] == [0.25, 1.0]
    assert paths(strip, "rule") == ["M0 0.0H1000"]


def test_a_heat_strip_of_many_versions_has_few_columns():
    strip = heat_strip("t", {v: {v % 3: 1.0} for v in range(5000)}, note="")
    assert len(hover(strip)["series"][0]["xs"]) <= 120


def test_bars_are_as_long_as_their_weights():
    drawn = bars([("a", 4.0, "4"), ("b", 1.0, "1")])
    assert re.findall(r'style="width:([\d.]+)%"', drawn) == ["100.0", "25.0"]
    parts = stacked([("a", 3.0, 1), ("b", 0.0, 2), ("c", 1.0, 0)])
    assert re.findall(r'class="f(\d)" style="width:([\d.]+)%"', parts) == [("1", "75.00"), ("0", "25.00")]
