"""What `rollflow gc` does: says what a run can do without, removes it after a yes, and archives trajectories."""

from collections import Counter
from pathlib import Path

import typer

from data_contracts.errors import ConfigError
from data_contracts.records import Control
from flows.query import write_parquet
from infra.heartbeats import read_heartbeats
from infra.history import run_state
from infra.log import Log
from infra.query import Questions
from infra.retention import Removable, find_removable, remove
from infra.runs import Run
from tasks.role import append_control
from tasks.supervise import is_alive, is_local

TABLES = ("trajectories", "tickets", "commits", "evaluations")


def collect(run: Run, *, weights: bool, archive_to: Path | None, is_confirmed: bool) -> None:
    """Say what would be removed, and remove it when that is confirmed; archive first when so asked.

    Raises:
        ConfigError: somebody works on the run, or the archive cannot be written.
    """
    check_at_rest(run)
    if archive_to is not None:
        archive(run, archive_to)
    removables = find_removable(run.store, run.config, weights=weights)
    if not removables:
        typer.echo(f"run {run.id}: nothing to remove")
        return
    _tell(run, removables)
    if not is_confirmed:
        typer.echo("nothing was removed; add --yes to do it")
        return
    # The record stands before anything is gone, so that nobody has to wonder.
    versions = sorted({int(r.why.rsplit(" ", 1)[1]) for r in removables if r.why.startswith("weights of version")})
    num_bytes = sum(removable.num_bytes for removable in removables)
    detail = {"collected": {"objects": len(removables), "bytes": num_bytes, "weights_of_versions": versions}}
    append_control(run.store, "gc", "amend", role="gc", detail=detail)
    remove(run.store, removables)
    typer.echo(f"run {run.id}: removed {len(removables)} objects, {num_bytes} bytes")


def _tell(run: Run, removables: list[Removable]) -> None:
    objects: Counter[tuple[str, str]] = Counter()
    num_bytes: Counter[tuple[str, str]] = Counter()
    for removable in removables:
        is_orphan = not removable.why.startswith("weights of")
        kind = (removable.key.split("/", 1)[0], "no record names them" if is_orphan else "weights nobody comes back to")
        objects[kind] += 1
        num_bytes[kind] += removable.num_bytes
    for (folder, why), count in sorted(objects.items()):
        typer.echo(f"run {run.id}: {folder}: {count} objects, {num_bytes[folder, why]} bytes: {why}")


def check_at_rest(run: Run) -> None:
    """Raise ConfigError unless the run has ended, stopped or failed and nobody works on it any more."""
    control = Log(run.store, "log/control", Control).read_from(0)
    if not run_state(control).is_over:
        raise ConfigError(f"run {run.id}: is neither finished nor stopped; stop it first: rollflow stop {run.id}")
    dead = {record.target for record in control if record.kind == "dead"}
    for beat in read_heartbeats(run.store):
        if beat.done or beat.writer in dead or (is_local(beat) and not is_alive(beat)):
            continue
        raise ConfigError(
            f"run {run.id}: {beat.role} {beat.writer} on {beat.host} has not ended; it may still write: wait for it"
        )


def archive(run: Run, folder: Path) -> None:
    """Write everything that can be asked for into Parquet files, compressed by zstd.

    Raises:
        ConfigError: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Questions(run.store) as questions:
            for name in TABLES:
                path = folder / f"{run.id}-{name}.parquet"
                count = write_parquet(questions.ask(f"SELECT * FROM {name}"), path)
                typer.echo(f"{path}: {count} rows, {path.stat().st_size} bytes")
    except OSError as cause:
        raise ConfigError(f"archive {folder}: cannot be written: {cause.strerror or cause}") from cause
