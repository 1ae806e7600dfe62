"""The parts of a run's report that are not charts: how it stands, its books, examples, versions, how to go on."""

import json
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dashboards import plots
from dashboards.markup import card, link, mean, number_cells, section, spoken, table, tally_card
from dashboards.plots import format_number, format_seconds
from dashboards.snapshot import Snapshot, headline

MAX_VERSION_ROWS = 2000
MAX_EVENTS = 300
EXAMPLES_SHOWN = 12

SHORT_CHARACTERS = 24
"""Values of an example up to this length share a line."""


def header(run: Snapshot) -> str:
    """Who, how it stands, and the few numbers one looks for first."""
    facts = [f"<span><b>{escape(text)}</b></span>" for text in summarize_config(run.config)]
    started = run.created_at or run.first_at
    if started:
        facts.append(f"<span>{time.strftime('%Y-%m-%d %H:%M', time.localtime(started))}</span>")
    return (
        f'<p class="eyebrow">Rollflow run report</p><div class="title"><h1>{escape(run.run)}</h1>'
        f'<span class="pill {run.state}">{run.state}</span></div>'
        f'<p class="facts">{"".join(facts)}</p>{banner(run)}{tiles(run)}'
    )


def banner(run: Snapshot) -> str:
    """What is wrong with the run, if anything is."""
    if run.state == "failed":
        return f'<div class="banner">The run failed.<code>{escape(run.error)}</code></div>'
    bad = "; ".join(check.name for check in run.checks if not check.is_ok)
    if bad:
        return f'<div class="banner">The books do not balance. Not true: {escape(bad)}.</div>'
    if run.state == "silent":
        ago = format_seconds(run.age_s)
        return f'<div class="banner warn">No sign of life for {ago}: it was killed, or its host is away.</div>'
    return ""


def tiles(run: Snapshot) -> str:
    """Six numbers."""
    steps = f" <small>of {run.steps}</small>" if run.steps else ""
    tops = [top for e in run.evaluations if (top := headline(e))]
    evaluation = format_number(tops[-1][1]) if tops else "–"
    if len(tops) > 1:
        evaluation += f" <small>from {format_number(tops[0][1])}</small>"
    rewards = [v.reward for v in run.versions if v.reward is not None]
    reward = format_number(mean(rewards[-10:]))
    if len(rewards) >= 20:
        reward += f" <small>from {format_number(mean(rewards[:10]))}</small>"
    total = sum(run.staleness.values())
    age = sum(age * n for age, n in run.staleness.items()) / total if total else None
    bound = "∞" if run.max_staleness is None else run.max_staleness
    shown = (
        ("Version", f"{max(run.step, 0)}{steps}"),
        ("Reward, last 10 steps", reward),
        (f"Evaluation, {spoken(tops[-1][0])}" if tops else "Evaluation", evaluation),
        ("Staleness, mean", f"{format_number(age)} <small>bound {bound}</small>"),
        ("Tokens trained", format_number(run.num_tokens)),
        ("Time", format_seconds(run.duration_s)),
    )
    drawn = "".join(f'<div class="tile"><p>{escape(name)}</p><b>{value}</b></div>' for name, value in shown)
    return f'<div class="tiles">{drawn}</div>'


def books(run: Snapshot) -> str:
    """Where every ticket went, whether the counts agree, and what was refused and why."""
    if not run.issued:
        return ""
    refused = tally_card("Refused, and why", "tickets", run.refusals, 2)
    errors = tally_card("Errors, survived or not", "occurrences", run.errors, 5)
    body = f'<div class="grid">{account(run)}<div class="pile">{refused}{errors}</div></div>'
    return section("The books", "Every ticket ends exactly once: trained, or refused for a reason.", body)


def account(run: Snapshot) -> str:
    """The tickets as one bar, and the checks under it."""
    parts = (
        ("trained", run.trained, 1),
        ("refused by curation", run.refused_curation, 2),
        ("refused by the trainer", run.refused_trainer, 5),
        ("in flight", run.queues.total, 0),
    )
    legend = "".join(f'<span><i class="f{color}"></i>{name} <b>{n}</b></span>' for name, n, color in parts if n)
    notes = ["each is one group of samples"]
    notes += [f"{run.reclaimed} claimed again"] if run.reclaimed else []
    notes += [f"{run.late} late results set aside"] if run.late else []
    checks = "".join(
        f'<li class="{"good" if c.is_ok else "bad"}"><div>{escape(c.name)} <span>{escape(c.detail)}</span></div></li>'
        for c in run.checks
    )
    body = f'{plots.stacked(parts)}<div class="legend">{legend}</div><ul class="checks">{checks}</ul>'
    return card(f"{run.issued} tickets", "; ".join(notes), body)


def examples(run: Snapshot) -> str:
    """What the newest evaluated policy answered."""
    found = next((e for e in reversed(run.evaluations) if e.examples), None)
    if found is None:
        return ""
    cards = "".join(_example(example) for example in found.examples[:EXAMPLES_SHOWN])
    lead = f"Held-out prompts, answered by version {found.version}."
    return section("Examples", lead, f'<div class="examples">{cards}</div>')


def version_table(run: Snapshot) -> str:
    """Every version with its digest, newest first."""
    if not run.versions:
        return ""
    shown = run.versions[-MAX_VERSION_ROWS:]
    start = run.first_at or 0.0
    rows = []
    for v in reversed(shown):
        counts = (format_number(v.reward), str(v.num_groups), format_number(v.num_tokens))
        mark = " + checkpoint" if v.has_checkpoint else ""
        rows.append(
            f'<tr class="{escape(v.status)}" title="{escape(v.evidence)}"><td class="n">{v.version}</td>'
            f"<td>{escape(v.status)}</td>{number_cells([format_seconds(max(v.at - start, 0.0)), *counts])}"
            f"<td>{escape(v.weights)}{mark}</td>{number_cells([f'{v.num_bytes / 1e6:.2f} MB'])}"
            f'<td class="mono">{escape(v.digest)}</td></tr>'
        )
    names = ("version", "status", "after", "reward", "groups", "tokens", "weights", "size", "digest of the weights")
    texts = ("status", "weights", "digest of the weights")
    left_out = f"The last {len(shown)} of {len(run.versions)} versions. " if len(shown) < len(run.versions) else ""
    lead = f"{left_out}The digest is taken over the weights as they lie in the engine that samples from them."
    drawn = table([(name, name not in texts) for name in names], rows)
    return section("Versions", lead, f'<div class="card">{drawn}</div>')


def history(run: Snapshot) -> str:
    """Starts, stops, deaths and failures."""
    events = sorted(run.events, key=lambda e: e.at)[-MAX_EVENTS:]
    if not events:
        return ""
    start = run.first_at or events[0].at
    rows = "".join(
        f'<tr><td class="n">{format_seconds(max(e.at - start, 0.0))}</td><td><b>{escape(e.kind)}</b></td>'
        f'<td class="wrap">{escape(e.text)}</td></tr>'
        for e in events
    )
    drawn = f'<div class="scroll"><table class="narrow"><tbody>{rows}</tbody></table></div>'
    return section("History", "", f'<div class="card">{drawn}</div>')


def configuration(run: Snapshot) -> str:
    """The whole resolved configuration, and the packages it ran with."""
    if not run.config:
        return ""
    whole = escape(json.dumps(run.config, indent=2, ensure_ascii=False))
    packages = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(v))}</dd>" for name, v in run.packages.items())
    return section(
        "Configuration",
        "",
        f'<details class="card"><summary>Resolved configuration</summary><pre>{whole}</pre></details>'
        f'<details class="card"><summary>Packages</summary><dl class="conf">{packages}</dl></details>',
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
    body += "".join(f"<span>{escape(name)}</span>{link(url)}" for name, url in links.items())
    return section("How to go on", "", f'<div class="card commands">{body}</div>')


def summarize_config(config: Mapping[str, Any]) -> list[str]:
    """Return a few phrases that say what kind of run it is; empty for an unknown configuration."""
    if not config:
        return []
    model = config.get("model", {})
    eta = config.get("staleness", {}).get("max_staleness")
    rate = config.get("train", {}).get("learning_rate")
    phrases = [
        str(model.get("path") or f"{model.get('type', '?')} model"),
        " + ".join(str(env.get("dataset") or env.get("type", "?")) for env in config.get("envs", [])),
        f"{config.get('groups_per_step', '?')} groups × {config.get('samples_per_group', '?')} samples",
        "synchronous" if eta == 0 else f"staleness ≤ {'∞' if eta is None else eta}",
        f"learning rate {rate:g}" if rate else "",
        f"seed {config.get('seed', 0)}",
    ]
    return [phrase for phrase in phrases if phrase]


def _example(example: Mapping[str, str]) -> str:
    """One answered prompt: long texts below one another, short values in a line; the edge tells right from wrong."""
    try:
        kind = "good" if float(example["reward"]) >= 1.0 else "poor"
    except (KeyError, ValueError):
        kind = ""
    longs = [k for k in example if k in ("prompt", "response") or len(example[k]) > SHORT_CHARACTERS]
    shorts = [k for k in example if k not in longs]
    return (
        f'<div class="card example {kind}"><dl>{_terms(example, longs)}'
        f'<div class="few">{_terms(example, shorts)}</div></dl></div>'
    )


def _terms(example: Mapping[str, str], names: Sequence[str]) -> str:
    return "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(example[k])}</dd></div>" for k in names)
