"""The two servers a person looks at: Prefect (control) and MLflow (history), on this machine.

`up` starts both as detached processes on 127.0.0.1, `down` stops exactly those. A state file names each by
process id, start time of the process and a random token that all its descendants carry in their environment:
a reused process id is never taken for ours, and a worker that outlived its killed parent is still found.
Runs do not need these servers: the records of a run are in its store.

Who waits for whom: `up` and `down` of one home exclude each other by a file lock; `up` waits until both
servers answer; nobody else waits.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import psutil

from data_contracts.errors import ServiceError
from infra import settings
from infra.databases import VARIABLES, database_url, described, is_shared, without_secrets
from infra.locks import locked

HOST = "127.0.0.1"
TOKEN_VARIABLE = "ROLLFLOW_SERVICE_TOKEN"
START_LIMIT_S = 120.0
STOP_LIMIT_S = 10.0
LOG_LINES = 15

Name = Literal["prefect", "mlflow"]
NAMES: tuple[Name, ...] = ("prefect", "mlflow")
DEFAULT_PORTS: dict[Name, int] = {"prefect": 4200, "mlflow": 5000}
HEALTH_PATHS: dict[Name, str] = {"prefect": "/api/health", "mlflow": "/health"}


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
class Server:
    """What the state file says about one server that `up` started."""

    name: Name
    pid: int
    """Process id; 0 while it is only planned."""
    started: float
    """Start time of the process in seconds since the epoch, as the operating system tells it."""
    port: int
    token: str
    """Value of ROLLFLOW_SERVICE_TOKEN in the environment of the process and of all its descendants."""
    log: str
    """File that takes its output."""
    database: str = ""
    """Where it keeps its data, without user and password."""

    @property
    def url(self) -> str:
        """Root address."""
        return f"http://{HOST}:{self.port}"


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
            the one asked for, or it died or did not answer within two minutes (with the last lines of its log).
    """
    home = settings.make_home(home)
    asked: dict[Name, int | None] = {"prefect": prefect_port, "mlflow": mlflow_port}
    with locked(home / "services.lock"):
        known = _read_state(home)
        ports = {name: _choose_port(name, asked[name], known.get(name)) for name in NAMES}
        running: dict[Name, Server] = {name: server for name, server in known.items() if is_healthy(server)}
        databases = {name: database_url(name, home) for name in NAMES}
        for name, server in running.items():
            _check_database(server, databases[name])
        missing: list[Name] = [name for name in NAMES if name not in running]
        for name in missing:
            if name in known:  # dead, or alive without an answer
                _stop([known[name]])
            _check_port_free(name, ports[name])
        _write_state(home, running)
        for name in missing:
            # First as a plan, so that the token of what a killed `up` has started is known.
            log = str(home / "logs" / f"{name}.log")
            token, database = secrets.token_hex(16), databases[name]
            running[name] = Server(name, 0, 0.0, ports[name], token, log, described(database))
            _write_state(home, running)
            running[name] = _launch(running[name], home, database)
            _write_state(home, running)
        _wait_until_healthy([running[name] for name in missing])
    return _services(running)


def down(home: Path | None = None, patience_s: float = STOP_LIMIT_S) -> list[Name]:
    """Stop the servers that `up` started, with all their descendants; return the names of those that ran.

    What has not ended `patience_s` seconds after it was asked to is killed.
    """
    home = settings.make_home(home)
    with locked(home / "services.lock"):
        servers = list(_read_state(home).values())
        stopped = _stop(servers, patience_s)
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
    return _is_alive(server) and _answers(server)


def _services(servers: Mapping[Name, Server]) -> Services:
    return Services(prefect_url=f"{servers['prefect'].url}/api", mlflow_url=servers["mlflow"].url)


def _status_of(name: Name, server: Server | None) -> ServerStatus:
    if server is None or not _is_alive(server):
        return ServerStatus(name, "stopped", "", None, server.log if server else "")
    return ServerStatus(name, "healthy" if _answers(server) else "not answering", server.url, server.pid, server.log)


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
    if known is None or not _is_alive(known):
        return asked or (known.port if known else DEFAULT_PORTS[name])
    if asked is not None and asked != known.port:
        raise ServiceError(
            f"{name} already runs on port {known.port}, port {asked} was asked for: run `rollflow down` first, "
            f"or leave --{name}-port away"
        )
    return known.port


def _check_port_free(name: Name, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as cause:
            raise ServiceError(
                f"{name} cannot have port {port} on {HOST} ({cause.strerror}): stop the program that uses it, "
                f"or choose another with --{name}-port"
            ) from cause


def _check_database(server: Server, wanted: str) -> None:
    """Refuse a server that keeps its data elsewhere; one started by an older version does not say where."""
    if server.database and server.database != described(wanted):
        raise ServiceError(
            f"{server.name} already runs on {server.database}, {described(wanted)} was asked for: "
            f"run `rollflow down` first, or set {VARIABLES[server.name]} to what it runs on"
        )


def _launch(plan: Server, home: Path, database: str) -> Server:
    """Start a server in a session of its own, with its output in a file; do not wait for it."""
    own = {TOKEN_VARIABLE: plan.token, **_environment(plan, home, database)}
    # The databases of both are in the environment under names that the servers do not need.
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES.values()}
    environment = {**settings.DEFAULTS, **inherited, **own}
    if plan.name == "mlflow" and not is_shared(database):
        _upgrade_database(home, environment, plan.log)
    command = _command(plan, home)
    appended = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    # Not subprocess.Popen: the server is to outlive this process, without an object that expects to wait for it.
    pid = os.posix_spawn(
        command[0],
        command,
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, plan.log, appended, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    return replace(plan, pid=pid, started=psutil.Process(pid).create_time())


def _command(plan: Server, home: Path) -> list[str]:
    address = ["--host", HOST, "--port", str(plan.port)]
    if plan.name == "prefect":
        return [sys.executable, "-m", "prefect", "server", "start", *address]
    # One worker: SQLite has one writer, and a second process costs 250 MB. The database is in the environment.
    return [
        *(sys.executable, "-m", "mlflow", "server", *address, "--workers", "1"),
        *("--artifacts-destination", str(home / "mlflow" / "artifacts")),
    ]


def _environment(plan: Server, home: Path, database: str) -> dict[str, str]:
    if plan.name == "mlflow":
        return {"MLFLOW_BACKEND_STORE_URI": database}
    return {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_API_DATABASE_CONNECTION_URL": database,
        # The user interface derives the address it calls from these, not from the command line.
        "PREFECT_SERVER_API_HOST": HOST,
        "PREFECT_SERVER_API_PORT": str(plan.port),
        "PREFECT_SERVER_UI_ENABLED": "true",
        # The server itself must not follow an address that is meant for its clients.
        "PREFECT_API_URL": f"{plan.url}/api",
    }


def _upgrade_database(home: Path, environment: Mapping[str, str], log: str) -> None:
    """Bring the database of another MLflow version up to date, after a copy; a server refuses to do it itself.

    A new database needs nothing: the server makes it before it starts its workers.
    """
    database, current = home / "mlflow" / "mlflow.db", version("mlflow")
    marker = home / "mlflow" / "schema_version"
    if database.exists() and (not marker.exists() or marker.read_text() != current):
        shutil.copy2(database, database.with_name(f"mlflow-before-{current}.db"))
        command = [sys.executable, "-m", "mlflow", "db", "upgrade", environment["MLFLOW_BACKEND_STORE_URI"]]
        with Path(log).open("a") as output:
            code = subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode
        if code != 0:
            raise ServiceError(f"mlflow db upgrade of {database} ended with code {code}:\n{_last_lines(log)}")
    marker.write_text(current)


def _wait_until_healthy(servers: list[Server]) -> None:
    until = time.monotonic() + START_LIMIT_S
    waiting = list(servers)
    while waiting:
        for server in waiting:
            if not _is_alive(server):
                raise ServiceError(
                    f"{server.name} died at its start; the last lines of {server.log}:\n{_last_lines(server.log)}"
                )
        waiting = [server for server in waiting if not _answers(server)]
        if waiting and time.monotonic() > until:
            late = waiting[0]
            raise ServiceError(
                f"{late.name} did not answer at {late.url} within {START_LIMIT_S:.0f} s; "
                f"the last lines of {late.log}:\n{_last_lines(late.log)}"
            )
        if waiting:
            time.sleep(0.1)


def _answers(server: Server) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(server.url + HEALTH_PATHS[server.name], timeout=2.0) as reply:
            return reply.status == 200
    except (OSError, urllib.error.URLError):
        return False


def _last_lines(path: str) -> str:
    try:
        lines = Path(path).read_text(errors="replace").splitlines()[-LOG_LINES:]
        return without_secrets("\n".join(lines))
    except FileNotFoundError:
        return "(no log)"


# Stopping


def _is_alive(server: Server) -> bool:
    try:
        process = psutil.Process(server.pid)
        return abs(process.create_time() - server.started) < 0.02 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _family(servers: list[Server]) -> list[psutil.Process]:
    """Return every process that carries the token of one of `servers`: those themselves and what they started."""
    tokens = {server.token for server in servers}
    mine: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # gone, or another user's
            if process.environ().get(TOKEN_VARIABLE) in tokens:
                mine.append(process)
    return mine


def _stop(servers: list[Server], patience_s: float = STOP_LIMIT_S) -> list[Name]:
    """Ask the servers to end, then kill what is left of them; return the names of those that were alive."""
    alive = [server for server in servers if _is_alive(server)]
    processes = _family(servers)
    for server in alive:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
    leaders = {server.pid for server in alive}
    for process in processes:
        if process.pid not in leaders:  # also what outlived its leader
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
    psutil.wait_procs(processes, timeout=patience_s)
    left = _family(servers)  # also what was started meanwhile
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=STOP_LIMIT_S)
    return [server.name for server in alive]
