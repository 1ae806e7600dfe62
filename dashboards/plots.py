"""Charts as HTML: lines and heat strips as SVG that stretches, labels as text that does not. No script is needed.

A chart fills the width of its box at any size: the SVG is stretched (strokes keep their width), while axis labels
are placed beside it in per cent, so they stay readable on a phone. `template.html` holds the style, and a small
script that shows values under the pointer from the `data-chart` attribute.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

SIZE = 1000.0
"""Inner width and height of a chart's SVG; it is stretched to the box."""

MAX_POINTS = 300
"""Longer series are drawn as means of equal stretches."""


MAX_DOTS = 60
"""More points than this are not marked one by one."""


@dataclass(frozen=True)
class Series:
    """One line of a chart: `ys` may hold None or values that are not finite, where the line breaks."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    color: int = 1
    """Colour 1 to 5 of the page's palette."""
    style: str = "line"
    """line, faint (drawn behind, thin) or dots (a line with its points marked)."""


def format_number(value: float | None) -> str:
    """Return a number as a person would write it: about three digits, k and M for thousands and millions.

    >>> [format_number(v) for v in (0, 0.0312, 12.345, 1234567, 1e-7, None)]
    ['0', '0.0312', '12.3', '1.23M', '1e-7', '–']
    """
    if value is None or not math.isfinite(value):
        return "–" if value is None else str(value)
    size = abs(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.3g}{letter}"
    if size >= 100 or value == int(value):
        return f"{value:.0f}"
    return re.sub(r"e([+-])0+", r"e\1", f"{value:.3g}")


def format_seconds(seconds: float | None) -> str:
    """Return a duration in its two largest units.

    >>> [format_seconds(s) for s in (0.25, 9.4, 75, 3720, 200000)]
    ['0.2 s', '9.4 s', '1 min 15 s', '1 h 02 min', '2 d 7 h']
    """
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return round numbers that cover [low, high].

    >>> ticks(0.13, 0.92)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    span = high - low or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span / about))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if span / (step * m) <= about + 0.5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    note: str = "",
    x_name: str = "version",
    bounds: tuple[float | None, float | None] = (None, None),
    rule: tuple[float, str] | None = None,
) -> str:
    """Return a figure of lines over a common x axis, or an empty string when there is nothing to draw.

    Args:
        note: what is drawn and in which unit, under the title.
        bounds: lowest and highest value of the y axis at least shown; None leaves it to the data.
        rule: a horizontal line and its label.
    """
    series = [thin(s) for s in series if any(_is_number(y) for y in s.ys)]
    if not series:
        return ""
    numbers = [y for s in series for y in s.ys if y is not None and math.isfinite(y)]
    numbers += [b for b in bounds if b is not None] + ([rule[0]] if rule else [])
    y_ticks = ticks(min(numbers), max(numbers))
    xs = [x for s in series for x in s.xs]
    box = _Box(min(xs), max(xs), y_ticks[0], y_ticks[-1])
    drawing = [_rule_path(box, y, "gridline") for y in y_ticks]
    drawing += [_rule_path(box, rule[0], "rule")] if rule else []
    drawing += [_series_path(box, s) for s in sorted(series, key=lambda s: s.style != "faint")]
    labels = [f'<i class="yt" style="top:{box.y(y) / 10:.2f}%">{format_number(y)}</i>' for y in y_ticks]
    labels += _x_labels(box)
    if rule:
        labels.append(f'<i class="rl" style="top:{box.y(rule[0]) / 10:.2f}%">{escape(rule[1])}</i>')
    if len(series) == 1:
        latest, keys = f'<b class="c{series[0].color}">{format_number(_last(series[0].ys))}</b>', ""
    else:
        latest, keys = "", "".join(_key(s) for s in series)
    plot = _plot(drawing, labels, hover_data(box, series, x_name))
    return _figure(title, note, latest, plot, keys)


def heat_strip(title: str, columns: Mapping[int, Mapping[int, float]], *, note: str, bound: int | None = None) -> str:
    """Return shares of each row (0, 1, 2, ...) for every column, dark where the share is large.

    Args:
        columns: version to (age to weight).
        bound: a dashed line above this row.
    """
    columns = {x: {row: n for row, n in c.items() if n > 0} for x, c in columns.items() if sum(c.values()) > 0}
    if not columns:
        return ""
    merged = _merge_columns(columns)
    num_rows = max([row for c in columns.values() for row in c] + [bound or 0]) + 1
    width, height = SIZE / len(merged), SIZE / num_rows
    cells = []
    for i, (_, shares) in enumerate(merged):
        total = sum(shares.values())
        for row, weight in shares.items():
            top = SIZE - (row + 1) * height
            cells.append(
                f'<rect class="cell" x="{i * width:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}"'
                f' opacity="{0.12 + 0.88 * weight / total:.2f}"/>'
            )
    box = _Box(merged[0][0], merged[-1][0], 0, num_rows)
    if bound is not None:
        cells.append(_rule_path(box, bound + 1, "rule"))
    every = math.ceil(num_rows / 8)
    labels = [f'<i class="yt" style="top:{box.y(row + 0.5) / 10:.2f}%">{row}</i>' for row in range(0, num_rows, every)]
    means = [sum(r * w for r, w in shares.items()) / sum(shares.values()) for _, shares in merged]
    hover = hover_data(box, [Series("mean age", [x for x, _ in merged], means)], "version")
    plot = _plot(cells, labels + _x_labels(box), hover)
    return _figure(title, note, f"<b>{means[-1]:.2f}</b>", plot, "")


def bars(
    rows: Sequence[tuple[str, float, str]],
    color: int = 1,
    *,
    title_of: Mapping[str, str] | None = None,
    is_long: bool = False,
) -> str:
    """Return horizontal bars: (label, weight, text at the end of the bar); `is_long` leaves labels half the width."""
    largest = max((weight for _, weight, _ in rows), default=0) or 1
    out = []
    for label, weight, text in rows:
        hint = escape((title_of or {}).get(label, ""))
        share = 100 * weight / largest
        out.append(
            f'<div class="bar" title="{hint}"><span class="bl">{escape(label)}</span><span class="bt">'
            f'<i class="f{color}" style="width:{share:.1f}%"></i></span><span class="bv">{escape(text)}</span></div>'
        )
    return f'<div class="{"bars long" if is_long else "bars"}">{"".join(out)}</div>'


def stacked(parts: Sequence[tuple[str, float, int]]) -> str:
    """Return one bar of shares: (name, weight, colour); colour 0 is pale."""
    total = sum(weight for _, weight, _ in parts) or 1
    inside = "".join(
        f'<i class="f{color}" style="width:{100 * weight / total:.2f}%"'
        f' title="{escape(name)}: {format_number(weight)}"></i>'
        for name, weight, color in parts
        if weight > 0
    )
    return f'<div class="stack">{inside}</div>'


def sparkline(ys: Sequence[float | None]) -> str:
    """Return a small line without axes."""
    thinned = thin(Series("", list(range(len(ys))), ys), 120)
    numbers = [y for y in thinned.ys if y is not None and math.isfinite(y)]
    if len(numbers) < 2:
        return ""
    low, high = min(numbers), max(numbers)
    pad = (high - low) * 0.08 or abs(high) or 1.0
    box = _Box(thinned.xs[0], thinned.xs[-1], low - pad, high + pad)
    return f'<svg class="spark" viewBox="0 0 1000 1000" preserveAspectRatio="none">{_series_path(box, thinned)}</svg>'


def thin(series: Series, limit: int = MAX_POINTS) -> Series:
    """Return the series with at most `limit` points: means of equal stretches, None where nothing is finite."""
    if len(series.xs) <= limit:
        return series
    xs: list[float] = []
    ys: list[float | None] = []
    for i in range(limit):
        part = slice(i * len(series.xs) // limit, (i + 1) * len(series.xs) // limit)
        numbers = [y for y in series.ys[part] if y is not None and math.isfinite(y)]
        xs.append(series.xs[part][-1])
        ys.append(sum(numbers) / len(numbers) if numbers else None)
    return Series(series.name, xs, ys, series.color, series.style)


def smooth(ys: Sequence[float | None], width: int) -> list[float | None]:
    """Return the mean of each value and those up to `width - 1` before it; gaps are passed over."""
    out: list[float | None] = []
    for i in range(len(ys)):
        numbers = [y for y in ys[max(0, i - width + 1) : i + 1] if y is not None and math.isfinite(y)]
        out.append(sum(numbers) / len(numbers) if numbers else None)
    return out


@dataclass(frozen=True)
class _Box:
    """Maps values to the SVG's inner coordinates."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return SIZE / 2 if self.x1 == self.x0 else (value - self.x0) / (self.x1 - self.x0) * SIZE

    def y(self, value: float) -> float:
        return SIZE / 2 if self.y1 == self.y0 else SIZE - (value - self.y0) / (self.y1 - self.y0) * SIZE


def hover_data(box: _Box, series: Sequence[Series], x_name: str) -> str:
    """Return, as JSON, what the page's script shows under the pointer."""
    data = {
        "box": [box.x0, box.x1, box.y0, box.y1],
        "x": x_name,
        "series": [
            {"name": s.name, "color": s.color, "xs": list(s.xs), "ys": [_short(y) for y in s.ys]} for s in series
        ],
    }
    return json.dumps(data, separators=(",", ":"))


def _plot(drawing: Sequence[str], labels: Sequence[str], hover: str) -> str:
    return (
        f'<div class="plot" data-chart="{escape(hover)}"><svg viewBox="0 0 1000 1000" preserveAspectRatio="none"'
        f' aria-hidden="true">{"".join(drawing)}</svg>{"".join(labels)}</div>'
    )


def _figure(title: str, note: str, latest: str, plot: str, keys: str) -> str:
    key_line = f'<div class="keys">{keys}</div>' if keys else ""
    return (
        f'<figure class="chart"><figcaption><div class="top"><h3>{escape(title)}</h3>'
        f'<div class="latest">{latest}</div></div>'
        f"<p>{escape(note)}</p></figcaption>{plot}{key_line}</figure>"
    )


def _key(series: Series) -> str:
    value = "" if series.style == "faint" else f" <b>{format_number(_last(series.ys))}</b>"
    return f'<span class="c{series.color} key {series.style}">{escape(series.name)}{value}</span>'


def _series_path(box: _Box, series: Series) -> str:
    """One path, broken where a value is missing; single points show as dots."""
    parts, dots, is_drawing, length = [], [], False, 0
    for x, y in zip(series.xs, series.ys, strict=True):
        if not _is_number(y):
            is_drawing, length = False, 0
            continue
        at = f"{box.x(x):.1f} {box.y(float(y or 0)):.1f}"
        parts.append(f"{'L' if is_drawing else 'M'}{at}")
        is_drawing, length = True, length + 1
        dots.append(f"M{at}h0")
    svg = f'<path class="s{series.color} {series.style}" d="{"".join(parts)}"/>'
    if series.style == "dots" and len(dots) <= MAX_DOTS or len(dots) == 1:
        svg += f'<path class="s{series.color} points" d="{"".join(dots)}"/>'
    return svg


def _rule_path(box: _Box, y: float, kind: str) -> str:
    return f'<path class="{kind}" d="M0 {box.y(y):.1f}H1000"/>'


def _x_labels(box: _Box) -> list[str]:
    inside = [x for x in ticks(box.x0, box.x1, 5) if box.x0 <= x <= box.x1] or [box.x0]
    return [f'<i class="xt" style="left:{box.x(x) / 10:.2f}%">{format_number(x)}</i>' for x in inside]


def _merge_columns(columns: Mapping[int, Mapping[int, float]]) -> list[tuple[int, dict[int, float]]]:
    """Add up neighbouring columns until there are at most 120."""
    every = math.ceil(len(columns) / 120)
    ordered = sorted(columns.items())
    merged = []
    for i in range(0, len(ordered), every):
        total: dict[int, float] = {}
        for _, shares in ordered[i : i + every]:
            for row, weight in shares.items():
                total[row] = total.get(row, 0) + weight
        merged.append((ordered[i][0], total))
    return merged


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _short(value: float | None) -> float | None:
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


def _last(ys: Sequence[float | None]) -> float | None:
    return next((y for y in reversed(ys) if _is_number(y)), None)
