import secrets

import pytest

from infra.store import Store, open_store
from tests.dashboards.build_run import build_run


@pytest.fixture
def root() -> Store:
    """A store of its own for each test."""
    return open_store(f"memory://dashboards-{secrets.token_hex(4)}")


@pytest.fixture(scope="session")
def finished() -> Store:
    """A finished run of 40 commits. Tests read it and change nothing."""
    store = open_store("memory://dashboards-finished").at("tiny-1a2b3c")
    build_run(store)
    return store
