"""A run's prefix in the store: making it, finding it, reading its frozen configuration."""

import json
import platform
import re
import secrets
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from time import time
from typing import Any

from pydantic import ValidationError

from data_contracts import trajectory
from data_contracts.config import RunConfig
from data_contracts.errors import ConfigError, ObjectExists, ObjectMissing
from infra.store import Store, open_store

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
PACKAGES = ("rollflow", "torch", "transformers", "numpy", "pyarrow", "prefect", "mlflow", "dask", "reasoning-gym")


@dataclass(frozen=True)
class Run:
    """A run that exists.

    Attributes:
        id: unique name; the folder below the store's root.
        store: view below the run's prefix.
        config: resolved and frozen when the run was made.
        created_at: seconds since the epoch by the creator's clock.
        replay_of: id of the run whose batches it was trained from again; empty for a run of its own.
    """

    id: str
    store: Store
    config: RunConfig
    created_at: float
    packages: dict[str, str]
    replay_of: str = ""


def check_run_id(run_id: str) -> None:
    """Raise ConfigError unless a run may be called so: its id is a folder's name and part of a URL."""
    if not RUN_ID.fullmatch(run_id):
        raise ConfigError(f"run id {run_id!r}: expected letters, digits, dots, dashes and underscores, 100 at most")


def create_run(config: RunConfig, run_id: str | None = None, *, replay_of: str = "") -> Run:
    """Write run.json below config.store and return the run.

    Raises:
        ConfigError: a run of that id exists, or none may be called so.
        StoreError: the store cannot be written.
    """
    run_id = run_id or f"{config.name}-{secrets.token_hex(3)}"
    check_run_id(run_id)
    store = open_store(config.store).at(run_id)
    body = {
        "id": run_id,
        "config": config.model_dump(mode="json"),
        "contracts": {f"trajectory/{stage}": trajectory.SCHEMA_VERSION for stage in trajectory.SCHEMAS},
        "packages": {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "created_at": time(),
        "replay_of": replay_of,
    }
    try:
        store.put_new("run.json", json.dumps(body, indent=1).encode())
    except ObjectExists as cause:
        raise ConfigError(f"run {run_id}: exists already in {config.store}; resume it, or choose another id") from cause
    return load_run(store.url)


def load_run(url: str) -> Run:
    """Return the run at a URL such as .rollflow/store/tiny-1a2b3c.

    Raises:
        ConfigError: there is no run, or another version of Rollflow wrote a configuration this one cannot read.
    """
    store = open_store(url)
    try:
        body: dict[str, Any] = json.loads(store.get("run.json"))
    except ObjectMissing as cause:
        raise ConfigError(f"run {url}: there is no run.json; `rollflow runs` lists the runs there are") from cause
    try:
        config = RunConfig.model_validate(body["config"])
    except ValidationError as cause:
        first = cause.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"run {url}: run.json is not readable by this version: {where}: {first['msg']}") from cause
    return Run(body["id"], store, config, body["created_at"], body["packages"], body.get("replay_of", ""))


def find_run(name: str, store_url: str) -> Run:
    """Return the run that a person means by `name`: a URL, an id, or the beginning of exactly one id, replays aside.

    Raises:
        ConfigError: none or several match.
    """
    if "/" in name:
        return load_run(name)
    root = open_store(store_url)
    ids = list_run_ids(root)
    matching = [name] if name in ids else [run_id for run_id in ids if run_id.startswith(name)]
    # A replay's id begins with that of its run.
    if matching and all(run_id.startswith(min(matching, key=len)) for run_id in matching):
        return load_run(root.at(min(matching, key=len)).url)
    if matching:
        raise ConfigError(f"run {name}: several runs begin so: {', '.join(matching)}; give the whole id")
    known = ", ".join(ids[-5:]) or "none"
    raise ConfigError(f"run {name}: no such run in {store_url} (the last ones: {known})")


def list_run_ids(root: Store) -> list[str]:
    """Return the ids of all runs below a store's root, sorted."""
    return sorted(folder for folder in root.list_folders() if root.exists(f"{folder}/run.json"))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
