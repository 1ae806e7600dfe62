"""What supervisors of servers share: finding a whole family of processes, and ports of the loopback interface."""

import contextlib
import os
import socket
from collections.abc import Collection

import psutil

HOST = "127.0.0.1"


def family(variable: str, tokens: Collection[str], sessions: Collection[int] = ()) -> list[psutil.Process]:
    """Return every process in whose environment `variable` is one of `tokens`, or that is in one of `sessions`.

    Children inherit both: what a killed parent has left behind is found too. A process may begin a session of its
    own, and one that gives itself another title overwrites its environment; few do both.
    """
    mine: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # gone, or another user's
            if os.getsid(process.pid) in sessions or process.environ().get(variable) in tokens:
                mine.append(process)
    return mine


def free_port() -> int:
    """Return a port of HOST that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def port_trouble(port: int) -> str:
    """Return why nobody can listen on a port of HOST, as the operating system says it; empty when one can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as cause:
            return cause.strerror or str(cause)
    return ""
