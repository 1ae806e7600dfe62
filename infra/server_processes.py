"""The processes of the Prefect and MLflow servers: how each is started, whether it lives and answers, how it ends.

A process is known by id, start time and a random token that all its descendants carry in their environment: a reused
process id is never taken for ours, and a worker that outlived its killed parent is still found.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import psutil

from data_contracts.errors import ServiceError
from infra import settings
from infra.databases import VARIABLES, is_shared, without_secrets
from infra.processes import HOST, family

TOKEN_VARIABLE = "ROLLFLOW_SERVICE_TOKEN"
START_LIMIT_S = 300.0
STOP_LIMIT_S = 10.0
LOG_LINES = 15

Name = Literal["prefect", "mlflow"]
HEALTH_PATHS: dict[Name, str] = {"prefect": "/api/health", "mlflow": "/health"}


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


def launch(plan: Server, home: Path, database: str) -> Server:
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


def wait_until_healthy(servers: list[Server]) -> None:
    """Return when all answer.

    Raises:
        ServiceError: one died, or did not answer within START_LIMIT_S; with the last lines of its log.
    """
    until = time.monotonic() + START_LIMIT_S
    waiting = list(servers)
    while waiting:
        for server in waiting:
            if not is_alive(server):
                raise ServiceError(
                    f"{server.name} died at its start; the last lines of {server.log}:\n{_last_lines(server.log)}"
                )
        waiting = [server for server in waiting if not answers(server)]
        if waiting and time.monotonic() > until:
            late = waiting[0]
            raise ServiceError(
                f"{late.name} did not answer at {late.url} within {START_LIMIT_S:.0f} s: try again when the "
                f"machine is less busy, or stop it with `rollflow down`; "
                f"the last lines of {late.log}:\n{_last_lines(late.log)}"
            )
        if waiting:
            time.sleep(0.1)


def answers(server: Server) -> bool:
    """Whether something at the server's address says that it is well."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(server.url + HEALTH_PATHS[server.name], timeout=2.0) as reply:
            return reply.status == 200
    except (OSError, urllib.error.URLError):
        return False


def is_alive(server: Server) -> bool:
    """Whether the process is the one that was started, and has not ended."""
    try:
        process = psutil.Process(server.pid)
        return abs(process.create_time() - server.started) < 0.02 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stop(servers: list[Server], patience_s: float = STOP_LIMIT_S) -> list[Name]:
    """Ask the servers to end, then kill what is left of them; return the names of those that were alive."""
    alive = [server for server in servers if is_alive(server)]
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


def _last_lines(path: str) -> str:
    try:
        lines = Path(path).read_text(errors="replace").splitlines()[-LOG_LINES:]
        return without_secrets("\n".join(lines))
    except FileNotFoundError:
        return "(no log)"


def _family(servers: list[Server]) -> list[psutil.Process]:
    # Each began a session, whose number is its process id; that of a dead server may be another's by now.
    sessions = {server.pid for server in servers if is_alive(server)}
    return family(TOKEN_VARIABLE, {server.token for server in servers}, sessions)
