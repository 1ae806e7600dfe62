"""Runs a program on a machine of its own, as far as one kernel allows: what it shares with others is one address.

    program ──► 127.0.0.1:PORT (its own loopback) ──► a socket file ──► the address outside

The program gets new user, network, process and mount namespaces: no network but a loopback of its own, process ids
that mean nothing outside, an empty /tmp and an empty home. A relay on either side of a socket file carries bytes to
the one address. Needs Linux with unprivileged user namespaces: `is_possible` tells.

    python -m tests.servers.walled FOLDER PORT -- COMMAND ...
"""

import contextlib
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--mount", "--mount-proc")
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1


def is_possible() -> bool:
    """Whether this machine lets anybody make the namespaces."""
    return bool(shutil.which("unshare")) and subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0


@contextlib.contextmanager
def door(folder: Path, port: int) -> Iterator[None]:
    """Let walled programs reach 127.0.0.1:port outside, through a socket file in `folder`."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "door"))
        listening.listen(128)
        threading.Thread(target=_relay, args=(listening, socket.AF_INET, ("127.0.0.1", port)), daemon=True).start()
        yield


def start(folder: Path, port: int, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a walled program; its output is read from stdout. Signals to it go through `ask_to_leave`."""
    wall = [*UNSHARE, "--kill-child", sys.executable, "-m", "tests.servers.walled", str(folder), str(port), "--"]
    return subprocess.Popen(
        [*wall, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ask_to_leave(folder: Path) -> None:
    """Have the program get SIGTERM."""
    (folder / "leave").touch()


def _main(folder: Path, port: int, command: list[str]) -> int:
    os.chdir(folder)  # by relative names it stays reachable, wherever it lies, when /tmp is another
    _raise_loopback()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/tmp"], check=True)
    home = Path("/tmp/home")
    home.mkdir()
    listening = socket.create_server(("127.0.0.1", port), backlog=128)
    threading.Thread(target=_relay, args=(listening, socket.AF_UNIX, "door"), daemon=True).start()
    environment = os.environ | {"HOME": str(home), "ROLLFLOW_HOME": str(home / "rollflow")}
    program = subprocess.Popen(command, env=environment, cwd=home)
    while True:
        try:
            return program.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            if os.path.exists("leave"):
                os.unlink("leave")
                program.terminate()


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _GET_FLAGS, request), 16)
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14s", b"lo", flags | _UP, b""))


def _relay(listening: socket.socket, family: int, address: object) -> None:
    while True:
        try:
            inside, _ = listening.accept()
            outside = socket.socket(family)
            outside.connect(address)  # type: ignore[arg-type]
        except OSError:
            return
        for source, target in ((inside, outside), (outside, inside)):
            threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(1 << 16):
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4:]))
