"""A moto server: S3 over HTTP in a process of its own, its objects in memory."""

import contextlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

from infra.processes import free_port


@contextlib.contextmanager
def running() -> Iterator[str]:
    """Start the server; yield its endpoint."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    endpoint = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{endpoint}/moto-api/", timeout=10).close()
                break
            time.sleep(0.1)
        else:
            raise RuntimeError("the moto server did not start")
        yield endpoint
    finally:
        server.kill()
        server.wait()
