"""Fixtures that tests of several folders share."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from infra.runs import Run, create_run, load_run
from tests.harness import Processes, tiny_config
from tests.servers import s3


@pytest.fixture(scope="session")
def s3_server() -> Iterator[s3.S3Server]:
    """A real S3 server with one bucket; which, tests/servers/s3.py says."""
    with s3.running() as server:
        yield server


@pytest.fixture
def s3_url(s3_server: s3.S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh place on the S3 server, which the AWS variables point to."""
    s3.use_server(monkeypatch, s3_server)
    return f"s3://{s3.BUCKET}/{uuid4().hex}"


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


@pytest.fixture(scope="session")
def _finished(_begun: Run, _forkserver: Processes, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that was trained to its end, with rollouts ahead of training and exact differences between versions."""
    config = tiny_config(
        str(tmp_path_factory.mktemp("finished")),
        staleness={"max_staleness": 2},
        train={"full_weights_every": 2},
        curate={"min_samples": 2},
    )
    run = create_run(config, "finished")
    for folder in ("policy", "log/commit"):
        shutil.copytree(Path(_begun.store.url) / folder, Path(run.store.url) / folder)
    _forkserver.join(_forkserver.start_all(run, ("train", "rollout", "reward", "curate", "evaluate")))
    return run


@pytest.fixture
def finished(_finished: Run, tmp_path: Path) -> Run:
    """A copy of a finished run, in a store of its own: the test may do to it what it likes."""
    shutil.copytree(Path(_finished.store.url), tmp_path / "store" / _finished.id)
    return load_run(str(tmp_path / "store" / _finished.id))
