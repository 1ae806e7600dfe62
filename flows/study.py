"""What `rollflow study` does: runs the cells of a study that are not there yet, and writes its report.

    warm start --version 0--> cell, cell, ... (each a run of its own, in lockstep in one process) --> report

A cell is done or it is not: one that was cut short is begun again, because it takes a minute or two. Everything that
is known of a study stands in the records of its runs, so any later call goes on from there.
"""

import hashlib
import os
import time
import tomllib
from pathlib import Path

import typer
from pydantic import ValidationError

from dashboards.study import is_done, write_study
from data_contracts.errors import ConfigError, ObjectExists, ServiceError, TrainingDiverged
from data_contracts.records import Commit
from data_contracts.study import Cell, StudyConfig
from flows import conduct
from flows.load import explain
from flows.lockstep import run_in_lockstep
from infra import settings
from infra.locks import locked
from infra.log import Log
from infra.objects import get_object, put_named
from infra.runs import Run, create_run, load_run
from infra.store import Store, open_store
from tasks.role import Role, append_control
from tasks.start import run as start

SHIPPED = Path(__file__).parent / "studies"
EXPORTED = "exported.json"
"""Marks a cell whose records are all in MLflow."""


def conduct_study(file: str, store_url: str | None, *, cells: int | None, jobs: int | None) -> str:
    """Run what is missing, write the report, and return what to tell.

    Raises:
        ConfigError: the file cannot be read, or a field is wrong.
    """
    config = load_study(file)
    url = store_url or str(settings.home() / "studies")
    for cell in config.cells():
        check_cell(config, cell, url)
    open_cells = [cell for cell in config.cells() if is_open(open_store(url).at(config.run_id(cell)))]
    chosen = open_cells if cells is None else open_cells[:cells]
    started = time.monotonic()
    if chosen:
        services = conduct.ensure_services()
        os.environ["MLFLOW_TRACKING_URI"] = services.mlflow_url
        os.environ |= {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        warm_up(config, url)
        from flows.study_flow import run_cells  # Prefect reads its environment when it is imported

        run_cells(config, url, chosen, jobs or config.jobs)
    path = write_study(config, open_store(url), settings.home() / "reports")
    left = sum(is_open(open_store(url).at(config.run_id(cell))) for cell in config.cells())
    took = f"{len(chosen)} cells in {time.monotonic() - started:.0f} s, {left} left"
    return f"{took}\nreport {path}\ntable  {path.with_suffix('.md')}"


def is_open(store: Store) -> bool:
    """Whether a cell is still to be played, or was played while MLflow was away."""
    return not is_done(store) or not store.exists(EXPORTED)


def load_study(source: str) -> StudyConfig:
    """Read a study from a TOML file, or a shipped one by its name.

    Raises:
        ConfigError: names the file and the field.
    """
    path = Path(source) if Path(source).is_file() else SHIPPED / f"{source}.toml"
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.toml")))
        raise ConfigError(f"study {source}: no such file, and no shipped study has this name (shipped: {names})")
    try:
        return StudyConfig.model_validate(tomllib.loads(path.read_text()))
    except tomllib.TOMLDecodeError as cause:
        raise ConfigError(f"{path}: not valid TOML: {cause}") from cause
    except ValidationError as cause:
        raise ConfigError(f"{path}: {explain(cause)}") from cause


def check_cell(config: StudyConfig, cell: Cell, url: str) -> None:
    """Raise ConfigError when a cell's run has no valid configuration."""
    try:
        config.run_config(cell, url)
    except ValidationError as cause:
        raise ConfigError(f"study {config.name}, {cell.preset}: {explain(cause)}") from cause


def warm_up(config: StudyConfig, url: str) -> Run:
    """Make the version 0 that all cells begin from, unless it is there."""
    run_id = config.warm_start_id
    try:
        run = create_run(config.run_config(next(config.cells()), url), run_id)
    except ConfigError:
        run = load_run(open_store(url).at(run_id).url)
    with Role("start", run.store, run.config) as role:
        start(role)
    return run


def play_cell(config: StudyConfig, cell: Cell, url: str) -> Run:
    """Run one cell in this process, from its beginning, and return its run.

    A cell whose training diverged is done too: its run has failed, and says so. One that another process of this
    machine plays is waited for, and not played again: a study that was told to stop still finishes its cells.
    """
    store = open_store(url).at(config.run_id(cell))
    name = hashlib.sha256(store.url.encode()).hexdigest()[:16]
    with locked(settings.home() / "locks" / name):
        return load_run(store.url) if is_done(store) else _play_cell(config, cell, url, store)


def _play_cell(config: StudyConfig, cell: Cell, url: str, store: Store) -> Run:
    for key in store.list():  # what an interrupted call has left
        store.delete(key)
    run = create_run(config.run_config(cell, url), config.run_id(cell))
    copy_version_0(open_store(url).at(config.warm_start_id), run.store)
    try:
        for _ in run_in_lockstep(run):
            pass
    except TrainingDiverged as error:
        append_control(run.store, "study", "fail", role="train", error=f"TrainingDiverged: {error}")
    prune(run.store)
    return run


def copy_version_0(source: Store, target: Store) -> None:
    """Give a run the version 0 of another, objects and record."""
    first = Log(source, "log/commit", Commit).read(0)
    if first is None:
        raise ConfigError(f"{source.url}: has no version 0 to begin from")
    for reference in first.weights.objects:
        put_named(target, reference.key, get_object(source, reference))
    Log(target, "log/commit", Commit).append(0, first.model_copy(update={"at": time.time()}))


def prune(store: Store) -> None:
    """Delete the weights between the first and the last version: nobody reads them again, and they fill a disk.

    Records, batches and evaluations stay, so everything but the weights in between can be looked up and trained again.
    """
    last = Log(store, "log/commit", Commit).tail() - 1
    kept = tuple(f"policy/{version:010d}-" for version in (0, last))
    for key in store.list("policy"):
        if not key.startswith(kept):
            store.delete(key)


def export_cell(config: StudyConfig, cell: Cell, run: Run) -> None:
    """Bring a cell's records into MLflow, below the study's own run; a server that is away is left for another time."""
    from infra.tracking import Exporter
    from infra.tracking_experiments import ensure_group_run

    uri = os.environ["MLFLOW_TRACKING_URI"]
    tags = {"study": config.name}
    own = {"preset": cell.preset, "staleness": str(cell.staleness), "seed": str(cell.seed)}
    try:
        parent = ensure_group_run(uri, run.config.tracking.experiment, config.name, tags | {"about": config.about})
        tags |= own | {"mlflow.parentRunId": parent}
        Exporter(run.store, uri, run.config, run.id, packages=run.packages, tags=tags).export_available()
        run.store.put_new(EXPORTED, b"{}")
    except ServiceError as error:
        typer.echo(f"study {config.name}: {run.id} is not in MLflow: {error}", err=True)
    except ObjectExists:
        return
