"""When the exporter exports: at its own pace while the run goes on, and once more to the end when it is over."""

import logging
import math
import time
from collections.abc import Callable

from data_contracts.errors import ServiceError
from infra.tracking import Exporter

logger = logging.getLogger("rollflow.export")


def export_loop(
    exporter: Exporter,
    is_over: Callable[[], bool],
    *,
    wait: Callable[[float], object] = time.sleep,
    report: Callable[[str], object] = lambda state: None,
    poll_s: float = 1.0,
    longest_wait_s: float = 30.0,
    drain_s: float = 60.0,
) -> bool:
    """Export until the run is over and everything is in MLflow; an unreachable server is waited for.

    A server that is away or refuses is logged once, and once more when it is back; it is asked again after 1, 2,
    4 seconds and so on.

    Args:
        exporter: what to export with.
        is_over: whether nothing more will be written; what it raises ends the loop.
        wait: sleeps that many seconds, or less.
        report: is told what the loop does, for a heartbeat.
        poll_s: seconds between two passes.
        longest_wait_s: limit on the seconds between two tries while the server is away.
        drain_s: seconds that the end of the run waits for the server.

    Returns:
        Whether everything was exported.

    Raises:
        RollflowError: whatever `export_available` raises besides ServiceError.
    """
    over_since: float | None = None
    trouble = ""
    pause_s, next_try = poll_s, -math.inf
    while True:
        if over_since is None and is_over():
            over_since = time.monotonic()
        if over_since is not None or time.monotonic() >= next_try:
            trouble = _try_export(exporter, trouble)
            report("waiting for MLflow" if trouble else "exporting")
            pause_s = min(2 * pause_s, longest_wait_s) if trouble else poll_s
            next_try = time.monotonic() + pause_s
        if over_since is not None and not trouble:
            return True
        if over_since is not None and time.monotonic() - over_since >= drain_s:
            logger.error("not everything was exported within %.0f s of the end: %s", drain_s, trouble)
            return False
        wait(poll_s)


def _try_export(exporter: Exporter, trouble: str) -> str:
    """Export once; return what is wrong with the server, empty when nothing is. Log when that changes."""
    try:
        num_new = exporter.export_available()
    except ServiceError as error:
        if not trouble:
            logger.warning("%s; the run goes on and is exported when the server answers again", error)
        return str(error)
    if trouble:
        logger.warning("MLflow at %s answers again; exported %d records", exporter.uri, num_new)
    return ""
