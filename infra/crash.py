"""Dying on purpose, at a named point: how the tests prove that a process may be killed anywhere."""

import os
import signal
import threading

VARIABLE = "ROLLFLOW_CRASH_POINT"

_passed: dict[str, int] = {}
_lock = threading.Lock()


def point(name: str) -> None:
    """Kill this process with SIGKILL if ROLLFLOW_CRASH_POINT says "name", or "name:k" at the k-th passing from 1.

    Without the variable it costs one look-up.
    """
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    wanted_name, _, count = wanted.partition(":")
    if wanted_name != name:
        return
    with _lock:
        _passed[name] = _passed.get(name, 0) + 1
        if _passed[name] == int(count or 1):
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()  # the signal may arrive a moment later; nothing more may happen before it
