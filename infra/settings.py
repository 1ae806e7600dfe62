"""Where Rollflow keeps its things on this machine, and the environment its dependencies must find.

Nothing here imports a dependency: call `apply_defaults()` first, then import Prefect or MLflow, which read
their environment once. What a person has set is never changed.
"""

import ctypes
import os
import sys
from pathlib import Path

from data_contracts.errors import ConfigError

HOME_VARIABLE = "ROLLFLOW_HOME"
STORE_VARIABLE = "ROLLFLOW_STORE"
STORE_VARIABLES = {"ROLLFLOW_STORE_RETRY_S": 60.0, "ROLLFLOW_STORE_TIMEOUT_S": 30.0}
"""How long a request to object storage is tried again, and how long one try may take, in seconds; see open_store."""

MALLOC_TRIM_THRESHOLD = 2**31 - 1
"""Bytes; mallopt takes no more."""

MALLOPT = {
    "MALLOC_TRIM_THRESHOLD_": -1,
    "MALLOC_TOP_PAD_": -2,
    "MALLOC_MMAP_THRESHOLD_": -3,
    "MALLOC_ARENA_MAX": -8,
}
"""Variable that glibc reads when a process starts, to the number of the same parameter for mallopt (malloc.h)."""

SUBFOLDERS = ("prefect", "mlflow", "logs", "store")

# Asynchronous logging of MLflow stays off: it acknowledges before it has written, and drops on an outage.
DEFAULTS: dict[str, str] = {
    # Nothing reports home. MLflow does not take DO_NOT_TRACK=1 for an answer, vLLM takes nothing else.
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GX_ANALYTICS_ENABLED": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    # With MLflow's own numbers a call to a server that is away blocks for four minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Ten processes and 2.5 GB become two and 0.5 GB.
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    # S3 servers other than Amazon's refuse the newer checksums.
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    # For the processes started from here; see `keep_freed_memory`.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(MALLOC_TRIM_THRESHOLD),
    "MALLOC_TOP_PAD_": str(32 * 2**20),
    # Often enough for the automation that tells a killed flow from a slow one; 30 s is Prefect's minimum.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
}


def home() -> Path:
    """Return the absolute folder of this machine's state: ROLLFLOW_HOME, or .rollflow below the working folder."""
    return Path(os.environ.get(HOME_VARIABLE) or ".rollflow").expanduser().absolute()


def default_store() -> str:
    """Return where runs are that name no store: ROLLFLOW_STORE, or store/ below `home()`."""
    return os.environ.get(STORE_VARIABLE) or str(home() / "store")


def make_home(folder: Path | None = None) -> Path:
    """Create `folder` (default: `home()`) with prefect/, mlflow/, logs/ and store/ below it; return it, absolute."""
    folder = home() if folder is None else folder.expanduser().absolute()
    for name in SUBFOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    return folder


def seconds(name: str) -> float:
    """Return the value of a variable of `STORE_VARIABLES`, or its default.

    Raises:
        ConfigError: it is no positive number.
    """
    given = os.environ.get(name, "")
    try:
        value = float(given) if given else STORE_VARIABLES[name]
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name}: expected a positive number of seconds, got {given!r}")
    return value


def keep_freed_memory() -> None:
    """Have this process keep the memory that it frees, by the MALLOC_* variables; where there is no glibc, do nothing.

    By default glibc gives the memory of every large tensor back to the system and asks for it again: a third of the
    processor time of a step on small models is spent there. glibc reads its variables when a process starts, which for
    this one is over.
    """
    set_parameter = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_parameter is None:
        return
    for name, number in MALLOPT.items():
        given = os.environ.get(name, DEFAULTS[name])
        if given.isdecimal() and int(given) < 2**31:
            set_parameter(number, int(given))


def apply_defaults() -> None:
    """Set every variable of `DEFAULTS`, and PREFECT_HOME below `home()`, where it is unset.

    Creates the folder of PREFECT_HOME: Prefect, when imported, warns if its parents are missing.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if "PREFECT_HOME" not in os.environ:
        folder = home() / "prefect"
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["PREFECT_HOME"] = str(folder)
