"""What `rollflow reconcile` prints: a run's books, or the first thing in its records that cannot be true."""

import typer
from rich.console import Console
from rich.table import Table

from dashboards.reconcile import Books, reconcile
from infra.runs import Run

SHOWN = 10


def reconcile_run(run: Run, *, deep: bool, console: Console | None = None) -> int:
    """Prove a run's books; return the exit code: 1 when its records contradict each other."""
    books = reconcile(run.store, deep=deep)
    (console or Console()).print(_table(books))
    for sentence in books.contradictions[:SHOWN]:
        typer.echo(f"rollflow: run {run.id}: {sentence}", err=True)
    if books.contradictions:
        if len(books.contradictions) > SHOWN:
            typer.echo(f"rollflow: and {len(books.contradictions) - SHOWN} more", err=True)
        return 1
    read = f"{books.num_batches} batches are there ({books.num_bytes} bytes)"
    if deep:
        read += f" and {books.num_rows_read} rows in them are as named"
    typer.echo(f"run {run.id}: {books.equation}, by {books.num_records.total()} records; {read}")
    return 0


def _table(books: Books) -> Table:
    table = Table()
    table.add_column("tickets")
    table.add_column("number", justify="right")
    table.add_row("issued", str(books.issued))
    table.add_row("trained", str(books.trained))
    for reason, count in books.refused.most_common():
        table.add_row(f"refused: {reason}", str(count))
    for stage, count in books.in_flight.most_common():
        table.add_row(f"in flight: {stage}", str(count))
    if books.late:
        table.add_row("(late results of settled tickets)", str(books.late))
    if books.both:
        table.add_row("(trained, and refused by the next trainer)", str(books.both))
    return table
