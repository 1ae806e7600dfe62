"""A PostgreSQL server of one's own, from what is installed or else from Debian's packages; nothing is installed.

PostgreSQL refuses to run as root: started by root, it runs as nobody.
"""

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infra.processes import free_port
from tests.servers import debian

PACKAGES = ("postgresql-15", "postgresql-client-15")
USER, PASSWORD = "rollflow", "a-secret-of-the-database"
START_S = 120.0


@dataclass(frozen=True)
class Postgres:
    """A server that runs, with a superuser who has a password."""

    port: int
    programs: Path
    environment: dict[str, str]

    def url(self, database: str) -> str:
        """Return the URL of a database."""
        return f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def ask(self, database: str, sql: str) -> str:
        """Return what psql prints: one row a line, columns separated by |."""
        command = [str(self.programs / "psql"), "-X", "-A", "-t", "-c", sql, self.url(database)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=START_S)
        if done.returncode != 0:
            raise RuntimeError(f"psql: {done.stderr.strip()}")
        return done.stdout.strip()


@contextlib.contextmanager
def running() -> Iterator[Postgres]:
    """Start a server on a free port of the loopback interface, without any database of its users."""
    programs, environment = _find()
    folder = Path(tempfile.mkdtemp(prefix="rollflow-postgres-"))
    (folder / "password").write_text(PASSWORD)
    who = {}
    if os.getuid() == 0:
        nobody = pwd.getpwnam("nobody")
        who = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": ()}
        for path in (folder, folder / "password"):
            os.chown(path, nobody.pw_uid, nobody.pw_gid)
    data, port = folder / "data", free_port()
    make = ["--username", USER, "--auth", "scram-sha-256", "--pwfile", str(folder / "password"), "--no-sync"]
    initdb = [str(programs / "initdb"), "-D", str(data), "--encoding", "UTF8", "--locale", "C", *make]
    subprocess.run(initdb, env=environment, check=True, capture_output=True, cwd=folder, **who)
    with (folder / "log").open("wb") as log:
        command = [str(programs / "postgres"), "-D", str(data), "-h", "127.0.0.1", "-p", str(port), "-k", str(folder)]
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder, **who)
    postgres = Postgres(port, programs, environment)
    try:
        _wait(postgres, server, folder / "log")
        yield postgres
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _find() -> tuple[Path, dict[str, str]]:
    """Return the folder of the programs, and the environment that they need."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    if installed:
        return installed[-1], dict(os.environ)
    root = debian.unpack(PACKAGES)
    return root / "usr/lib/postgresql/15/bin", debian.environment(root)


def _wait(postgres: Postgres, server: subprocess.Popen[bytes], log: Path) -> None:
    give_up = time.monotonic() + START_S
    while True:
        with contextlib.suppress(RuntimeError):
            postgres.ask("postgres", "SELECT 1")
            return
        if server.poll() is not None or time.monotonic() > give_up:
            raise RuntimeError(f"PostgreSQL did not start: {log.read_text(errors='replace')[-1000:]}")
        time.sleep(0.1)
