"""Shuts itself in, then runs a program. Started by infra/sandbox.py as a script of its own; uses the stdlib alone.

    launcher ── unshare ──► init (process 1 of its own process namespace) ──► program
    writes how it ended     sees only read-only system folders and a scratch      no privileges, limits, seccomp
    into the status pipe    folder in memory; no /proc, no network, no host

With sandbox `limits` there are no namespaces: the program may start no process, open no socket and send no signal
(seccomp), and see no file but system folders and the scratch folder (Landlock, where the kernel has it).
Manual pages: unshare(2), mount_setattr(2), pivot_root(2), seccomp(2), landlock(7), prctl(2).
"""

import ctypes
import json
import os
import platform
import resource
import secrets
import signal
import struct
import sys
from typing import Any, NoReturn

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_PDEATHSIG, _DUMPABLE, _CAPBSET_DROP, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVS = 1, 4, 24, 22, 36, 38
_CLONE_THREAD = 0x10000
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")

# name: (x86_64, aarch64); -1 where the machine has none
_DENIED = {
    "socket": (41, 198), "ptrace": (101, 117), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "open_by_handle_at": (304, 265), "kexec_load": (246, 104), "init_module": (175, 105), "finit_module": (313, 273),
    "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430), "mount_setattr": (442, 442),
}  # fmt: skip
_FORKING = {"fork": (57, -1), "vfork": (58, -1)}
_SIGNALLING = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "pidfd_send_signal": (424, 424), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "prlimit64": (302, 261),
}  # fmt: skip
_CLONE, _CLONE3, _PIVOT_ROOT = (56, 220), (435, 435), (155, 41)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def main() -> None:
    """Read what to do from one pipe, do it, and say how it ended through the other."""
    payload_fd, status_fd = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(status_fd, False)
    with os.fdopen(payload_fd, encoding="utf-8") as payload:
        job = json.load(payload)
    _prctl(_PDEATHSIG, signal.SIGKILL)
    try:
        code = _run_in_namespaces(job, status_fd) if job["mode"] == "namespaces" else _run_with_limits(job)
    except OSError as cause:
        _tell(status_fd, {"error": f"{cause.strerror} ({cause.filename})" if cause.filename else str(cause.strerror)})
        return
    if code is not None:
        _tell(status_fd, {"code": code})


def _run_in_namespaces(job: dict[str, Any], status_fd: int) -> int | None:
    """Fork a process 1 of new namespaces and wait for it; it tells how the program ended itself."""
    is_root = _unshare()
    # The kernel holds its root to no limit of processes, in whatever namespace: then there are none but the program.
    job["may_fork"] = is_root or os.getuid() != 65534
    init = os.fork()
    if not init:
        try:
            _be_init(job, status_fd, is_root)
        except OSError as cause:
            _tell(status_fd, {"error": f"{cause.strerror} {cause.filename or ''}".strip()})
        finally:
            os._exit(1)
    os.waitpid(init, 0)
    return None


def _unshare() -> bool:
    """Enter new namespaces; return whether the process is the host's root, which must then become somebody else."""
    flags = _NEWNS | _NEWNET | _NEWPID | _NEWIPC | _NEWUTS
    uid, gid = os.getuid(), os.getgid()
    if uid == 0 and _LIBC.unshare(flags) == 0:
        return True
    _check(_LIBC.unshare(flags | _NEWUSER), "unshare")
    inner = uid or 65534
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inner} {uid} 1"), ("gid_map", f"{gid or 65534} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    return False


def _be_init(job: dict[str, Any], status_fd: int, is_root: bool) -> None:
    _build_root(job)
    if is_root:
        _drop_capabilities()
        nobody = 1_000_000_000 + secrets.randbelow(1_000_000_000)  # nobody else's, so that process limits are its own
        os.setgroups([])
        os.setresgid(nobody, nobody, nobody)
        os.setresuid(nobody, nobody, nobody)
    _prctl(_NO_NEW_PRIVS, 1)
    _prctl(_DUMPABLE, 0)
    _prctl(_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))  # the last resort; the parent's limit comes first
    signal.alarm(int(job["wall_s"]) + 5)
    program = os.fork()
    if not program:
        _become_program(job, status_fd)
    while True:
        pid, status = os.wait()
        if pid == program:
            _tell(status_fd, {"code": os.waitstatus_to_exitcode(status)})
            os._exit(0)  # the kernel kills whatever else is in the namespace


def _build_root(job: dict[str, Any]) -> None:
    """Make a root of read-only system folders and a writable scratch folder, all in memory, and move into it."""
    root = job["root"]
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    for path in (*_SYSTEM, *job["readable"], *_DEVICES):
        inside = root + path
        if not os.path.lexists(path) or os.path.lexists(inside):
            continue
        os.makedirs(os.path.dirname(inside), mode=0o755, exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
            continue
        if os.path.isdir(path):
            os.mkdir(inside, 0o755)
        else:
            os.close(os.open(inside, os.O_CREAT | os.O_WRONLY, 0o644))
        _mount(path, inside, None, _BIND | _REC)
        if path not in _DEVICES:
            _make_read_only(inside)
    os.mkdir(f"{root}/scratch", 0o777)
    os.mkdir(f"{root}/old", 0o700)
    size = f"size={job['scratch_bytes']},nr_inodes=4096,mode=777"
    _mount("tmpfs", f"{root}/scratch", "tmpfs", _NOSUID | _NODEV, size)
    _write_files(job["files"], f"{root}/scratch")
    _check(_LIBC.syscall(_PIVOT_ROOT[_machine()[0]], root.encode(), f"{root}/old".encode()), "pivot_root")
    os.chdir("/")
    _check(_LIBC.umount2(b"/old", 2), "umount2")  # MNT_DETACH
    os.rmdir("/old")
    _mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    job["scratch"] = "/scratch"


def _make_read_only(path: str) -> None:
    """Make a mount and all below it read-only, without devices and set-user-id programs."""
    attributes = struct.pack("QQQQ", 0x1 | 0x2 | 0x4, 0, 0, 0)
    _check(_LIBC.syscall(442, -100, path.encode(), 0x8000, attributes, len(attributes)), "mount_setattr", path)


def _run_with_limits(job: dict[str, Any]) -> int:
    _write_files(job["files"], job["scratch"])
    _prctl(_SUBREAPER, 1)
    program = os.fork()
    if not program:
        _prctl(_PDEATHSIG, signal.SIGKILL)
        _drop_capabilities()
        _prctl(_NO_NEW_PRIVS, 1)
        try:
            _restrict_files(job)
        except OSError as cause:
            if job["needs_landlock"]:
                os.write(2, f"landlock: {cause}\n".encode())
                os._exit(126)
        _become_program(job, -1)
    return os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])


def _restrict_files(job: dict[str, Any]) -> None:
    """Allow files below system folders to be read, and those below the scratch folder everything (Landlock)."""
    abi = _check(_LIBC.syscall(444, None, 0, 1), "landlock")
    handled = (1 << 13) - 1 | (1 << 13 if abi >= 2 else 0) | (1 << 14 if abi >= 3 else 0)
    reading = 1 << 0 | 1 << 2 | 1 << 3  # execute, read file, read directory
    attribute = struct.pack("Q", handled)
    ruleset = _check(_LIBC.syscall(444, attribute, len(attribute), 0), "landlock")
    writable = 1 << 1 | 1 << 2 | (1 << 14 if abi >= 3 else 0)
    allowed = [(path, reading) for path in (*_SYSTEM, *job["readable"])]
    allowed += [(path, writable) for path in _DEVICES] + [(job["scratch"], handled)]
    for path, access in allowed:
        if not os.path.exists(path):
            continue
        if not os.path.isdir(path):
            access &= 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", access, folder)
        _check(_LIBC.syscall(445, ruleset, 1, rule, 0), "landlock", path)
        os.close(folder)
    _check(_LIBC.syscall(446, ruleset, 0), "landlock")
    os.close(ruleset)


def _become_program(job: dict[str, Any], status_fd: int) -> NoReturn:
    """Give up everything that is not needed and turn into the program; does not return."""
    try:
        os.chdir(job["scratch"])
        stdin = os.open("/dev/null", os.O_RDONLY) if job["stdin"] is None else _file_with(job["stdin"])
        os.dup2(stdin, 0)
        os.closerange(3, max(status_fd, 3))
        os.closerange(max(status_fd + 1, 3), 256)
        megabyte, limit = 1 << 20, resource.setrlimit
        limit(resource.RLIMIT_AS, (job["memory_bytes"], job["memory_bytes"]))
        limit(resource.RLIMIT_CPU, (job["cpu_s"], job["cpu_s"] + 1))
        limit(resource.RLIMIT_FSIZE, (job["scratch_bytes"], job["scratch_bytes"]))
        limit(resource.RLIMIT_NOFILE, (64, 64))
        limit(resource.RLIMIT_CORE, (0, 0))
        limit(resource.RLIMIT_STACK, (8 * megabyte, 8 * megabyte))
        if job["mode"] == "namespaces":
            limit(resource.RLIMIT_NPROC, (job["processes"] + 1, job["processes"] + 1))  # init counts too
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        _filter_calls(is_alone=job["mode"] != "namespaces", may_fork=job.get("may_fork", False))
        os.execve(job["argv"][0], job["argv"], job["environment"])
    except OSError as cause:
        os.write(2, f"sandbox: {cause}\n".encode())
    finally:
        os._exit(126)


def _drop_capabilities() -> None:
    """Leave nothing that an exec could give back, not even to root. Who has no right to this has nothing to drop."""
    for capability in range(64):
        _LIBC.prctl(_CAPBSET_DROP, capability, 0, 0, 0)


def _filter_calls(*, is_alone: bool, may_fork: bool) -> None:
    """Deny system calls for this process and all it starts.

    Args:
        is_alone: whether other processes of the host are in sight: then calls that send signals are denied too.
        may_fork: whether it may start processes beside threads.
    """
    column, architecture = _machine()
    code = [(0x20, 0, 0, 4), (0x15, 1, 0, architecture), (0x06, 0, 0, 0x80000000), (0x20, 0, 0, 0)]
    code += [(0x35, 0, 1, 0x40000000), (0x06, 0, 0, 0x80000000)]  # the x32 numbers of x86_64
    denied = {**_DENIED, **({} if may_fork else _FORKING), **(_SIGNALLING if is_alone else {})}
    for numbers in denied.values():
        if numbers[column] >= 0:
            code += [(0x15, 0, 1, numbers[column]), (0x06, 0, 0, 0x50001)]  # EPERM
    code += [(0x15, 0, 1, _CLONE3[column]), (0x06, 0, 0, 0x50000 | 38)]  # ENOSYS: the C library then uses clone
    # New namespaces by clone are denied; where it may not fork, everything but threads is.
    code += [(0x15, 0, 3 if may_fork else 5, _CLONE[column]), (0x20, 0, 0, 16)]
    if not may_fork:
        code += [(0x45, 1, 0, _CLONE_THREAD), (0x06, 0, 0, 0x50001)]
    code += [(0x45, 0, 1, 0x7E020000), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
    program = b"".join(struct.pack("HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(buffer))
    _check(_LIBC.prctl(_SECCOMP, 2, header, 0, 0), "seccomp")


def _machine() -> tuple[int, int]:
    """Return (column of the tables of system calls, audit number of the architecture)."""
    if platform.machine() not in _MACHINES:
        raise OSError(95, f"no table of system calls for {platform.machine()}")
    return _MACHINES[platform.machine()]


def _file_with(text: str) -> int:
    """Return a descriptor from which the text can be read."""
    descriptor = os.memfd_create("stdin")
    with os.fdopen(os.dup(descriptor), "w", encoding="utf-8") as file:
        file.write(text)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _write_files(files: dict[str, str], folder: str) -> None:
    for name, text in files.items():
        with open(f"{folder}/{name}", "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(f"{folder}/{name}", 0o644)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    _check(_LIBC.mount(*encoded, ctypes.c_ulong(flags), options.encode() or None), "mount", target)


def _prctl(option: int, value: int) -> None:
    _check(_LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def _check(result: int, what: str, path: str = "") -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}", path or None)
    return result


def _tell(status_fd: int, status: dict[str, object]) -> None:
    os.write(status_fd, json.dumps(status).encode() + b"\n")


if __name__ == "__main__":
    main()
