"""Where the two servers keep their data: SQLite below this machine's home, or PostgreSQL by URL.

A URL may hold a password. It reaches the servers through their environment alone, never through a command line or a
state file, and no message repeats it: `described` is what may be shown.
"""

import importlib.util
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from data_contracts.errors import ConfigError

VARIABLES = {"prefect": "ROLLFLOW_PREFECT_DATABASE", "mlflow": "ROLLFLOW_MLFLOW_DATABASE"}
"""Environment variables: postgresql://user:password@host:port/database. One database for each server."""

_DRIVERS = {"prefect": "asyncpg", "mlflow": "psycopg"}
_SECRET = re.compile(r"(\b[a-z][a-z0-9+]*://[^\s:/@]*:)[^\s@]+@")


def database_url(name: str, home: Path) -> str:
    """Return the SQLAlchemy URL of the database of "prefect" or "mlflow", with the driver that the server needs.

    Raises:
        ConfigError: the variable holds something else, or the driver is not installed.
    """
    given = os.environ.get(VARIABLES[name], "")
    if not given:
        driver = "sqlite+aiosqlite" if name == "prefect" else "sqlite"
        return f"{driver}:///{home / name / f'{name}.db'}"
    scheme, _, rest = given.partition("://")
    if scheme not in ("postgresql", "postgres") or not urlsplit(given).path.strip("/"):
        raise ConfigError(f"{VARIABLES[name]}: expected postgresql://user:password@host:port/database")
    driver = _DRIVERS[name]
    if importlib.util.find_spec(driver) is None:
        raise ConfigError(f"{VARIABLES[name]}: needs the package {driver}: pip install 'rollflow[postgres]'")
    return f"postgresql+{driver}://{rest}"


def is_shared(url: str) -> bool:
    """Whether a database is a server's and not a file of this machine."""
    return url.startswith("postgresql")


def described(url: str) -> str:
    """Return a database URL without user and password, to be shown and to tell databases apart."""
    if not is_shared(url):
        return url
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    return f"postgresql://{parts.hostname or ''}{port}{parts.path}"


def without_secrets(text: str) -> str:
    """Return `text` with the password of every URL in it replaced by ***."""
    return _SECRET.sub(r"\1***@", text)
