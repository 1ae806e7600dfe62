"""Programs try to get out of the sandbox, to outlive it and to use up the machine; none does."""

import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from data_contracts.errors import ConfigError
from infra.sandbox import Limits, Mode, Ran, Sandbox

LIMITS = Limits(wall_s=20.0, cpu_s=1, memory_bytes=256 << 20, processes=4, scratch_bytes=1 << 20, output_bytes=1 << 12)
MODES: tuple[Mode, ...] = ("namespaces", "limits")


@pytest.fixture(scope="module", params=MODES)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    try:
        return Sandbox(request.param, LIMITS)
    except ConfigError as cause:
        pytest.skip(str(cause))


@pytest.fixture(scope="module")
def strong() -> Sandbox:
    try:
        return Sandbox("namespaces", LIMITS)
    except ConfigError as cause:
        pytest.skip(str(cause))


def run(sandbox: Sandbox, program: str, **options) -> Ran:
    return sandbox.run({"program.py": textwrap.dedent(program)}, **options)


def attempt(sandbox: Sandbox, statement: str, *imports: str) -> str:
    """Return what a statement prints, or the name of the error that it raises."""
    lines = [*(f"import {name}" for name in imports), "try:", f"    {statement}"]
    ran = run(sandbox, "\n".join([*lines, "except BaseException as error: print(type(error).__name__)"]))
    assert ran.ending == "exited", ran
    return ran.stdout.strip()


def test_a_program_reads_its_input_and_its_files_and_prints(sandbox: Sandbox) -> None:
    files = {"program.py": "print(input() + open('data.txt').read())", "data.txt": "é!"}
    assert sandbox.run(files, stdin="hello ") == Ran("exited", 0, "hello é!\n", "")


def test_errors_and_exit_codes_come_out(sandbox: Sandbox) -> None:
    ran = run(sandbox, "import sys; sys.exit(7)")
    assert (ran.ending, ran.code) == ("exited", 7)
    ran = run(sandbox, "1 / 0")
    assert ran.code == 1
    assert "ZeroDivisionError" in ran.stderr


def test_it_may_write_in_its_scratch_folder_and_nothing_of_it_stays(sandbox: Sandbox) -> None:
    assert attempt(sandbox, "open('new', 'w').write('x'); print(open('new').read())") == "x"
    assert attempt(sandbox, "open('new')") == "FileNotFoundError"


@pytest.mark.parametrize("place", ["/usr/x", "/x", "/root/x", "/dev/x", "/scratch/../x", "{tests}/x"])
def test_nothing_is_written_outside(place: str, sandbox: Sandbox) -> None:
    path = place.format(tests=Path(__file__).parent)
    said = attempt(sandbox, f"open({path!r}, 'w').write('x'); print('written')")
    assert said in ("PermissionError", "OSError", "FileNotFoundError")
    assert not Path(path).exists()


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/1/environ", "/proc/self/environ", __file__])
def test_files_of_the_host_are_not_read(path: str, sandbox: Sandbox) -> None:
    assert attempt(sandbox, f"print(len(open({path!r}, 'rb').read()))") in ("FileNotFoundError", "PermissionError")


def test_secrets_of_the_environment_stay_outside(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2")
    ran = run(sandbox, "import os; print(os.environ, [name for name in os.listdir('.')])")
    assert "hunter2" not in ran.stdout
    assert "MY_SECRET" not in ran.stdout


def test_no_descriptor_of_the_parent_is_inherited(sandbox: Sandbox) -> None:
    with open(__file__, encoding="utf-8") as secret:
        os.set_inheritable(secret.fileno(), True)
        program = """
            import os
            found = []
            for number in range(256):
                try:
                    os.fstat(number)
                    found.append(number)
                except OSError:
                    pass
            print(found)
        """
        assert run(sandbox, program).stdout == "[0, 1, 2]\n"


def test_the_network_is_out_of_reach(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        connect = f"socket.create_connection({address!r}, 2); print('connected')"
        assert attempt(sandbox, connect, "socket") in ("PermissionError", "OSError")
        server.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_an_infinite_loop_ends_by_its_processor_time(sandbox: Sandbox) -> None:
    assert run(sandbox, "while True: pass").ending == "too long"


@pytest.mark.parametrize(
    "program", ["import time; time.sleep(100)", "import os, time; os.close(1); os.close(2); time.sleep(100)"]
)
def test_a_sleeper_ends_by_the_clock(program: str, sandbox: Sandbox) -> None:
    assert run(sandbox, program, wall_s=1.0).ending == "too long"


def test_a_loop_that_ignores_signals_ends_too(sandbox: Sandbox) -> None:
    program = """
        import signal
        for number in (signal.SIGXCPU, signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while True:
            pass
    """
    assert run(sandbox, program).ending in ("killed", "too long")


def test_memory_has_a_limit(sandbox: Sandbox) -> None:
    assert attempt(sandbox, "bytearray(1 << 30)") == "MemoryError"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_has_a_limit(stream: str, sandbox: Sandbox) -> None:
    ran = run(sandbox, f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
    assert ran.ending == "too much output"
    assert len(ran.stdout) + len(ran.stderr) <= 2 * LIMITS.output_bytes


def test_the_scratch_folder_has_a_limit(sandbox: Sandbox) -> None:
    program = """
        import signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with open('big', 'wb') as file:
            for _ in range(64):
                file.write(bytes(1 << 16))
        print('written')
    """
    ran = run(sandbox, program)
    assert "written" not in ran.stdout
    assert "OSError" in ran.stderr


def test_a_fork_bomb_does_not_go_off(sandbox: Sandbox) -> None:
    before = len(psutil.pids())
    program = """
        import os, time
        born = 0
        for _ in range(200):
            try:
                if os.fork() == 0:
                    time.sleep(30)
                    os._exit(0)
                born += 1
            except OSError:
                break
        print(born)
    """
    ran = run(sandbox, program)
    assert ran.ending == "exited"
    assert int(ran.stdout) < LIMITS.processes
    assert len(psutil.pids()) < before + 100


def test_children_do_not_outlive_the_program(strong: Sandbox) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    program = f"""
        import os, sys
        try:
            for _ in range(2):
                if os.fork() == 0:
                    os.setsid()
                    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", {mark!r}])
        except PermissionError:  # the host's root without namespaces of its own may not start any
            pass
        print("left")
    """
    ran = run(strong, program)
    assert (ran.ending, ran.stdout) == ("exited", "left\n")
    assert [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])] == []


def test_signals_do_not_reach_anybody_outside(sandbox: Sandbox) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    program = f"""
        import os, signal
        for pid in ({os.getpid()}, {bystander.pid}, os.getppid(), 1, -1):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
    """
    try:
        run(sandbox, program)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize(
    "call",
    ["unshare(0x10000000)", "mount(b'a', b'/scratch', b'tmpfs', 0, None)", "ptrace(16, 1, 0, 0)", "chroot(b'/')"],
)
def test_calls_that_lead_out_are_denied(call: str, sandbox: Sandbox) -> None:
    assert attempt(sandbox, f"print(ctypes.CDLL(None, use_errno=True).{call}, ctypes.get_errno())", "ctypes") == "-1 1"


def test_nobody_gets_privileges_back(sandbox: Sandbox) -> None:
    assert attempt(sandbox, "os.chown('.', 12345, 12345); print('owned')", "os") in ("PermissionError", "OSError")


def test_nobody_becomes_root(strong: Sandbox) -> None:
    assert attempt(strong, "os.setuid(0); print('root')", "os") in ("PermissionError", "OSError")


def test_the_host_is_not_in_sight(strong: Sandbox) -> None:
    ran = run(strong, "import os; print(os.getpid() < 5, os.path.exists('/proc'), os.path.exists('/home'))")
    assert ran.stdout == "True False False\n"


def processes_of(pid: int) -> list[psutil.Process]:
    """Return the descendants of a process, if one of them runs the program."""
    found = psutil.Process(pid).children(recursive=True)
    try:
        return found if any("program.py" in process.cmdline() for process in found) else []
    except psutil.NoSuchProcess:
        return []


def test_a_program_whose_keeper_dies_dies_with_it(sandbox: Sandbox) -> None:
    keeper = f"""
        import sys
        sys.path.insert(0, {str(Path.cwd())!r})
        from infra.sandbox import Limits, Sandbox
        sandbox = Sandbox({sandbox.mode!r}, Limits(wall_s=60.0))
        print("ready", flush=True)
        sandbox.run({{"program.py": "import time; time.sleep(60)"}})
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(keeper)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    inside: list[psutil.Process] = []
    while not inside:
        time.sleep(0.02)
        inside = processes_of(process.pid)
    process.kill()
    process.wait()
    process.stdout.close()
    assert psutil.wait_procs(inside, timeout=30)[1] == []
