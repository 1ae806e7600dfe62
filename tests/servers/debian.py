"""Programs out of Debian packages, unpacked into a folder and installed nowhere. Needs apt and no privileges.

What the machine has installed already is used as it is; what is missing is downloaded once, with all that it needs.
"""

import hashlib
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rollflow" / "debian"
MULTIARCH = "x86_64-linux-gnu"
WITHOUT_LOCK = ("-o", "Debug::NoLocking=1")


def unpack(packages: Sequence[str]) -> Path:
    """Return a folder that looks like / after the packages were installed, made when it is missing.

    Raises:
        RuntimeError: apt does not know or cannot fetch one of them.
    """
    missing = _missing(packages)
    name = hashlib.sha256("\n".join([*sorted(packages), *missing]).encode()).hexdigest()[:12]
    folder = CACHE / f"{packages[0]}-{name}"
    if not (folder / ".complete").exists():
        archives = folder / "archives"
        archives.mkdir(parents=True, exist_ok=True)
        _run(["apt-get", *WITHOUT_LOCK, "-o", "APT::Sandbox::User=", "download", *missing], cwd=archives)
        for archive in sorted(archives.glob("*.deb")):
            _run(["dpkg", "-x", str(archive), str(folder)])
            archive.unlink()
        (folder / ".complete").touch()
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Return the variables with which its programs find their libraries."""
    libraries = [folder / base / MULTIARCH for base in ("usr/lib", "lib")]
    libraries += [folder / "usr/lib" / MULTIARCH / "ceph", folder / "usr/lib", folder / "lib"]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(str(path) for path in libraries if path.is_dir())}


def _missing(packages: Sequence[str]) -> list[str]:
    plan = _run(["apt-get", *WITHOUT_LOCK, "--simulate", "--no-install-recommends", "install", *packages])
    return sorted(set(re.findall(r"^Inst (\S+)", plan, re.MULTILINE)))


def _run(command: list[str], cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:6])} ...: {done.stderr.strip()[-500:]} (run apt-get update first)")
    return done.stdout
