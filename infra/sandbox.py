"""Runs programs nobody vouches for: no network, no files of the host, limits on everything, nothing left behind.

Two strengths:

- `namespaces` (Linux, as root or where unprivileged user namespaces are allowed): the program lives in namespaces of
  its own. It sees read-only system folders (/usr, /lib, the Python installation) and a scratch folder in memory; no
  /proc, no network, no other process. When it ends, everything it has started ends.
- `limits` (Linux): no namespaces. seccomp denies sockets, new processes and signals; Landlock (Linux 5.13 or later)
  denies files outside of system folders and the scratch folder. Shares the host's process table and kernel objects.

Neither is a virtual machine: a hole in the kernel is a hole in the sandbox. The memory limit counts for each process,
so all together may take `processes` times as much. It needs x86_64 or aarch64.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data_contracts.errors import ConfigError, ServiceError

Mode = Literal["namespaces", "limits"]
Ending = Literal["exited", "killed", "too long", "too much output"]

_LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
_START_GRACE_S = 10.0
"""After this much more, process 1 of a sandbox ends by itself, should everybody outside be dead."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use."""

    wall_s: float = 5.0
    cpu_s: int = 5
    memory_bytes: int = 512 << 20
    """Address space of each process."""
    processes: int = 4
    """Processes and threads at once; with sandbox `limits`, threads alone, without a limit of their own."""
    scratch_bytes: int = 16 << 20
    """Size of the scratch folder, and of a file in it."""
    output_bytes: int = 1 << 16
    """stdout and stderr, each."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a program ended."""

    ending: Ending
    code: int
    """Exit code; minus the number of the signal that killed it."""
    stdout: str
    stderr: str


class Sandbox:
    """A way to run Python programs of unknown intent. Holds nothing between runs.

    Attributes:
        mode: how they are shut in.
    """

    def __init__(self, mode: Mode, limits: Limits) -> None:
        """Prove that this machine can shut a program in.

        Raises:
            ConfigError: it cannot, and why.
        """
        self.mode: Mode = mode
        self._limits = limits
        try:
            ran = self.run({"program.py": "print(6 * 7)"})
        except ServiceError as cause:
            raise ConfigError(
                f"sandbox {mode} is not available here: {cause}; allow unprivileged user namespaces, or accept the "
                'weaker `sandbox = "limits"`'
                if mode == "namespaces"
                else f"sandbox {mode} is not available here: {cause}; it needs Linux 5.13 on x86_64 or aarch64"
            ) from cause
        if ran.stdout != "42\n":
            raise ConfigError(f"sandbox {mode} is not available here: it printed {ran.stdout!r}, {ran.stderr!r}")

    def run(self, files: dict[str, str], stdin: str | None = None, *, wall_s: float | None = None) -> Ran:
        """Run program.py of `files` in a fresh scratch folder that holds them; return once all of it has ended.

        Args:
            files: name to text; what the program may read.
            stdin: what it reads from standard input; nothing when None.
            wall_s: how long it may last, in place of the limit.

        Raises:
            ServiceError: the program could not be shut in, so it was not run.
        """
        wall_s = self._limits.wall_s if wall_s is None else wall_s
        with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
            python = os.path.realpath(sys.executable)
            job = {
                "mode": self.mode,
                "root": folder,
                "scratch": folder,
                "files": files,
                "stdin": stdin,
                "readable": [sys.base_prefix, sys.base_exec_prefix],
                "argv": [python, "-I", "-S", "-B", "-X", "utf8", "program.py"],
                "environment": {"PATH": "/usr/bin:/bin", "HOME": "/scratch", "LANG": "C.UTF-8"},
                "needs_landlock": True,
                "wall_s": wall_s + _START_GRACE_S,
                "cpu_s": self._limits.cpu_s,
                "memory_bytes": self._limits.memory_bytes,
                "processes": self._limits.processes,
                "scratch_bytes": self._limits.scratch_bytes,
            }
            return _Run(job, wall_s, self._limits.output_bytes).result()


class _Run:
    """One launcher process, watched until it ends or is killed."""

    def __init__(self, job: dict[str, object], wall_s: float, output_bytes: int) -> None:
        self._wall_s = wall_s
        self._output_bytes = output_bytes
        payload_read, payload_write = os.pipe()
        self._status_fd, status_write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_LAUNCHER), str(payload_read), str(status_write)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            pass_fds=(payload_read, status_write),
            start_new_session=True,
        )
        os.close(payload_read)
        os.close(status_write)
        with suppress(BrokenPipeError), os.fdopen(payload_write, "w", encoding="utf-8") as payload:
            json.dump(job, payload)

    def result(self) -> Ran:
        """Wait, and say how it ended."""
        try:
            ending, outputs = self._watch()
        finally:
            self._kill()
        status = self._status()
        if ending is None and "error" in status:
            raise ServiceError(f"{status['error']}")
        if ending is None and "code" not in status:
            raise ServiceError(f"the sandbox ended without a word: {outputs[1].decode(errors='replace')[-500:]}")
        code = int(str(status.get("code", -int(signal.SIGKILL))))
        if ending is None:
            ending = "exited" if code >= 0 else "too long" if code == -signal.SIGXCPU else "killed"
        return Ran(ending, code, outputs[0].decode(errors="replace"), outputs[1].decode(errors="replace"))

    def _watch(self) -> tuple[Ending | None, list[bytearray]]:
        """Read both outputs until they end, the time is over, or one of them gets too long."""
        outputs = [bytearray(), bytearray()]
        deadline = time.monotonic() + self._wall_s
        with selectors.DefaultSelector() as selector:
            for number, stream in enumerate((self._process.stdout, self._process.stderr)):
                assert stream is not None  # noqa: S101 opened as a pipe
                selector.register(stream, selectors.EVENT_READ, number)
            while selector.get_map():
                ready = selector.select(max(deadline - time.monotonic(), 0.0))
                if not ready:
                    return "too long", outputs
                for key, _ in ready:
                    body = os.read(key.fd, 1 << 16)
                    if not body:
                        selector.unregister(key.fileobj)
                        continue
                    output = outputs[key.data]
                    output += body
                    if len(output) > self._output_bytes:
                        del output[self._output_bytes :]
                        return "too much output", outputs
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:  # it has closed its outputs and goes on
            return "too long", outputs
        return None, outputs

    def _kill(self) -> None:
        """End the launcher and with it whatever is inside; process 1 of the namespaces dies with its parent."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _status(self) -> dict[str, object]:
        """Return what the launcher told; empty when it was killed before. Waits until the inside has ended."""
        with os.fdopen(self._status_fd, encoding="utf-8") as status:
            line = status.readline()
        return json.loads(line) if line else {}
