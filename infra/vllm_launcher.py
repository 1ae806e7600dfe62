"""Runs a server and takes it down with itself. Started by infra/vllm_server.py as a script; uses the stdlib alone.

    rollout role ──pipe──► launcher ──► vllm serve ──► engine processes
                                        (a process group of their own, in the launcher's session)

The launcher holds the reading end of a pipe whose writing end only the role has. When the role is gone, however it
died, the pipe ends, and the whole group of the server is killed: a server without its role would keep its memory
and its port. When the server ends first, what it left behind is killed too, and the launcher ends with its code.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

PATIENCE_S = 10.0


def main() -> int:
    """Run the command in sys.argv until it ends or the standard input does; return its exit code."""
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, process_group=0)
    threading.Thread(target=_end_with_the_role, args=(server,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: _signal(server.pid, signal.SIGTERM))
    code = server.wait()
    _signal(server.pid, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def _end_with_the_role(server: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 1):
        pass
    _signal(server.pid, signal.SIGTERM)
    time.sleep(PATIENCE_S)  # the main thread ends the process as soon as the server has ended
    _signal(server.pid, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
