"""Pieces of HTML that the sections of a report share. Text comes in as it is and is escaped here."""

import re
from collections.abc import Mapping, Sequence
from html import escape

from dashboards import plots
from dashboards.fold import Tally
from data_contracts.metrics import declared

TALLIES_SHOWN = 12

EXAMPLE_CHARACTERS = 300
"""How much of a reason's last example is shown."""


def section(title: str, lead: str, body: str) -> str:
    """A titled part of the page; `body` is HTML."""
    return f"<section><h2>{escape(title)}</h2><p>{escape(lead)}</p>{body}</section>"


def card(title: str, note: str, body: str, *, is_wide: bool = False) -> str:
    """A box with a heading and a line in grey; `body` is HTML."""
    kind = "card wide" if is_wide else "card"
    return f'<div class="{kind}"><h3>{escape(title)}</h3><p class="note">{escape(note)}</p>{body}</div>'


def table(columns: Sequence[tuple[str, bool]], rows: Sequence[str]) -> str:
    """A table that scrolls in its card. Columns are (name, whether they hold numbers), rows are HTML."""
    head = "".join(f'<th class="{"n" if is_number else ""}">{escape(name)}</th>' for name, is_number in columns)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def number_cells(texts: Sequence[str]) -> str:
    """Cells aligned to the right."""
    return "".join(f'<td class="n">{escape(text)}</td>' for text in texts)


def tally_card(title: str, note: str, tallies: Mapping[str, Tally], color: int) -> str:
    """Counts by kind as bars, and what the commonest kind said last."""
    if not tallies:
        return card(title, "none", "")
    ranked = sorted(tallies.items(), key=lambda item: -item[1].count)[:TALLIES_SHOWN]
    rows = [(kind, float(tally.count), str(tally.count)) for kind, tally in ranked]
    drawn = plots.bars(rows, color, title_of={kind: tally.example for kind, tally in ranked}, is_long=True)
    example = escape(ranked[0][1].example[:EXAMPLE_CHARACTERS])
    return card(title, note, f'{drawn}<p class="note">for example <span class="mono">{example}</span></p>')


def link(url: str) -> str:
    """A link if it is one that a browser may follow; otherwise its text."""
    if re.match(r"^(https?://|\.{0,2}/|[\w.-]+(/|$))", url):
        return f'<a href="{escape(url)}">{escape(url)}</a>'
    return f"<code>{escape(url)}</code>"


def spoken(name: str) -> str:
    """Return a metric's name as one says it.

    >>> spoken("policy/ratio_p95"), spoken("eval/accuracy")
    ('ratio p95', 'accuracy')
    """
    return name.split("/", 1)[-1].replace("_", " ").replace("/", " ")


def unit(name: str) -> str:
    """Return a metric's declared unit; empty when nobody declared it."""
    return (declared(name) or ("", ""))[0]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None of nothing."""
    return sum(values) / len(values) if values else None
