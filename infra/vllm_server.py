"""A vLLM server of one's own: how it is started, whether it lives, and how it is stopped with all it has started.

The server runs in vLLM's environment, under a launcher (infra/vllm_launcher.py) that takes it down when this process
is gone. All its processes are in the launcher's session and carry a random token in their environment, so that what a
killed launcher has left behind is found and killed before another server starts.

Who waits for whom: `start` waits until the server answers or has died; nobody else waits.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import httpx
import psutil

from data_contracts.errors import ServiceError
from infra import settings, vllm_launcher
from infra.processes import HOST, family, free_port, port_trouble

TOKEN_VARIABLE = "ROLLFLOW_VLLM_TOKEN"
LOG_LINES = 15
STOP_LIMIT_S = vllm_launcher.PATIENCE_S + 5.0
POLL_S = 0.2


class SupervisedServer:
    """One server process at a time, on a port of 127.0.0.1; not thread-safe."""

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        *,
        log: Path,
        port: int = 0,
        start_limit_s: float = 300.0,
    ) -> None:
        """Prepare; nothing is started.

        Args:
            command: makes the command line for a port.
            environment: variables of the server beside this process's own.
            log: file that takes the server's output.
            port: 0 takes a free one at every start.
            start_limit_s: a server that does not answer within this time has failed.
        """
        self._command = command
        self._environment = dict(environment)
        self._log = log
        self._asked_port = port
        self._port = port
        self._start_limit_s = start_limit_s
        self._token = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None
        self._session = 0

    @property
    def url(self) -> str:
        """Root address of the server that was started last."""
        return f"http://{HOST}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id of the launcher; None before the first start."""
        return self._process.pid if self._process else None

    def is_alive(self) -> bool:
        """Whether the launcher, and so the server, has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self, tick: Callable[[], None] = lambda: None) -> None:
        """Start the server, after whatever is left of an earlier one is gone; return when it answers.

        Args:
            tick: called while waiting; what it raises ends the wait and the server.

        Raises:
            ServiceError: the port is taken, or the server died or did not answer in time (with its last log lines).
        """
        self.stop()
        self._port = self._asked_port or free_port()
        _check_port(self._port)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        launcher = [sys.executable, str(Path(vllm_launcher.__file__)), *self._command(self._port)]
        environment = {**settings.DEFAULTS, **os.environ, **self._environment, TOKEN_VARIABLE: self._token}
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                launcher, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        self._session = self._process.pid
        try:
            self._wait_until_healthy(tick)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ask the server to end, and kill whatever is left of it."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()  # which the launcher takes as the end of this process
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
        for left in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.wait()

    def family(self) -> list[psutil.Process]:
        """Return the launcher, the server and what it started, as far as they live."""
        return family(TOKEN_VARIABLE, {self._token}, {self._session} - {0})

    def last_lines(self) -> str:
        """Return the end of the server's log."""
        try:
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        except FileNotFoundError:
            return "(no log)"

    def _wait_until_healthy(self, tick: Callable[[], None]) -> None:
        until = time.monotonic() + self._start_limit_s
        while not answers(self.url):
            tick()
            if not self.is_alive():
                self._fail("died at its start")
            if time.monotonic() > until:
                self._fail(f"did not answer at {self.url} within {self._start_limit_s:.0f} s")
            time.sleep(POLL_S)

    def _fail(self, how: str) -> NoReturn:
        raise ServiceError(f"vLLM server {how}; the last lines of {self._log}:\n{self.last_lines()}")


def answers(url: str) -> bool:
    """Whether a server at this root address says that it is well."""
    try:
        return httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _check_port(port: int) -> None:
    trouble = port_trouble(port)
    if trouble:
        raise ServiceError(
            f"vLLM server cannot have port {port} on {HOST} ({trouble}): stop the program that uses it, "
            "or set rollout.engine.port to another, or to 0 for a free one"
        )
