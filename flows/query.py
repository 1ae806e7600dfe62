"""What `rollflow query` prints or writes: the answer to a question in SQL."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.console import Console
from rich.table import Table

from data_contracts.errors import ConfigError
from infra.query import Questions, pages
from infra.runs import Run

LONGEST_VALUE = 60


def query(
    run: Run, sql: str, *, csv_file: Path | None, parquet_file: Path | None, rows: int, console: Console | None = None
) -> None:
    """Ask a run, and print the first rows of the answer or write all of them.

    Raises:
        ConfigError: the query cannot be run, or a file cannot be written.
    """
    with Questions(run.store) as questions:
        answer = questions.ask(sql)
        try:
            if parquet_file is not None:
                typer.echo(f"{write_parquet(answer, parquet_file)} rows in {parquet_file}")
            elif csv_file is not None:
                typer.echo(f"{write_csv(answer, csv_file)} rows in {csv_file}")
            else:
                _print(answer, rows, console or Console())
        except OSError as cause:
            raise ConfigError(f"query: {cause.filename}: cannot be written: {cause.strerror or cause}") from cause


def write_parquet(answer: pa.RecordBatchReader, path: Path) -> int:
    """Write the answer page by page, compressed by zstd; return the number of rows."""
    count = 0
    with pq.ParquetWriter(path, answer.schema, compression="zstd") as writer:
        for page in pages(answer):
            writer.write_batch(page)
            count += page.num_rows
    return count


def write_csv(answer: pa.RecordBatchReader, path: Path) -> int:
    """Write the answer with a header line, lists as JSON; return the number of rows."""
    count = 0
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(answer.schema.names)
        for row in _rows(answer):
            writer.writerow([json.dumps(value) if isinstance(value, list | dict) else value for value in row])
            count += 1
    return count


def _rows(answer: pa.RecordBatchReader) -> Iterator[tuple[object, ...]]:
    for page in pages(answer):
        yield from zip(*(column.to_pylist() for column in page.columns), strict=True)


def _print(answer: pa.RecordBatchReader, most: int, console: Console) -> None:
    table = Table()
    for field in answer.schema:
        is_number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        table.add_column(field.name, justify="right" if is_number else "left", overflow="fold")
    count = 0
    for row in _rows(answer):
        count += 1
        if count <= most:
            table.add_row(*map(_show, row))
    console.print(table)
    if count > most:
        typer.echo(f"{most} of {count} rows; --rows shows more, --csv or --parquet writes all")


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = "" if value is None else str(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."
