"""Supervision of a server, with a small real one that can be told how to die."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from data_contracts.errors import ConfigError, RunStopped, ServiceError
from infra.vllm_command import vllm_python
from infra.vllm_server import SupervisedServer, answers

SERVER = """
import http.server, subprocess, sys
# As a process that gives itself a title: its environment cannot be read any more.
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={})
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def supervised(tmp_path: Path, code: str = SERVER, **settings) -> SupervisedServer:
    return SupervisedServer(
        lambda port: [sys.executable, "-c", code, str(port)], {}, log=tmp_path / "server.log", **settings
    )


def wait_until(condition) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_server_answers_once_it_is_started_and_is_gone_with_its_children_once_it_is_stopped(tmp_path):
    server = supervised(tmp_path)
    server.start()
    try:
        assert server.is_alive()
        assert answers(server.url)
        family = server.family()
        assert len(family) == 3  # launcher, server, its child
    finally:
        server.stop()
    assert not server.is_alive()
    assert not answers(server.url)
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("victim", [0, 1])
def test_whichever_of_its_processes_is_killed_it_is_started_again_and_nothing_of_the_old_one_is_left(tmp_path, victim):
    server = supervised(tmp_path)
    server.start()
    try:
        old = sorted(server.family(), key=lambda process: process.create_time())
        old[victim].kill()  # the launcher, or the server below it
        wait_until(lambda: not server.is_alive())
        server.start()
        assert answers(server.url)
        assert not [process for process in old if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    finally:
        server.stop()


def test_a_server_does_not_outlive_the_process_that_started_it_however_that_dies(tmp_path):
    code = f"""
import sys, time
from pathlib import Path
from infra.vllm_server import SupervisedServer
server = SupervisedServer(lambda port: [sys.executable, "-c", {SERVER!r}, str(port)], {{}}, log=Path(sys.argv[1]))
server.start()
print(*(process.pid for process in server.family()), flush=True)
time.sleep(600)
"""
    role = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True, env=os.environ.copy()
    )
    assert role.stdout is not None
    family = [psutil.Process(int(pid)) for pid in role.stdout.readline().split()]
    assert len(family) == 3
    role.send_signal(signal.SIGKILL)
    role.wait()
    role.stdout.close()
    psutil.wait_procs(family, timeout=60)
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_a_server_that_dies_at_its_start_is_told_with_its_last_lines(tmp_path):
    server = supervised(tmp_path, "print('no such model'); raise SystemExit(3)")
    with pytest.raises(ServiceError, match=r"(?s)died at its start; the last lines of .*server.log:.*no such model"):
        server.start()


def test_a_server_that_does_not_answer_in_time_is_stopped(tmp_path):
    server = supervised(tmp_path, "import time; time.sleep(600)", start_limit_s=0.3)
    with pytest.raises(ServiceError, match="did not answer at http://127.0.0.1:[0-9]+ within 0 s"):
        server.start()
    assert not server.family()


def test_a_wait_for_a_server_ends_when_the_run_does(tmp_path):
    def tick() -> None:
        raise RunStopped("asked to")

    server = supervised(tmp_path, "import time; time.sleep(600)")
    with pytest.raises(RunStopped, match="asked to"):
        server.start(tick)
    assert not server.family()


def test_a_busy_port_is_said_before_anything_is_started(tmp_path):
    server = supervised(tmp_path)
    server.start()
    try:
        port = int(server.url.rsplit(":", 1)[1])
        with pytest.raises(ServiceError, match=f"cannot have port {port} .*set rollout.engine.port to another"):
            supervised(tmp_path, port=port).start()
    finally:
        server.stop()


def test_an_environment_without_vllm_is_said_with_what_makes_one(tmp_path):
    with pytest.raises(ConfigError, match=f"rollout.engine.environment {tmp_path}: .*`make vllm` builds it"):
        vllm_python(str(tmp_path))
    package = tmp_path / "lib" / "python3.12" / "site-packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    assert vllm_python(str(tmp_path)) == tmp_path / "bin" / "python"
