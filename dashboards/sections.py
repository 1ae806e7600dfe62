"""The charts of a run's report: learning, staleness, time, training. Pure functions from a snapshot to HTML."""

import math
from collections.abc import Sequence
from html import escape

from dashboards import plots
from dashboards.fold import Activity, Version
from dashboards.markup import card, number_cells, section, spoken, table, unit
from dashboards.plots import Series, format_number, format_seconds
from dashboards.snapshot import Snapshot, headline
from data_contracts.metrics import declared

TRAINING_CHARTS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Gradient norm", "before clipping", {"optimizer/grad_norm": "norm"}),
    (
        "Importance ratio",
        "current over behavior probability, by token",
        {"policy/ratio_mean": "mean", "policy/ratio_p95": "95 %", "policy/ratio_p05": "5 %"},
    ),
    ("KL", "nats, estimator k3", {"policy/kl_behavior": "from behavior", "policy/kl_proximal": "from proximal"}),
    (
        "Clip fraction",
        "tokens whose gradient is cut",
        {"loss/clip_fraction_high": "ratio too high", "loss/clip_fraction_low": "too low"},
    ),
    ("Entropy", "nats, of the next token", {"policy/entropy": "entropy"}),
    (
        "Effective sample size",
        "share of what was sampled",
        {"policy/ess_token": "tokens", "policy/ess_sequence": "sequences"},
    ),
    ("Sampler against trainer", "KL at equal version, nats", {"policy/mismatch_k3": "k3"}),
    (
        "Response length",
        "tokens, by reward against its group's mean",
        {"length/mean": "all", "length/better": "above", "length/worse": "below"},
    ),
    (
        "Little to learn from",
        "share of groups, share of samples",
        {"reward/zero_variance_groups": "equal rewards", "length/truncated": "cut off"},
    ),
)
"""Title, note, and the metrics with the names they have in the key."""

MAX_SMOOTHED = 20
"""Steps that the smoothed reward looks back at most: more would draw learning later than it was."""

BARS_SHOWN = 11
"""Ages with a bar of their own; older ones share one."""

SHORT_RUN_S = 180.0
"""Up to this duration time is drawn in seconds, beyond it in minutes."""


def learning(run: Snapshot) -> str:
    """Reward and evaluation by version."""
    trained = [v for v in run.versions if v.reward is not None]
    xs, ys = [v.version for v in trained], [v.reward for v in trained]
    width = min(len(xs) // 15, MAX_SMOOTHED)
    reward = [Series("reward", xs, ys, 1, "line" if width < 3 else "faint")]
    if width > 2:
        reward.append(Series(f"mean of {width} steps", xs, plots.smooth(ys, width), 1))
    names = dict.fromkeys(name for e in run.evaluations if (top := headline(e)) for name in (top[0], *e.metrics))
    kept = [name for name in names if unit(name) == unit(next(iter(names)))][:5]  # one axis, one unit
    versions = [e.version for e in run.evaluations]
    evaluation = [
        Series(spoken(name), versions, [e.metrics.get(name) for e in run.evaluations], color, "dots")
        for color, name in enumerate(kept, 1)
    ]
    charts = "".join(
        plots.line_chart(title, series, note=note, bounds=_share_bounds(series))
        for title, series, note in (
            ("Reward", reward, "mean over the samples a commit trained on, by version"),
            ("Evaluation", evaluation, "held-out prompts, by version"),
        )
    )
    return section("Learning", "", f'<div class="grid">{charts}</div>') if charts else ""


def freshness(run: Snapshot) -> str:
    """Staleness: how old the tokens were when they were trained on."""
    total = sum(run.staleness.values())
    if not total:
        return ""
    most = max(run.staleness)
    counts = [run.staleness.get(age, 0.0) for age in range(most + 1)]
    named = [(str(age), n) for age, n in enumerate(counts[:BARS_SHOWN])]
    if counts[BARS_SHOWN:]:
        named.append(("more", sum(counts[BARS_SHOWN:])))
    drawn = plots.bars([(name, n, f"{100 * n / total:.1f} %") for name, n in named])
    mean = sum(age * n for age, n in enumerate(counts)) / total
    summary = f'<p class="note">mean {mean:.2f}, at most {most}</p>'
    histogram = card("All tokens", "age in versions: version trained from, less version that sampled", drawn + summary)
    note = "share of tokens of each age, by version" + ("; dashed: the bound" if run.max_staleness is not None else "")
    ages = {v.version: v.staleness for v in run.versions}
    strip = plots.heat_strip("Over time", ages, note=note, bound=run.max_staleness)
    bound = "without a bound" if run.max_staleness is None else f"at most {run.max_staleness} versions apart"
    lead = f"How old the sampled tokens were when they were trained on. Sampling and training run {bound}."
    return section("Staleness", lead, f'<div class="grid">{histogram}{strip}</div>')


def throughput(run: Snapshot) -> str:
    """Who worked, who waited, and how many tokens per second."""
    scale, x_name = (60.0, "minute") if (run.duration_s or 0) > SHORT_RUN_S else (1.0, "second")
    rates = rate_over_time(run.activity, ("rollout", "train"), run.first_at or 0.0)
    series = [
        Series(role, [x / scale for x in xs], ys, color) for color, (role, (xs, ys)) in enumerate(rates.items(), 1)
    ]
    note = f"response tokens sampled and trained on, by {x_name}"
    charts = plots.line_chart("Tokens per second", series, note=note, x_name=x_name, bounds=(0, None))
    times = [
        _metric_series(run.versions, ("time/step_s", "train/step_s"), "training", 2),
        _metric_series(run.versions, ("time/wait_s",), "waiting for groups", 3),
    ]
    times = [series for series in times if series.xs]
    charts += plots.line_chart("Time of a step", times, note="seconds, by version", bounds=(0, None))
    body = role_times(run) + charts
    return section("Time", "", f'<div class="grid">{body}</div>') if body else ""


def role_times(run: Snapshot) -> str:
    """A bar for each role: what share of its time it worked."""
    rows = []
    for use in run.roles.values():
        if use.busy_share is None:
            continue
        rate = f"{format_number(use.tokens / use.busy_s)} tok/s" if use.tokens and use.busy_s else ""
        processor = f"processor {format_seconds(use.processor_s)}" if use.processor_s else ""
        processes = f" × {use.writers}" if use.writers > 1 else ""
        bar = plots.stacked([("worked, s", use.busy_s, 1), ("waited, s", use.waiting_s, 0)])
        rows.append(
            f'<div class="role"><b>{escape(use.role)}{processes}</b>{bar}'
            f"<span><b>{100 * use.busy_share:.0f} %</b></span>"
            f'<span class="extra">of {format_seconds(use.busy_s + use.waiting_s)}</span>'
            f'<span class="extra">{processor}</span><span class="extra">{rate}</span></div>'
        )
    if not rows:
        return ""
    legend = '<div class="legend"><span><i class="f1"></i>worked</span><span><i class="f0"></i>waited</span></div>'
    note = "all processes of a role together; tokens per second of work"
    return card("Time of each role", note, f'<div class="roles">{"".join(rows)}</div>{legend}', is_wide=True)


def training(run: Snapshot) -> str:
    """What the optimizer saw."""
    charts = ""
    for title, note, names in TRAINING_CHARTS:
        series = [_metric_series(run.versions, (name,), key, i) for i, (name, key) in enumerate(names.items(), 1)]
        charts += plots.line_chart(title, [s for s in series if s.xs], note=note)
    metrics = every_metric(run.versions)
    return section("Training", "", f'<div class="grid three">{charts}</div>{metrics}') if charts or metrics else ""


def every_metric(versions: Sequence[Version]) -> str:
    """A table of all metrics of the commits: declared meaning, last value, range and course."""
    rows = []
    for name in sorted({name for v in versions for name in v.metrics}):
        ys = [v.metrics[name] for v in versions if name in v.metrics]
        declared_unit, doc = declared(name) or ("", "not declared")
        finite = [y for y in ys if math.isfinite(y)]
        least, most = (min(finite), max(finite)) if finite else (None, None)
        rows.append(
            f'<tr><td class="mono">{escape(name)}</td><td>{plots.sparkline(ys)}</td>'
            f"{number_cells([format_number(y) for y in (ys[-1], least, most)])}"
            f'<td>{escape(declared_unit)}</td><td class="wrap">{escape(doc)}</td></tr>'
        )
    if not rows:
        return ""
    names = ("metric", "course", "last", "least", "most", "unit", "meaning")
    drawn = table([(name, name in ("last", "least", "most")) for name in names], rows)
    return f'<details class="card"><summary>All {len(rows)} metrics</summary>{drawn}</details>'


def rate_over_time(
    activity: Sequence[Activity], roles: Sequence[str], start: float, num_bins: int = 60
) -> dict[str, tuple[list[float], list[float | None]]]:
    """Return, for each role that told tokens, (seconds since `start`, tokens per second) in equal stretches of time.

    All roles share the stretches; there are at most `num_bins`, and fewer while records are few.
    """
    told = {role: [a for a in activity if a.role == role and a.tokens] for role in roles}
    told = {role: mine for role, mine in told.items() if mine}
    if not told:
        return {}
    num_bins = max(1, min(num_bins, *(len(mine) // 2 for mine in told.values())))
    width = max((max(a.at for mine in told.values() for a in mine) - start) / num_bins, 1e-3)
    middles = [(i + 0.5) * width for i in range(num_bins)]
    rates = {}
    for role, mine in told.items():
        sums = [0.0] * num_bins
        for a in mine:
            sums[min(max(int((a.at - start) / width), 0), num_bins - 1)] += a.tokens
        rates[role] = (middles, [total / width for total in sums])
    return rates


def _metric_series(versions: Sequence[Version], names: Sequence[str], key: str, color: int) -> Series:
    """One metric by version; `names` stand in for each other, best first."""
    points = [(v.version, next((v.metrics[n] for n in names if n in v.metrics), None)) for v in versions]
    points = [(x, y) for x, y in points if y is not None]
    return Series(key, [x for x, _ in points], [y for _, y in points], color)


def _share_bounds(series: Sequence[Series]) -> tuple[float | None, float | None]:
    """0 and 1 when everything lies between them, so that a share is not drawn larger than it is."""
    numbers = [y for s in series for y in s.ys if y is not None and math.isfinite(y)]
    return (0.0, 1.0) if numbers and min(numbers) >= 0 and max(numbers) <= 1 else (None, None)
