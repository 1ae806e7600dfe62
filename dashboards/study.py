"""The report of a study, from the records of its runs: a table, plots with intervals over seeds, and plain sentences.

What is compared is the accuracy (or the reward) of a run's last evaluated version on held-out prompts. Intervals are
95 % of Student's t over seeds; differences to the first preset are paired by seed, which share version 0.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template

from dashboards.markup import card, number_cells, section, table
from dashboards.plots import Series, line_chart
from dashboards.snapshot import headline
from data_contracts.records import Commit, Control, Evaluation
from data_contracts.study import Cell, StudyConfig
from infra.log import Log
from infra.store import Store

TEMPLATE = Path(__file__).with_name("template.html")
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom."""
SIGNS = {"policy/ess_sequence": "effective sample size", "policy/kl_behavior": "KL from behavior (nats)",
         "policy/ratio_max": "largest ratio", "policy/entropy": "entropy (nats)",
         "optimizer/grad_norm": "gradient norm"}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of one cell."""

    curve: Mapping[int, float]
    """Version to the score of its evaluation."""
    signs: Mapping[str, float] = field(default_factory=dict)
    """Metric to its mean over the last quarter of the steps."""
    failure: str = ""
    """Why it ended early; empty when it did not."""

    @property
    def final(self) -> float:
        """Score of the last version."""
        return self.curve[max(self.curve)]


@dataclass(frozen=True)
class Estimate:
    """Mean over seeds, and half of its 95 % interval; NaN with fewer than two."""

    mean: float
    half: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if math.isnan(self.half) else f"{self.mean:.3f} ± {self.half:.3f}"


def is_done(store: Store) -> bool:
    """Whether a cell's run came to its end, or to a failure of its own."""
    return any(record.kind in ("end", "fail") for record in Log(store, "log/control", Control).read_from(0))


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and half the 95 % interval of values, one for each seed.

    >>> str(estimate([0.4, 0.6]))
    '0.500 ± 1.271'
    """
    count = len(values)
    if count < 2:
        return Estimate(values[0] if values else math.nan, math.nan, count)
    quantile = T_95[count - 2] if count - 2 < len(T_95) else 2.2
    return Estimate(statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(count), count)


def read_outcomes(config: StudyConfig, root: Store) -> dict[Cell, Outcome]:
    """Return what became of every cell that is done."""
    outcomes = {}
    for cell in config.cells():
        store = root.at(config.run_id(cell))
        if is_done(store) and (outcome := _read(store)).curve:
            outcomes[cell] = outcome
    return outcomes


def _read(store: Store) -> Outcome:
    curve = {}
    for evaluation in Log(store, "log/eval", Evaluation).read_from(0):
        if (found := headline(evaluation)) is not None:
            curve[evaluation.version] = found[1]
    commits = Log(store, "log/commit", Commit).read_from(0)[1:]
    last = commits[-max(len(commits) // 4, 1) :]
    signs = {
        name: statistics.fmean(values)
        for name in SIGNS
        if (values := [commit.metrics[name] for commit in last if name in commit.metrics])
    }
    failures = [record.error for record in Log(store, "log/control", Control).read_from(0) if record.kind == "fail"]
    return Outcome(curve, signs, failures[0] if failures else "")


class Results:
    """The outcomes of a study, by preset and staleness."""

    def __init__(self, config: StudyConfig, outcomes: Mapping[Cell, Outcome]) -> None:
        self.config, self.outcomes = config, outcomes

    def of(self, preset: str, staleness: int) -> dict[int, Outcome]:
        """Return the outcomes by seed."""
        return {c.seed: o for c, o in self.outcomes.items() if (c.preset, c.staleness) == (preset, staleness)}

    def final(self, preset: str, staleness: int) -> Estimate:
        """Return the final score over seeds."""
        return estimate([outcome.final for outcome in self.of(preset, staleness).values()])

    def gain(self, preset: str, staleness: int) -> Estimate:
        """Return the final score less that of the study's first preset at the same staleness, paired by seed."""
        base, own = self.of(self.config.presets[0], staleness), self.of(preset, staleness)
        return estimate([own[seed].final - base[seed].final for seed in sorted(own.keys() & base.keys())])

    def verdict(self, preset: str, staleness: int) -> str:
        """Return better, worse or the same: whether the interval of the gain excludes 0; empty without two seeds."""
        gain = self.gain(preset, staleness)
        if math.isnan(gain.half):
            return ""
        return "better" if gain.mean > gain.half else "worse" if -gain.mean > gain.half else "the same"

    def num_failed(self, preset: str, staleness: int) -> int:
        """Return how many runs ended early."""
        return sum(bool(outcome.failure) for outcome in self.of(preset, staleness).values())


def sentences(results: Results) -> list[str]:
    """Return what the study says of the first preset and of the others beside it, staleness by staleness."""
    config = results.config
    first, fresh = config.presets[0], min(config.staleness)
    told = []
    for staleness in config.staleness:
        if not results.of(first, staleness):
            continue
        by_verdict: dict[str, list[str]] = {}
        for preset in config.presets[1:]:
            by_verdict.setdefault(results.verdict(preset, staleness), []).append(preset)
        text = f"At staleness {staleness}, {first} ends at {results.final(first, staleness)}"
        if staleness != fresh and results.of(first, fresh):
            text += f" (at {fresh}: {results.final(first, fresh)})"
        parts = [
            f"{kind}: {', '.join(by_verdict[kind])}" for kind in ("better", "the same", "worse") if kind in by_verdict
        ]
        told.append(f"{text}. Beside it, by the paired 95 % interval, {'; '.join(parts)}." if parts else f"{text}.")
    return told


def write_study(config: StudyConfig, root: Store, folder: Path) -> Path:
    """Write <folder>/<study>.html and .md from what is done so far; return the path of the page."""
    results = Results(config, read_outcomes(config, root))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{config.name}.html"
    path.with_suffix(".md").write_text(render_markdown(results), encoding="utf-8")
    page = Template(TEMPLATE.read_text(encoding="utf-8"))
    path.write_text(page.substitute(title=escape(f"study {config.name}"), body=render_body(results)), encoding="utf-8")
    return path


def render_markdown(results: Results) -> str:
    """Return the table of final scores, and the sentences."""
    config = results.config
    num_cells = len(list(config.cells()))
    head = ["preset", *(f"staleness {k}" for k in config.staleness)]
    lines = [f"# Study {config.name}", "", config.about, "", _counts(results, num_cells), ""]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for preset in config.presets:
        lines.append(f"| {preset} | {' | '.join(_cell_text(results, preset, k) for k in config.staleness)} |")
    lines += ["", *(f"- {text}" for text in sentences(results)), ""]
    lines += [f"- `{preset}`: {config.describe(preset)}" for preset in config.presets]
    return "\n".join(lines) + "\n"


def _counts(results: Results, num_cells: int) -> str:
    return (
        f"{len(results.outcomes)} of {num_cells} runs done; score of the last version on held-out prompts, mean over "
        f"seeds {', '.join(map(str, results.config.seeds))} with 95 % intervals of Student's t."
    )


def _cell_text(results: Results, preset: str, staleness: int) -> str:
    if not results.of(preset, staleness):
        return "–"
    failed = results.num_failed(preset, staleness)
    return f"{results.final(preset, staleness)}{f', {failed} diverged' if failed else ''}"


def render_body(results: Results) -> str:
    """Return the page's HTML."""
    config = results.config
    columns = [("preset", False), *((f"staleness {k}", True) for k in config.staleness)]
    scores, gains = [], []
    for preset in config.presets:
        name = f'<td title="{escape(config.describe(preset))}">{escape(preset)}</td>'
        scores.append(f"<tr>{name}{number_cells([_cell_text(results, preset, k) for k in config.staleness])}</tr>")
        if preset != config.presets[0]:
            texts = [f"{results.gain(preset, k)} {results.verdict(preset, k)}" for k in config.staleness]
            gains.append(f"<tr>{name}{number_cells(texts)}</tr>")
    said = "".join(f"<p>{escape(text)}</p>" for text in sentences(results))
    tables = card("Final score", "last version, held-out prompts", table(columns, scores), is_wide=True)
    if gains:
        note = f"less that of {config.presets[0]} at the same staleness, paired by seed"
        tables += card("Difference", note, table(columns, gains), is_wide=True)
    curves = "".join(_curves(results, preset) for preset in config.presets)
    against = "".join(_sign_chart(results, name, title) for name, title in SIGNS.items())
    return "\n".join(
        [
            f"<header><h1>Study {escape(config.name)}</h1><p>{escape(config.about)}</p></header>",
            section("Outcome", _counts(results, len(list(config.cells()))), tables + said),
            section("Learning", "mean over seeds by staleness; thin lines bound the 95 % interval", _grid(curves)),
            section("Signs", "mean over the last quarter of the steps, by staleness", _grid(against)),
        ]
    )


def _grid(figures: str) -> str:
    return f'<div class="grid">{figures}</div>'


def _curves(results: Results, preset: str) -> str:
    series = []
    for i, staleness in enumerate(results.config.staleness):
        outcomes = list(results.of(preset, staleness).values())
        versions = sorted({version for outcome in outcomes for version in outcome.curve})
        found = [estimate([o.curve[v] for o in outcomes if v in o.curve]) for v in versions]
        color = i % 5 + 1
        series.append(Series(f"{staleness}", versions, [e.mean for e in found], color))
        for sign in (-1, 1):
            edge = [None if math.isnan(e.half) else e.mean + sign * e.half for e in found]
            series.append(Series("", versions, edge, color, "faint"))
    return line_chart(preset, series, note="score by version", bounds=(0.0, 1.0))


def _sign_chart(results: Results, metric: str, title: str) -> str:
    series = []
    for i, preset in enumerate(results.config.presets):
        points = [
            (k, statistics.fmean(values))
            for k in results.config.staleness
            if (values := [o.signs[metric] for o in results.of(preset, k).values() if metric in o.signs])
        ]
        xs = [math.log2(k + 1) for k, _ in points]
        series.append(Series(preset, xs, [y for _, y in points], i % 5 + 1, "dots"))
    return line_chart(title, series, note="by log2(1 + staleness)", x_name="log2(1 + staleness)")
