"""The smallest Ceph that serves S3: one monitor, one object store in memory and one gateway, from Debian's packages.

They run as whoever calls, in a folder that is deleted afterwards, on the loopback interface, without authentication
among themselves. Started on its own (`python -m tests.servers.ceph`) it prints its address and stays until Ctrl-C.
"""

import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

from infra.processes import free_port
from tests.servers import debian

PACKAGES = ("radosgw", "ceph-mon", "ceph-osd", "ceph-common")
ACCESS_KEY, SECRET_KEY = "ROLLFLOWTESTKEY", "rollflow-test-secret"
START_S = 180.0
POOL_PGS = 4

CONFIG = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port}/0]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
mon allow pool size one = true
mon allow pool delete = true
mon data avail crit = 1
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = {pgs}
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 4294967296
osd class dir = {lib}/rados-classes
erasure code dir = {lib}/ceph/erasure-code
plugin dir = {lib}/ceph
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
pid file =
crash dir = {folder}
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
rgw dns name =
rgw frontends = beast endpoint=127.0.0.1:{rgw_port} tcp_nodelay=1
rgw rados pool pg num min = {pgs}
rgw enable usage log = false
rgw thread pool size = 64
"""


@contextlib.contextmanager
def running() -> Iterator[str]:
    """Start the three; yield the gateway's endpoint."""
    root = debian.unpack(PACKAGES)
    folder = Path(tempfile.mkdtemp(prefix="rollflow-ceph-"))
    cluster = _Cluster(root, folder)
    try:
        yield cluster.start()
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


class _Cluster:
    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._folder = root, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._fsid, self._mon_port, self._rgw_port = str(uuid.uuid4()), free_port(), free_port()
        for name in ("mon", "osd", "rgw"):
            (folder / name).mkdir()
        library = root / "usr/lib" / debian.MULTIARCH
        text = CONFIG.format(
            fsid=self._fsid,
            mon_port=self._mon_port,
            rgw_port=self._rgw_port,
            lib=library,
            folder=folder,
            pgs=POOL_PGS,
        )
        (folder / "ceph.conf").write_text(text)

    def start(self) -> str:
        """Start all of it and a user for the tests; return the endpoint."""
        monmap = self._folder / "monmap"
        address = f"[v2:127.0.0.1:{self._mon_port}]"
        self._call("monmaptool", "--create", "--addv", "a", address, "--fsid", self._fsid, str(monmap))
        self._call("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(monmap))
        self._launch("ceph-mon", "-i", "a")
        osd = str(uuid.uuid4())
        self._call("ceph", "osd", "create", osd, "0")
        self._call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._launch("ceph-osd", "-i", "0")
        self._until("the object store", lambda: json.loads(self._ceph_status())["osdmap"]["num_up_osds"] == 1)
        keys = ("--access-key", ACCESS_KEY, "--secret", SECRET_KEY)
        self._call("radosgw-admin", "user", "create", "--uid", "tests", "--display-name", "tests", *keys)
        self._launch("radosgw", "-n", "client.rgw")
        endpoint = f"http://127.0.0.1:{self._rgw_port}"
        self._until("the gateway", lambda: _answers(endpoint))
        return endpoint

    def stop(self) -> None:
        """End all of it; nothing of it is worth saving."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    def _ceph_status(self) -> str:
        return self._call("ceph", "status", "--format", "json")

    def _until(self, what: str, is_there) -> None:
        give_up = time.monotonic() + START_S
        while not is_there():
            for process in self._processes:
                if process.poll() is not None:
                    raise RuntimeError(f"{process.args[0]} ended with code {process.returncode}: {self._last_words()}")  # type: ignore[index]
            if time.monotonic() > give_up:
                raise RuntimeError(f"{what} did not start within {START_S:.0f} s: {self._last_words()}")
            time.sleep(0.2)

    def _last_words(self) -> str:
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(line for log in logs for line in log.read_text(errors="replace").splitlines()[-5:])

    def _command(self, program: str, *arguments: str) -> list[str]:
        path = self._root / "usr/bin" / program
        python = ["/usr/bin/python3"] if program == "ceph" else []
        return [*python, str(path), "--conf", str(self._folder / "ceph.conf"), *arguments]

    def _environment(self) -> dict[str, str]:
        environment = debian.environment(self._root)
        environment["PYTHONPATH"] = str(self._root / "usr/lib/python3/dist-packages")
        return environment

    def _launch(self, program: str, *arguments: str) -> None:
        with (self._folder / f"{program}.out").open("wb") as output:
            command = self._command(program, "-f", *arguments)
            process = subprocess.Popen(command, env=self._environment(), stdout=output, stderr=output)
        self._processes.append(process)

    def _call(self, program: str, *arguments: str) -> str:
        command = self._command(program, *arguments)
        done = subprocess.run(command, env=self._environment(), capture_output=True, text=True, timeout=START_S)
        if done.returncode != 0:
            raise RuntimeError(f"{program} {' '.join(arguments)}: {done.stderr.strip()[-1000:]}")
        return done.stdout


def _answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


if __name__ == "__main__":
    with running() as address:
        print(f"{address}  {ACCESS_KEY}  {SECRET_KEY}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)
