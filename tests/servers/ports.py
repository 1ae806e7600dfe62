"""Free ports of the loopback interface."""

import socket


def free_port() -> int:
    """Return a port that nobody uses at this moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
