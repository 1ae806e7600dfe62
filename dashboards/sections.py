"""The sections of a run's report, each a pure function from a snapshot to HTML. All text of a run is escaped here."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dashboards import plots
from dashboards.fold import Activity, Tally, Version
from dashboards.plots import Series, format_number, format_seconds
from dashboards.snapshot import Snapshot, headline
from data_contracts.metrics import declared

TRAINING_CHARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Gradient norm", "before clipping", ("optimizer/grad_norm",)),
    (
        "Importance ratio",
        "current over behavior, by token",
        ("policy/ratio_mean", "policy/ratio_p95", "policy/ratio_p05"),
    ),
    ("KL", "nats, estimator k3", ("policy/kl_behavior", "policy/kl_proximal")),
    ("Clip fraction", "tokens whose gradient is cut", ("loss/clip_fraction_high", "loss/clip_fraction_low")),
    ("Entropy", "nats, of the next token", ("policy/entropy",)),
    ("Effective sample size", "share of the samples", ("policy/ess_token", "policy/ess_sequence")),
    ("Sampler against trainer", "KL at equal version, nats", ("policy/mismatch_k3",)),
    ("Response length", "tokens", ("length/mean", "length/better", "length/worse")),
    ("Groups without a signal", "share of the step", ("reward/zero_variance_groups", "length/truncated")),
)

MAX_VERSION_ROWS = 2000

EXAMPLES_SHOWN = 12

SHORT_CHARACTERS = 24
"""Values of an example up to this length share a line."""


def header(run: Snapshot) -> str:
    """Who, how it stands, and the few numbers one looks for first."""
    config = run.config
    name = f"{escape(run.run)}"
    facts = [f"<span><b>{escape(text)}</b></span>" for text in summarize_config(config)]
    started = run.created_at or run.first_at
    if started:
        facts.append(f"<span>{_clock(started)}</span>")
    banner = ""
    if run.state == "failed":
        banner = f'<div class="banner">The run failed.<code>{escape(run.error)}</code></div>'
    elif run.state == "silent":
        banner = f'<div class="banner warn">No sign of life for {format_seconds(run.age_s)}: it was killed, or its host is away.</div>'
    elif any(not check.is_ok for check in run.checks):
        bad = "; ".join(check.name for check in run.checks if not check.is_ok)
        banner = f'<div class="banner">The books do not balance. Not true: {escape(bad)}.</div>'
    return (
        f'<p class="eyebrow">Rollflow run report</p><div class="title"><h1>{name}</h1>'
        f'<span class="pill {run.state}">{run.state}</span></div><p class="facts">{"".join(facts)}</p>{banner}{tiles(run)}'
    )


def tiles(run: Snapshot) -> str:
    """Six numbers."""
    steps = f" <small>of {run.steps}</small>" if run.steps else ""
    first, last = (headline(e) for e in (run.evaluations[0], run.evaluations[-1])) if run.evaluations else (None, None)
    evaluation = format_number(last[1]) if last else "–"
    if first and last and len(run.evaluations) > 1:
        evaluation += f" <small>from {format_number(first[1])}</small>"
    rewards = [v.reward for v in run.versions if v.reward is not None]
    reward = format_number(_mean(rewards[-10:]))
    if len(rewards) > 20:
        reward += f" <small>from {format_number(_mean(rewards[:10]))}</small>"
    total = sum(run.staleness.values())
    mean_age = sum(age * n for age, n in run.staleness.items()) / total if total else None
    bound = "∞" if run.max_staleness is None else run.max_staleness
    shown = (
        ("Version", f"{max(run.step, 0)}{steps}"),
        ("Reward, last 10 steps", reward),
        (_spoken(last[0]) if last else "Evaluation", evaluation),
        ("Staleness, mean", f"{format_number(mean_age)} <small>bound {bound}</small>"),
        ("Tokens trained", format_number(run.num_tokens)),
        ("Time", format_seconds(run.duration_s)),
    )
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><p>{escape(n)}</p><b>{v}</b></div>' for n, v in shown)
        + "</div>"
    )


def learning(run: Snapshot) -> str:
    """Reward and evaluation by version."""
    trained = [v for v in run.versions if v.reward is not None]
    xs, ys = [v.version for v in trained], [v.reward for v in trained]
    width = max(1, len(xs) // 20)
    reward = [Series("reward", xs, ys, 1, "line" if width < 2 else "faint")]
    if width > 1:
        reward.append(Series(f"mean of {width} steps", xs, plots.smooth(ys, width), 1))
    names = dict.fromkeys(name for e in run.evaluations if (top := headline(e)) for name in (top[0], *e.metrics))
    kept = [name for name in names if name.startswith("eval/") and _unit(name) == _unit(next(iter(names)))][:5]
    evaluation = [
        Series(
            _spoken(name),
            [e.version for e in run.evaluations],
            [e.metrics.get(name) for e in run.evaluations],
            i + 1,
            "dots",
        )
        for i, name in enumerate(kept)
    ]
    charts = plots.line_chart("Reward", reward, note="mean over the samples a commit trained on, by version")
    charts += plots.line_chart("Evaluation", evaluation, note="held-out prompts, by version")
    return _section("Learning", "", f'<div class="grid">{charts}</div>') if charts else ""


def freshness(run: Snapshot) -> str:
    """Staleness: how old the tokens were when they were trained on."""
    total = sum(run.staleness.values())
    if not total:
        return ""
    most = max(run.staleness)
    rows = [(str(age), n, f"{100 * n / total:.1f} %") for age in range(most + 1) for n in [run.staleness.get(age, 0.0)]]
    if len(rows) > 12:
        rows = [
            *rows[:11],
            ("more", sum(r[1] for r in rows[11:]), f"{100 * sum(r[1] for r in rows[11:]) / total:.1f} %"),
        ]
    histogram = (
        '<div class="card"><h3>All tokens</h3><p class="note">age in versions: version trained from, less version that '
        f"sampled</p>{plots.bars(rows)}</div>"
    )
    note = "share of tokens of each age, by version" + ("; dashed: the bound" if run.max_staleness is not None else "")
    strip = plots.heat_strip(
        "Over time", {v.version: v.staleness for v in run.versions}, note=note, bound=run.max_staleness
    )
    bound = "without a bound" if run.max_staleness is None else f"at most {run.max_staleness} versions apart"
    lead = f"How old the sampled tokens were when they were trained on. Sampling and training run {bound}."
    return _section("Staleness", lead, f'<div class="grid">{histogram}{strip}</div>')


def throughput(run: Snapshot) -> str:
    """Who worked, who waited, and how many tokens per second."""
    rows = []
    for use in run.roles.values():
        if use.busy_share is None:
            continue
        rate = f" · {format_number(use.tokens / use.busy_s)} tok/s busy" if use.tokens and use.busy_s else ""
        processes = f" × {use.writers}" if use.writers > 1 else ""
        parts = plots.stacked([("worked, s", use.busy_s, 1), ("waited, s", use.waiting_s, 0)])
        rows.append(
            f'<div class="role"><b>{escape(use.role)}{processes}</b>{parts}<span>{100 * use.busy_share:.0f} % of '
            f"{format_seconds(use.busy_s + use.waiting_s)}{rate}</span></div>"
        )
    use_card = ""
    if rows:
        legend = '<div class="legend"><span><i class="f1"></i>worked</span><span><i class="f0"></i>waited</span></div>'
        use_card = f'<div class="card wide"><h3>Time of each role</h3>{"".join(rows)}{legend}</div>'
    rates = [
        Series(role, *rate_over_time(run.activity, role, run.first_at or 0.0), color)
        for color, role in ((1, "rollout"), (2, "train"))
    ]
    rates = [series for series in rates if series.xs]
    charts = plots.line_chart(
        "Tokens per second", rates, note="response tokens sampled and trained on", x_name="minute", bounds=(0, None)
    )
    times = [
        _metric_series(run.versions, name, spoken, color, short=("time/step_s", "train/step_s"))
        for name, spoken, color in (("time/step_s", "training", 2), ("time/wait_s", "waiting", 3))
    ]
    charts += plots.line_chart(
        "Time of a step", [s for s in times if s.xs], note="seconds, by version", bounds=(0, None)
    )
    body = f'<div class="grid">{use_card}{charts}</div>'
    return _section("Time", "", body) if use_card or charts else ""


def training(run: Snapshot) -> str:
    """What the optimizer saw."""
    charts = ""
    for title, note, names in TRAINING_CHARTS:
        series = [_metric_series(run.versions, name, _spoken(name), i + 1) for i, name in enumerate(names)]
        charts += plots.line_chart(title, [s for s in series if s.xs], note=note)
    table = every_metric(run.versions)
    if not charts and not table:
        return ""
    return _section("Training", "", f'<div class="grid three">{charts}</div>{table}')


def every_metric(versions: Sequence[Version]) -> str:
    """A table of all metrics of the commits: declared meaning, last value, range and course."""
    names = sorted({name for v in versions for name in v.metrics})
    rows = []
    for name in names:
        ys = [v.metrics[name] for v in versions if name in v.metrics]
        unit, doc = declared(name) or ("", "not declared")
        finite = [y for y in ys if y == y and abs(y) != float("inf")]
        low, high = (min(finite), max(finite)) if finite else (None, None)
        rows.append(
            f'<tr><td class="mono">{escape(name)}</td><td>{plots.sparkline(ys)}</td><td class="n">{format_number(ys[-1])}</td>'
            f'<td class="n">{format_number(low)}</td><td class="n">{format_number(high)}</td><td>{escape(unit)}</td>'
            f'<td class="wrap">{escape(doc)}</td></tr>'
        )
    if not rows:
        return ""
    head = '<tr><th>metric</th><th>course</th><th class="n">last</th><th class="n">least</th><th class="n">most</th><th>unit</th><th>meaning</th></tr>'
    return (
        f'<details class="card"><summary>All {len(rows)} metrics</summary><div class="scroll"><table><thead>{head}</thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def books(run: Snapshot) -> str:
    """Where every ticket went, whether the counts agree, and what was refused and why."""
    if not run.issued:
        return ""
    parts = (
        ("trained", run.trained, 1),
        ("refused by curation", run.refused_curation, 2),
        ("refused by the trainer", run.refused_trainer, 5),
        ("in flight", run.queues.total, 0),
    )
    legend = "".join(
        f'<span><i class="f{c}"></i>{n} <b>{count}</b></span>' for n, count, c in parts if count or n == "trained"
    )
    extra = [
        f"{run.reclaimed} claimed again" if run.reclaimed else "",
        f"{run.late} late results set aside" if run.late else "",
    ]
    note = "; ".join(filter(None, extra))
    checks = "".join(
        f'<li class="{"good" if c.is_ok else "bad"}"><div>{escape(c.name)} <span>{escape(c.detail)}</span></div></li>'
        for c in run.checks
    )
    account = (
        f'<div class="card"><h3>{run.issued} tickets</h3><p class="note">{note or "each is one group of samples"}</p>'
        f'{plots.stacked(parts)}<div class="legend">{legend}</div><ul class="checks">{checks}</ul></div>'
    )
    refused = _tallies("Refused, and why", "tickets", run.refusals, 2)
    errors = _tallies("Errors, survived or not", "occurrences", run.errors, 5)
    lead = "Every ticket ends exactly once: trained, or refused for a reason."
    return _section(
        "The books",
        lead,
        f'<div class="grid">{account}<div class="grid" style="grid-template-columns:minmax(0,1fr)">{refused}{errors}</div></div>',
    )


def examples(run: Snapshot) -> str:
    """What the newest evaluated policy answered."""
    found = next((e for e in reversed(run.evaluations) if e.examples), None)
    if found is None:
        return ""
    cards = "".join(_example(example) for example in found.examples[:EXAMPLES_SHOWN])
    lead = f"Held-out prompts, answered by version {found.version}."
    return _section("Examples", lead, f'<div class="examples">{cards}</div>')


def version_table(run: Snapshot) -> str:
    """Every version with its digest."""
    if not run.versions:
        return ""
    shown = run.versions[-MAX_VERSION_ROWS:]
    start = run.first_at or 0.0
    rows = []
    for v in reversed(shown):
        mark = " · checkpoint" if v.has_checkpoint else ""
        rows.append(
            f'<tr class="{escape(v.status)}" title="{escape(v.evidence)}"><td class="n">{v.version}</td><td>{escape(v.status)}</td>'
            f'<td class="n">{format_seconds(v.at - start)}</td><td class="n">{format_number(v.reward)}</td><td class="n">{v.num_groups}</td>'
            f'<td class="n">{format_number(v.num_tokens)}</td><td>{escape(v.weights)}{mark}</td>'
            f'<td class="n">{format_number(v.num_bytes / 1e6)} MB</td><td class="mono">{escape(v.digest)}</td></tr>'
        )
    head = "".join(
        f'<th class="{"n" if n else ""}">{name}</th>'
        for name, n in (
            ("version", 1),
            ("status", 0),
            ("after", 1),
            ("reward", 1),
            ("groups", 1),
            ("tokens", 1),
            ("weights", 0),
            ("size", 1),
            ("digest of the weights", 0),
        )
    )
    left_out = f"The last {len(shown)} of {len(run.versions)} versions. " if len(shown) < len(run.versions) else ""
    lead = f"{left_out}The digest is computed over the weights as they are in the engine that serves them."
    return _section(
        "Versions",
        lead,
        f'<div class="card"><div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div></div>',
    )


def history(run: Snapshot) -> str:
    """Starts, stops, deaths and failures."""
    events = sorted(run.events, key=lambda e: e.at)
    if not events:
        return ""
    start = run.first_at or events[0].at
    rows = "".join(
        f'<tr><td class="n">{format_seconds(max(e.at - start, 0.0))}</td><td><b>{escape(e.kind)}</b></td><td class="wrap">{escape(e.text)}</td></tr>'
        for e in events[-300:]
    )
    return _section(
        "History", "", f'<div class="card"><div class="scroll"><table><tbody>{rows}</tbody></table></div></div>'
    )


def going_on(run: Snapshot, links: Mapping[str, str]) -> str:
    """Commands and links."""
    name = escape(run.run)
    commands = [
        ("go on with it", f"rollflow resume {name}"),
        ("look into its records", f"rollflow show {name}"),
        ("write this page again", f"rollflow report {name}"),
    ]
    if run.state in ("finished", "running"):
        commands = commands[1:]
    body = "".join(f"<span>{what}</span><code>{command}</code>" for what, command in commands)
    body += f"<span>its records</span><code>{escape(run.url)}</code>"
    body += "".join(f"<span>{escape(name)}</span>{_link(url)}" for name, url in links.items())
    return _section("How to go on", "", f'<div class="card commands">{body}</div>')


def configuration(run: Snapshot) -> str:
    """The whole resolved configuration, and the packages it ran with."""
    if not run.config:
        return ""
    packages = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(v))}</dd>" for name, v in run.packages.items())
    return _section(
        "Configuration",
        "",
        f'<details class="card"><summary>Resolved configuration</summary><pre>{escape(json.dumps(run.config, indent=2, ensure_ascii=False))}</pre></details>'
        f'<details class="card"><summary>Packages</summary><dl class="conf">{packages}</dl></details>',
    )


def summarize_config(config: Mapping[str, Any]) -> list[str]:
    """Return a few phrases that say what kind of run it is; empty for an unknown configuration."""
    if not config:
        return []
    model = config.get("model", {})
    phrases = [str(model.get("path") or f"{model.get('type', '?')} model")]
    phrases.append(" + ".join(str(e.get("dataset") or e.get("type", "?")) for e in config.get("envs", [])))
    phrases.append(f"{config.get('groups_per_step', '?')} groups × {config.get('samples_per_group', '?')} samples")
    eta = config.get("staleness", {}).get("max_staleness")
    phrases.append("synchronous" if eta == 0 else f"staleness ≤ {'∞' if eta is None else eta}")
    rate = config.get("train", {}).get("learning_rate")
    phrases.append(f"learning rate {rate:g}" if rate else "")
    phrases.append(f"seed {config.get('seed', 0)}")
    return [phrase for phrase in phrases if phrase]


def rate_over_time(
    activity: Sequence[Activity], role: str, start: float, num_bins: int = 60
) -> tuple[list[float], list[float | None]]:
    """Return (minutes since `start`, tokens per second) of a role in equal stretches of time."""
    mine = [a for a in activity if a.role == role and a.tokens]
    if not mine:
        return [], []
    span = max(a.at for a in mine) - start
    num_bins = max(1, min(num_bins, len(mine) // 2))
    width = max(span / num_bins, 1e-3)
    sums = [0.0] * num_bins
    for a in mine:
        sums[min(max(int((a.at - start) / width), 0), num_bins - 1)] += a.tokens
    return [(i + 0.5) * width / 60 for i in range(num_bins)], [total / width for total in sums]


def _section(title: str, lead: str, body: str) -> str:
    lead = f"<p>{escape(lead)}</p>" if lead else "<p></p>"
    return f"<section><h2>{escape(title)}</h2>{lead}{body}</section>"


def _tallies(title: str, note: str, tallies: Mapping[str, Tally], color: int) -> str:
    if not tallies:
        return f'<div class="card"><h3>{title}</h3><p class="note">none</p></div>'
    ranked = sorted(tallies.items(), key=lambda item: -item[1].count)[:12]
    rows = [(kind, float(tally.count), str(tally.count)) for kind, tally in ranked]
    drawn = plots.bars(rows, color, title_of={kind: tally.example for kind, tally in ranked})
    last = escape(ranked[0][1].example[:300])
    return (
        f'<div class="card"><h3>{title}</h3><p class="note">{note}</p>{drawn.replace("bars", "bars long", 1)}'
        f'<p class="note">most often, last: <span class="mono">{last}</span></p></div>'
    )


def _example(example: Mapping[str, str]) -> str:
    """One answered prompt: long texts below one another, short values in a line; the edge tells right from wrong."""
    try:
        is_good: bool | None = float(example["reward"]) >= 1.0 if "reward" in example else None
    except ValueError:
        is_good = None
    kind = {True: "good", False: "poor", None: ""}[is_good]
    longs = [k for k in example if k in ("prompt", "response") or len(example[k]) > SHORT_CHARACTERS]
    big = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(example[k])}</dd></div>" for k in longs)
    few = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in example.items() if k not in longs)
    return f'<div class="card example {kind}"><dl>{big}<div class="few">{few}</div></dl></div>'


def _metric_series(
    versions: Sequence[Version], name: str, spoken: str, color: int, short: tuple[str, ...] = ()
) -> Series:
    """One metric by version; `short` are names that stand in for it, best first."""
    names = short if name in short else (name,)
    points = [
        (v.version, v.metrics[found])
        for v in versions
        for found in [next((n for n in names if n in v.metrics), None)]
        if found
    ]
    return Series(spoken, [x for x, _ in points], [y for _, y in points], color)


def _spoken(name: str) -> str:
    """`policy/ratio_p95` is spoken `ratio p95`.

    >>> _spoken("eval/accuracy")
    'accuracy'
    """
    return name.split("/", 1)[-1].replace("_", " ").replace("/", " ")


def _unit(name: str) -> str:
    return (declared(name) or ("", ""))[0]


def _link(url: str) -> str:
    """A link if it is one that a browser may follow; otherwise its text."""
    if re.match(r"^(https?://|\.{0,2}/|[\w.-]+(/|$))", url):
        return f'<a href="{escape(url)}">{escape(url)}</a>'
    return f"<code>{escape(url)}</code>"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
