"""Tables for a terminal: the runs of a store, one run's records, one batch. Aligned plain text when piped."""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dashboards.fold import Fold
from dashboards.plots import format_number, format_seconds
from dashboards.snapshot import Snapshot, headline, snapshot
from data_contracts import trajectory
from data_contracts.errors import ConfigError, DigestMismatch
from data_contracts.records import Claim, Commit, Control, Curated, Evaluation, Raw, Record, Refused, Scored
from infra.heartbeats import read_heartbeats
from infra.log import Log
from infra.runs import list_run_ids, load_run
from infra.store import Store

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""

LOGS: tuple[tuple[str, type[Record]], ...] = (
    ("log/claim", Claim),
    ("log/curated", Curated),
    ("log/refused", Refused),
    ("log/commit", Commit),
    ("log/eval", Evaluation),
    ("log/control", Control),
)

TOKENS_SHOWN = 32
"""Tokens of a response that are shown one by one."""

SHA256_DIGITS = 64


def show_runs(root: Store, console: Console | None = None) -> None:
    """List the runs of a store, newest first. Reads a few records of each, however long it is."""
    console = console or Console()
    rows = []
    for run_id in list_run_ids(root):
        store = root.at(run_id)
        rows.append(_run_row(run_id, store))
    rows.sort(key=lambda row: row[0], reverse=True)
    if not rows:
        console.print(f"no runs in {root.url}", markup=False, highlight=False)
        return
    print_table(
        console, ("run", "name", "state", "step", "reward", "eval", "made"), [row[1] for row in rows], right=(3, 4, 5)
    )


def show_summary(store: Store, links: Mapping[str, str], console: Console | None = None) -> Snapshot:
    """Say in a few lines how a run stands and where everything is; return what was read."""
    console = console or Console()
    run = snapshot(store)
    pairs = [*summarize(run), *links.items()]
    width = max(len(name) for name, _ in pairs)
    for name, text in pairs:
        console.print(f"{name:<{width}}  {text}", soft_wrap=True, markup=False, highlight=False)
    return run


def show_run(store: Store, console: Console | None = None) -> None:
    """Show a run: how it stands, what each role did, whether its books balance, the last record of each log."""
    console = console or Console()
    run = show_summary(store, {}, console)
    _say(console, "")
    roles = [
        (
            use.role,
            str(use.writers),
            str(use.alive),
            "–" if use.busy_share is None else f"{100 * use.busy_share:.0f} %",
            format_seconds(use.busy_s),
            format_seconds(use.waiting_s),
            format_seconds(use.processor_s) if use.processor_s else "–",
            format_number(use.tokens) if use.tokens else "–",
            use.state,
        )
        for use in run.roles.values()
    ]
    print_table(
        console,
        ("role", "processes", "alive", "busy", "worked", "waited", "processor", "tokens", "does"),
        roles,
        right=(1, 2, 3, 4, 5, 6, 7),
    )
    for title, tallies in (("refused", run.refusals), ("errors", run.errors)):
        if tallies:
            rows = [
                (kind, str(tally.count), tally.example)
                for kind, tally in sorted(tallies.items(), key=lambda i: -i[1].count)
            ]
            print_table(console, (title, "count", "last"), rows, right=(1,))
    print_table(
        console, ("check", "", "counts"), [(c.name, "ok" if c.is_ok else "NOT SO", c.detail) for c in run.checks]
    )
    print_table(console, ("log", "records", "last one"), _log_rows(store), right=(1,))


def show_batch(
    store: Store, name: str, decode: Decode | None = None, *, rows: int = 8, console: Console | None = None
) -> None:
    """Show a batch so that a person can read it: prompt, response, reward, versions, log-probabilities.

    Args:
        store: view below the run's prefix.
        name: key (batch/<sha256>.arrow), SHA-256, or the beginning of one.
        decode: token ids to text; without it prompts are shown as ids, and responses unless they have been scored.
        rows: trajectories shown, at most.

    Raises:
        ConfigError: none or several batches match.
        DigestMismatch: the bytes are not those of the batch's name.
        SchemaMismatch: it is no batch of trajectories.
    """
    console = console or Console()
    key = find_batch(store, name)
    table = read_batch(store, key)
    stage = _stage_of(table)
    tickets = len(set(table.column("ticket").to_pylist()))
    _say(console, f"{key}: {stage}, {table.num_rows} trajectories of {tickets} tickets")
    for row in table.slice(0, rows).to_pylist():
        _say(console, "")
        _show_trajectory(console, row, decode)
    if table.num_rows > rows:
        _say(console, f"\n{table.num_rows - rows} more")


def find_batch(store: Store, name: str) -> str:
    """Return the key of the batch that a person means by `name`.

    Raises:
        ConfigError: none or several match.
    """
    digest = name.removeprefix("batch/").removesuffix(".arrow")
    if len(digest) == SHA256_DIGITS and store.exists(f"batch/{digest}.arrow"):
        return f"batch/{digest}.arrow"
    matching = [key for key in store.list("batch") if key.startswith(f"batch/{digest}")] if digest else []
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ConfigError(f"batch {name}: {len(matching)} batches of {store.url} begin so; give more digits")
    raise ConfigError(f"batch {name}: no such batch in {store.url}; `rollflow show` of the run names its newest ones")


def read_batch(store: Store, key: str) -> pa.Table:
    """Return the table under a key named by its SHA-256, verified.

    Raises:
        DigestMismatch: the bytes are not those of the name.
        SchemaMismatch: it is no batch of trajectories.
    """
    body = store.get(key)
    expected = key.rsplit("/", 1)[-1].removesuffix(".arrow")
    found = hashlib.sha256(body).hexdigest()
    if found != expected:
        raise DigestMismatch(f"{store.url}/{key}: expected SHA-256 {expected}, got {found}")
    table = trajectory.decode(body, name=key)
    trajectory.check_schema(table.schema, _stage_of(table))
    return table


def summarize(run: Snapshot) -> list[tuple[str, str]]:
    """Return how a run stands, as (name, text)."""
    steps = f" of {run.steps}" if run.steps else ""
    pairs = [("run", run.run), ("state", f"{run.state}{': ' + run.error if run.error else ''}")]
    if run.state == "silent":
        pairs[-1] = ("state", f"no sign of life for {format_seconds(run.age_s)}")
    left = f", {format_seconds(run.eta_s)} left" if run.eta_s is not None else ""
    pairs.append(("step", f"{max(run.step, 0)}{steps} in {format_seconds(run.duration_s)}{left}"))
    rewards = [v.reward for v in run.versions if v.reward is not None]
    if rewards:
        few = max(1, min(10, len(rewards) // 2))
        pairs.append(
            ("reward", f"{_mean(rewards[:few]):.3f} at first, {_mean(rewards[-few:]):.3f} now (mean of {few} steps)")
        )
    if run.evaluations:
        tops = [(e.version, top) for e in (run.evaluations[0], run.evaluations[-1]) if (top := headline(e))]
        pairs.append(
            (
                "evaluation",
                ", ".join(f"{top[0].removeprefix('eval/')} {top[1]:.3f} at step {v}" for v, top in dict(tops).items()),
            )
        )
    total = sum(run.staleness.values())
    if total:
        mean = sum(age * n for age, n in run.staleness.items()) / total
        bound = "no bound" if run.max_staleness is None else f"bound {run.max_staleness}"
        pairs.append(("staleness", f"mean {mean:.2f}, max {max(run.staleness)}, {bound}"))
    refused = run.refused_curation + run.refused_trainer
    pairs.append(
        ("tickets", f"{run.issued} = {run.trained} trained + {refused} refused + {run.queues.total} in flight")
    )
    bad = [check for check in run.checks if not check.is_ok]
    pairs += [("NOT SO", f"{check.name}: {check.detail}") for check in bad]
    return pairs


def print_table(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
) -> None:
    """Print a table: with rules on a terminal, as aligned text that can be grepped and cut elsewhere."""
    if console.is_terminal:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
        _say(console, "")
        return
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        _say(console, "  ".join(cells).rstrip())
    _say(console, "")


def _run_row(run_id: str, store: Store) -> tuple[float, tuple[str, ...]]:
    """Return (when it was made, the cells of its row); a run of another version of Rollflow has a row too."""
    try:
        run = load_run(store.url)
        name, steps, made = run.config.name, f"/{run.config.steps}", run.created_at
        limit_s = run.config.orchestration.heartbeat_limit_s
    except ConfigError:
        name, steps, made, limit_s = "(unreadable run.json)", "", 0.0, math.inf
    fold = Fold()
    for record in Log(store, "log/control", Control).read_from(0):
        fold.control(record)
    commit = Log(store, "log/commit", Commit).last()
    evaluation = Log(store, "log/eval", Evaluation).last()
    top = headline(evaluation) if evaluation else None
    newest_beat = max((beat.at for beat in read_heartbeats(store)), default=fold.last_at or 0.0)
    is_silent = fold.state == "running" and time.time() - newest_beat > limit_s
    cells = (
        run_id,
        name,
        "silent" if is_silent else fold.state,
        f"{commit.version if commit else 0}{steps}",
        format_number(commit.metrics.get("reward/mean") if commit else None),
        format_number(top[1] if top else None),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(made)) if made else "–",
    )
    return made, cells


def _log_rows(store: Store) -> list[tuple[str, str, str]]:
    """Name, length and last record of every log. Rollout logs are found through claims."""
    claims = Log(store, "log/claim", Claim).read_from(0)
    writers = dict.fromkeys(claim.writer for claim in claims if claim.kind in ("claim", "reclaim"))
    logs = [*LOGS, *((f"log/{kind.__name__.lower()}/{writer}", kind) for writer in writers for kind in (Raw, Scored))]
    rows = []
    for path, kind in logs:
        log = Log(store, path, kind)
        rows.append((path, str(log.tail()), _short_record(log.last())))
    return rows


def _short_record(record: Record | None) -> str:
    """One line about a record: what a person looks for first."""
    match record:
        case Claim():
            whose = f"at version {record.version}, attempt {record.attempt}, by {record.writer}"
            return f"{record.kind} {_span(record.tickets)} {whose}"
        case Raw() | Scored():
            refused = f", {len(record.refused)} refused" if isinstance(record, Scored) and record.refused else ""
            where = f", {record.batch.key[:18]}" if record.batch else ""
            return f"{len(record.groups)} groups{refused}{where}"
        case Curated():
            accepted = sum(verdict.accepted for verdict in record.verdicts)
            return f"{accepted} accepted, {len(record.verdicts) - accepted} refused, {len(record.late)} late"
        case Refused():
            return f"{record.reason} {_span(record.tickets)} {record.detail}".rstrip()
        case Commit():
            digest = record.weights.digest[:16]
            return f"version {record.version} {record.status}, {len(record.consumed)} groups, digest {digest}"
        case Evaluation():
            return f"version {record.version}: " + ", ".join(f"{k} {v:.4g}" for k, v in record.metrics.items())
        case Control():
            return " ".join(filter(None, (record.kind, record.role, record.target, record.error)))
        case _:
            return "–"


def _show_trajectory(console: Console, row: Mapping[str, Any], decode: Decode | None) -> None:
    """A heading, the texts, and the sampled tokens with their log-probabilities."""
    heading = [
        f"ticket {row['ticket']}",
        f"sample {row['sample']}",
        f"attempt {row['attempt']}",
        row["prompt_id"],
        f"version {'-'.join(map(str, row['used_versions'])) or 'none'}",
        row["finish_reason"],
    ]
    if "reward" in row:
        heading.append("no reward: " + row["reward_error"] if row["reward_error"] else f"reward {row['reward']:g}")
        if len(row["reward_names"]) > 1:
            heading += [f"{n} {v:g}" for n, v in zip(row["reward_names"], row["reward_values"], strict=True)]
    _say(console, "  ".join(heading), style="bold")
    if row["error"]:
        _say(console, f"  error     {row['error']}")
    prompt = decode(row["prompt_ids"]) if decode else " ".join(map(str, row["prompt_ids"]))
    response = (
        decode(row["response_ids"]) if decode else row.get("response_text", " ".join(map(str, row["response_ids"])))
    )
    _say(console, f"  prompt    {_indented(prompt)}")
    _say(console, f"  response  {_indented(response)}")
    sampled = [lp for lp, is_action in zip(row["behavior_logprobs"], row["action_mask"], strict=True) if is_action]
    if sampled:
        counts = f"{len(sampled)} sampled of {len(row['action_mask'])} tokens"
        _say(console, f"  logprob   mean {_mean(sampled):.3f}, least {min(sampled):.3f}, {counts}")
    _say(console, f"  tokens    {_tokens(row, decode)}")


def _tokens(row: Mapping[str, Any], decode: Decode | None) -> str:
    """Each token with its log-probability, none for an inserted one; `v` marks where another version begins."""
    shown, before = [], None
    columns = ("response_ids", "behavior_logprobs", "policy_versions")
    for token, logprob, version in list(zip(*(row[c] for c in columns), strict=True))[:TOKENS_SHOWN]:
        mark = f"v{version}:" if version not in (before, -1) else ""
        before = version if version != -1 else before
        text = repr(decode([token]))[1:-1] if decode else str(token)
        shown.append(f"{mark}{text}" + ("[inserted]" if math.isnan(logprob) else f"({logprob:.2f})"))
    more = len(row["response_ids"]) - len(shown)
    return " ".join(shown) + (f" and {more} more" if more > 0 else "")


def _stage_of(table: pa.Table) -> trajectory.Stage:
    contract = (table.schema.metadata or {}).get(b"contract", b"").decode()
    return "scored" if contract == "trajectory/scored" else "raw"


def _span(tickets: Sequence[int]) -> str:
    if not tickets:
        return ""
    return f"ticket {tickets[0]}" if len(tickets) == 1 else f"tickets {tickets[0]} to {tickets[-1]} ({len(tickets)})"


def _indented(text: str) -> str:
    return text.replace("\n", "\n            ")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, soft_wrap=True, markup=False, highlight=False)
