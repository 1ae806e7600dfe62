"""Fixtures that tests of several folders share."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.runs import Run, create_run, load_run
from tests.harness import Processes, tiny_config


@pytest.fixture(scope="session")
def _forkserver() -> Processes:
    return Processes()


@pytest.fixture
def processes(_forkserver: Processes) -> Iterator[Processes]:
    yield _forkserver
    _forkserver.kill_all()


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """Return a function that makes a tiny run in a store of its own."""

    def make(**changes: Any) -> Run:
        return load_run(create_run(tiny_config(str(tmp_path / "store"), **changes)).store.url)

    return make


@pytest.fixture(scope="session")
def _begun(tmp_path_factory: pytest.TempPathFactory, _forkserver: Processes) -> Run:
    """A run of which only version 0 exists: the warm start is paid for once."""
    run = create_run(tiny_config(str(tmp_path_factory.mktemp("begun"))), "begun")
    _forkserver.join(_forkserver.start_all(run, ("start",)))
    return run


@pytest.fixture
def begun(_begun: Run, tmp_path: Path) -> Callable[..., Run]:
    """Return a function that makes a run which begins from the same version 0 as all others."""

    def make(name: str = "run", **changes: Any) -> Run:
        run = create_run(tiny_config(str(tmp_path / "store"), **changes), name)
        for folder in ("policy", "log/commit"):
            shutil.copytree(Path(_begun.store.url) / folder, Path(run.store.url) / folder)
        return run

    return make
