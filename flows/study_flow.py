"""The cells of a study as a Prefect flow: one task for each, in a pool of processes."""

import os
from collections.abc import Sequence
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import ProcessPoolTaskRunner

from data_contracts.study import Cell, StudyConfig
from flows.study import export_cell, play_cell


def run_cells(config: StudyConfig, url: str, cells: Sequence[Cell], jobs: int) -> None:
    """Run cells, `jobs` at a time, each in a process of its own."""
    runner = ProcessPoolTaskRunner(max_workers=jobs)
    flow_of_cells = study.with_options(task_runner=runner)  # pyright: ignore[reportArgumentType]
    flow_of_cells(config.name, config.model_dump(mode="json"), url, [vars(cell) for cell in cells])


@flow(name="study", flow_run_name="{name}")
def study(name: str, config: dict[str, Any], url: str, cells: Sequence[dict[str, Any]]) -> int:
    """Run cells of a study; return how many.

    Args:
        name: of the study.
        config: the study, as JSON.
        url: the store of its runs.
        cells: preset, staleness and seed of each.
    """
    futures = [run_cell.submit(config, url, **cell) for cell in cells]
    for future in futures:
        future.result()
    return len(futures)


@task(task_run_name="{preset} k={staleness} seed={seed}", cache_policy=NO_CACHE, retries=1)
def run_cell(config: dict[str, Any], url: str, preset: str, staleness: int, seed: int) -> str:
    """Run one cell from its beginning to its end, and export it."""
    study, cell = StudyConfig.model_validate(config), Cell(preset, staleness, seed)
    run = play_cell(study, cell, url)
    if os.environ.get("MLFLOW_TRACKING_URI"):
        export_cell(study, cell, run)
    return run.id
