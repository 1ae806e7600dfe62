"""What `rollflow quarantine` does: lists what was refused, shows one refusal, releases a group after a yes."""

import json

import typer
from rich.console import Console
from rich.table import Table

from data_contracts.errors import ConfigError
from flows.show import decoder
from infra.runs import Run
from tasks.quarantine import Entry, fates, find_entry, read_quarantine, read_rows
from tasks.release import plan, release

SHORT = 12
"""Digits of an id that are shown; any unique beginning will do."""


def list_entries(run: Run, console: Console | None = None) -> None:
    """Print every refusal and what became of its ticket."""
    entries, told = read_quarantine(run.store), fates(run.store)
    if not entries:
        typer.echo(f"run {run.id}: nothing is in quarantine")
        return
    table = Table(title=f"run {run.id}: {len(entries)} in quarantine")
    for name in ("id", "stage", "ticket", "reason", "bytes", "fate"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        tickets = ", ".join(map(str, entry.tickets[:5])) + (" ..." if len(entry.tickets) > 5 else "")
        fate = told.get(entry.tickets[0], "in flight") if entry.tickets else ""
        where = entry.reference.key[: len("batch/") + SHORT] if entry.reference else ""
        table.add_row(entry.id[:SHORT], entry.stage, tickets, entry.reason, where, fate)
    (console or Console()).print(table)


def show_entry(run: Run, name: str, console: Console | None = None) -> None:
    """Print the rule, the values seen, and the refused rows in words.

    Raises:
        ConfigError: there is no such entry.
    """
    entry = find_entry(run.store, name)
    told = fates(run.store)
    typer.echo(f"id       {entry.id}\nstage    {entry.stage}\nreason   {entry.reason}")
    for ticket in entry.tickets:
        typer.echo(f"ticket   {ticket}: {told.get(ticket, 'in flight')}")
    if entry.evidence:
        typer.echo(f"values   {json.dumps(entry.evidence, sort_keys=True)}")
    if entry.reference is not None:
        typer.echo(f"bytes    {entry.reference.key} ({entry.reference.num_bytes})")
    try:
        (console or Console()).print(_rows(run, entry))
    except ConfigError as cause:  # the bytes may be what is wrong with it
        typer.echo(f"rows     {cause}")


def _rows(run: Run, entry: Entry) -> Table:
    decode = decoder(run)
    table = Table()
    for name in ("ticket", "sample", "prompt", "response", "reward", "versions", "finish", "error"):
        table.add_column(name, overflow="fold")
    for row in read_rows(run.store, entry).to_pylist():
        prompt, response = (
            decode(row[name]) if decode is not None else str(row[name]) for name in ("prompt_ids", "response_ids")
        )
        error = row["error"] or row.get("reward_error", "")
        reward = "" if row.get("reward") is None else f"{row['reward']:g}"
        versions = ", ".join(map(str, row["used_versions"]))
        table.add_row(
            str(row["ticket"]), str(row["sample"]), prompt, response, reward, versions, row["finish_reason"], error
        )
    return table


def release_entry(run: Run, name: str, *, is_confirmed: bool) -> None:
    """Release a group under a new ticket, or say what that would do.

    Raises:
        ConfigError: it cannot be trained any more, and why.
    """
    entry = find_entry(run.store, name)
    proposed = plan(run, entry)
    what = (
        f"{proposed.rows.num_rows} trajectories of ticket {proposed.ticket}, refused for: {entry.reason}; sampled from "
        f"version {proposed.oldest_version} on"
    )
    if not is_confirmed:
        typer.echo(f"would release {what}; add --yes to do it")
        return
    ticket = release(run, proposed)
    typer.echo(f"released {what}: it is ticket {ticket} now, accepted; go on with: rollflow resume {run.id}")
