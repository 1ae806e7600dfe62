"""The two servers a person looks at: Prefect (control) and MLflow (history), on this machine.

`up` starts both as detached processes on 127.0.0.1 (infra/server_processes.py), `down` stops exactly those, which a
state file names. Runs do not need these servers: the records of a run are in its store.

Who waits for whom: `up` and `down` of one home exclude each other by a file lock; `up` waits until both
servers answer; nobody else waits.
"""

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from data_contracts.errors import ServiceError
from infra import settings
from infra.databases import VARIABLES, database_url, described
from infra.locks import locked
from infra.processes import HOST, port_trouble
from infra.server_processes import (
    STOP_LIMIT_S,
    Name,
    Server,
    answers,
    is_alive,
    launch,
    stop,
    wait_until_healthy,
)

NAMES: tuple[Name, ...] = ("prefect", "mlflow")
DEFAULT_PORTS: dict[Name, int] = {"prefect": 4200, "mlflow": 5000}


@dataclass(frozen=True)
class Services:
    """Addresses of the two servers."""

    prefect_url: str
    """Prefect's API, the value of PREFECT_API_URL, for example http://127.0.0.1:4200/api."""
    mlflow_url: str
    """MLflow's tracking URI and its user interface, for example http://127.0.0.1:5000."""

    @property
    def prefect_ui_url(self) -> str:
        """Prefect's user interface."""
        return self.prefect_url.removesuffix("/api")


@dataclass(frozen=True)
class ServerStatus:
    """How one server is."""

    name: Name
    state: Literal["healthy", "not answering", "stopped"]
    url: str
    """Empty when stopped."""
    pid: int | None
    log: str


def up(home: Path | None = None, prefect_port: int | None = None, mlflow_port: int | None = None) -> Services:
    """Start Prefect and MLflow unless they run already; return when both answer.

    Args:
        home: folder of their databases, artifacts and logs; default `settings.home()`.
        prefect_port: port on 127.0.0.1; default: where it runs already, or 4200.
        mlflow_port: the same for MLflow; 5000.

    Raises:
        ConfigError: a variable that names a database holds something else.
        ServiceError: a port is taken by another program, a server runs already on a port or a database other than
            the one asked for, or one died or did not answer within five minutes (with the last lines of its log).
    """
    home = settings.make_home(home)
    asked: dict[Name, int | None] = {"prefect": prefect_port, "mlflow": mlflow_port}
    with locked(home / "services.lock"):
        known = _read_state(home)
        ports = {name: _choose_port(name, asked[name], known.get(name)) for name in NAMES}
        # One that lives and does not answer is slow, and others use it: it is waited for, and never stopped from here.
        running: dict[Name, Server] = {name: server for name, server in known.items() if is_alive(server)}
        databases = {name: database_url(name, home) for name in NAMES}
        for name, server in running.items():
            _check_database(server, databases[name])
        missing: list[Name] = [name for name in NAMES if name not in running]
        for name in missing:
            if name in known:
                stop([known[name]])  # what a dead one has left behind
            _check_port_free(name, ports[name])
        _write_state(home, running)
        for name in missing:
            # First as a plan, so that the token of what a killed `up` has started is known.
            log = str(home / "logs" / f"{name}.log")
            token, database = secrets.token_hex(16), databases[name]
            running[name] = Server(name, 0, 0.0, ports[name], token, log, described(database))
            _write_state(home, running)
            running[name] = launch(running[name], home, database)
            _write_state(home, running)
        wait_until_healthy(list(running.values()))
    return _services(running)


def down(home: Path | None = None, patience_s: float = STOP_LIMIT_S) -> list[Name]:
    """Stop the servers that `up` started, with all their descendants; return the names of those that ran.

    What has not ended `patience_s` seconds after it was asked to is killed.
    """
    home = settings.make_home(home)
    with locked(home / "services.lock"):
        servers = list(_read_state(home).values())
        stopped = stop(servers, patience_s)
        _write_state(home, {})
    return stopped


def status(home: Path | None = None) -> list[ServerStatus]:
    """Return how both servers are, in the order Prefect, MLflow. Starts and stops nothing."""
    home = settings.home() if home is None else home.expanduser().absolute()
    known = _read_state(home)
    return [_status_of(name, known.get(name)) for name in NAMES]


def find(home: Path | None = None) -> Services | None:
    """Return the addresses of the servers that `up` started, or None unless both answer."""
    home = settings.home() if home is None else home.expanduser().absolute()
    known = _read_state(home)
    if len(known) < len(NAMES) or not all(is_healthy(server) for server in known.values()):
        return None
    return _services(known)


def named_in_environment() -> Services | None:
    """Return the servers that PREFECT_API_URL and MLFLOW_TRACKING_URI name; None unless both are set."""
    prefect_url, mlflow_url = os.environ.get("PREFECT_API_URL"), os.environ.get("MLFLOW_TRACKING_URI")
    return Services(prefect_url, mlflow_url) if prefect_url and mlflow_url else None


def connect_environment(services: Services) -> dict[str, str]:
    """Return the variables that point a child process at these servers."""
    return {
        "PREFECT_API_URL": services.prefect_url,
        "MLFLOW_TRACKING_URI": services.mlflow_url,
        "MLFLOW_REGISTRY_URI": services.mlflow_url,
    }


def is_healthy(server: Server) -> bool:
    """Whether the process is the one that was started, and answers."""
    return is_alive(server) and answers(server)


def _services(servers: Mapping[Name, Server]) -> Services:
    return Services(prefect_url=f"{servers['prefect'].url}/api", mlflow_url=servers["mlflow"].url)


def _status_of(name: Name, server: Server | None) -> ServerStatus:
    if server is None or not is_alive(server):
        return ServerStatus(name, "stopped", "", None, server.log if server else "")
    return ServerStatus(name, "healthy" if answers(server) else "not answering", server.url, server.pid, server.log)


# The state file


def _state_path(home: Path) -> Path:
    return home / "services.json"


def _read_state(home: Path) -> dict[Name, Server]:
    try:
        entries = json.loads(_state_path(home).read_text())
        servers = [Server(**entry) for entry in entries]
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as cause:
        raise ServiceError(
            f"{_state_path(home)}: expected a list of servers, got something unreadable ({cause}): "
            "stop the servers by hand and delete the file"
        ) from cause
    return {server.name: server for server in servers}


def _write_state(home: Path, servers: Mapping[Name, Server]) -> None:
    """Replace the state file as a whole, so that a killed `up` leaves the old or the new one."""
    path = _state_path(home)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps([asdict(server) for server in servers.values()], indent=1))
    beside.replace(path)


# Starting


def _choose_port(name: Name, asked: int | None, known: Server | None) -> int:
    if known is None or not is_alive(known):
        return asked or (known.port if known else DEFAULT_PORTS[name])
    if asked is not None and asked != known.port:
        raise ServiceError(
            f"{name} already runs on port {known.port}, port {asked} was asked for: run `rollflow down` first, "
            f"or leave --{name}-port away"
        )
    return known.port


def _check_port_free(name: Name, port: int) -> None:
    trouble = port_trouble(port)
    if trouble:
        raise ServiceError(
            f"{name} cannot have port {port} on {HOST} ({trouble}): stop the program that uses it, "
            f"or choose another with `rollflow up --{name}-port PORT`, which later commands find"
        )


def _check_database(server: Server, wanted: str) -> None:
    """Refuse a server that keeps its data elsewhere; one started by an older version does not say where."""
    if server.database and server.database != described(wanted):
        raise ServiceError(
            f"{server.name} already runs on {server.database}, {described(wanted)} was asked for: "
            f"run `rollflow down` first, or set {VARIABLES[server.name]} to what it runs on"
        )
