"""What `rollflow gc` does: says what a run can do without, removes it after a yes, and archives trajectories."""

import time
from collections import Counter
from pathlib import Path

import typer

from data_contracts.errors import ConfigError
from data_contracts.records import Control, Heartbeat
from flows.query import write_parquet
from infra.heartbeats import read_heartbeats
from infra.history import run_state
from infra.log import Log
from infra.query import TABLES, Questions
from infra.retention import Removable, find_removable, remove
from infra.runs import Run
from tasks.role import append_control
from tasks.supervise import is_alive, is_local


def collect(run: Run, *, weights: bool, archive_to: Path | None, is_confirmed: bool) -> None:
    """Say what would be removed, and remove it when that is confirmed; archive first when so asked.

    Raises:
        ConfigError: somebody works on the run, or the archive cannot be written.
    """
    silent = check_at_rest(run)
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
    for writer in silent:  # should it live after all, it ends before it does anything
        append_control(run.store, "gc", "dead", role="gc", target=writer)
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


def check_at_rest(run: Run) -> list[str]:
    """Make sure that a run has ended, stopped or failed and that nobody works on it any more.

    Whether a writer on another machine lives, only its heartbeat tells: one that stands still for as long as this run's
    heartbeat limit while this process looks on is taken for dead.

    Returns:
        The writers that are taken for dead and that nobody has declared so.

    Raises:
        ConfigError: somebody may still write.
    """
    control = Log(run.store, "log/control", Control).read_from(0)
    if not run_state(control).is_over:
        raise ConfigError(f"run {run.id}: is neither finished nor stopped; stop it first: rollflow stop {run.id}")
    dead = {record.target for record in control if record.kind == "dead"}
    unknown = []
    for beat in read_heartbeats(run.store):
        if beat.done or beat.writer in dead or (is_local(beat) and not is_alive(beat)):
            continue
        if is_local(beat):
            raise ConfigError(
                f"run {run.id}: {beat.role} {beat.pid} has not ended here; it may still write: wait for it"
            )
        unknown.append(beat)
    return _find_silent(run, unknown) if unknown else []


def _find_silent(run: Run, unknown: list[Heartbeat]) -> list[str]:
    """Return the writers whose heartbeats stand still; raise ConfigError when one moves."""
    limit_s = run.config.orchestration.heartbeat_limit_s
    named = ", ".join(f"{beat.role} {beat.writer} on {beat.host}" for beat in unknown)
    typer.echo(f"run {run.id}: no record says that {named} has ended; looking for a heartbeat for {limit_s:g} s")
    before = {beat.writer: beat.beat for beat in unknown}
    give_up = time.monotonic() + limit_s
    while before and time.monotonic() < give_up:
        time.sleep(min(limit_s, run.config.orchestration.heartbeat_s))
        for beat in read_heartbeats(run.store):
            if beat.writer not in before or beat.beat == before[beat.writer]:
                continue
            if not beat.done:
                raise ConfigError(
                    f"run {run.id}: {beat.role} {beat.writer} on {beat.host} has not ended; it may still write: "
                    "wait for it"
                )
            del before[beat.writer]
    for writer in before:
        typer.echo(f"run {run.id}: {writer} shows no life: taken for dead")
    return list(before)


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
