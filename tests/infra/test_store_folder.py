"""What only a folder can do wrong: disks fill up, permissions are missing, processes die half-way."""

import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data_contracts.errors import ObjectMissing, StoreError
from infra.store import open_store

ROOT = Path(__file__).parents[2]


def run_python(code: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, **options)


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_objects_are_plain_files(tmp_path: Path):
    open_store(f"file://{tmp_path}/with%20space").put_new("run/a", b"x")
    assert (tmp_path / "with space/run/a").read_bytes() == b"x"
    assert files_below(tmp_path) == ["with space/run/a"]
    assert open_store(str(tmp_path / "with space")).get("run/a") == b"x"


def test_a_relative_folder_stays_the_same_when_the_process_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    store = open_store("runs")
    monkeypatch.chdir("/")
    store.put_new("a", b"x")
    assert (tmp_path / "runs/a").exists()
    assert store.url == str(tmp_path / "runs")


def test_delete_removes_a_folder_that_it_empties_while_others_put(tmp_path: Path):
    store = open_store(str(tmp_path))

    def come_and_go(name: str) -> None:
        for _ in range(100):
            store.put_new(f"probe/deep/{name}", b"x")
            assert store.get(f"probe/deep/{name}") == b"x"
            store.delete(f"probe/deep/{name}")

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(come_and_go, "abc"))
    assert store.list() == []
    assert not (tmp_path / "probe/deep").exists()


def test_ignores_what_other_programs_hide(tmp_path: Path):
    (tmp_path / ".DS_Store").write_bytes(b"")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/config").write_bytes(b"")
    store = open_store(str(tmp_path))
    store.put_new("a", b"x")
    assert store.list() == ["a"]


PUT = """
import sys
from infra.store import open_store
from data_contracts.errors import StoreError
if len(sys.argv) > 3:
    import os
    import infra.store_folder
    os.setgroups([])
    os.setuid(int(sys.argv[3]))
try:
    open_store(sys.argv[1]).put_new("log/0.json", b"x" * int(sys.argv[2]))
except StoreError as error:
    print(type(error).__name__, error)
"""


def test_a_write_that_fails_half_way_leaves_no_object(tmp_path: Path):
    def limit_files_to_4_kb():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = run_python(PUT, str(tmp_path), "100000", preexec_fn=limit_files_to_4_kb)
    assert done.stdout.startswith(f"StoreError {tmp_path}/log/0.json: could not be written: file too large; raise")
    assert files_below(tmp_path) == []


@pytest.fixture
def tiny_disk(tmp_path: Path):
    """A file system of 64 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_one_sentence_and_no_object(tiny_disk: Path):
    store = open_store(str(tiny_disk))
    store.put_new("log/0.json", b"x" * 10_000)
    with pytest.raises(StoreError, match=r"log/1\.json: could not be written: no space left on device; free space"):
        store.put_new("log/1.json", b"x" * 100_000)
    with pytest.raises(StoreError, match="no space left"):
        store.put("log/0.json", b"y" * 100_000)
    assert files_below(tiny_disk) == ["log/0.json"]
    assert store.get("log/0.json") == b"x" * 10_000
    store.put_new("log/1.json", b"fits")


def test_a_missing_permission_is_one_sentence(tmp_path: Path):
    another_user = ["65534"] if os.getuid() == 0 else []  # root may write anywhere
    tmp_path.chmod(0o555)
    done = run_python(PUT, str(tmp_path), "1", *another_user)
    tmp_path.chmod(0o755)
    assert done.stdout.startswith(f"StoreError {tmp_path}/log/0.json: could not be written: permission denied; give")
    assert files_below(tmp_path) == []


def test_a_file_in_place_of_a_folder_is_one_sentence(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="could not be written: not a directory; choose a path"):
        open_store(str(tmp_path / "file/store")).put_new("a", b"x")


@pytest.mark.parametrize("point", ["store.written", "store.linked"])
def test_a_process_killed_in_a_put_leaves_all_or_nothing(tmp_path: Path, point: str):
    done = run_python(PUT, str(tmp_path), "100000", env={"ROLLFLOW_CRASH_POINT": point})
    assert done.returncode == -signal.SIGKILL
    store = open_store(str(tmp_path))
    if point == "store.written":
        assert store.list() == []
        with pytest.raises(ObjectMissing):
            store.get("log/0.json")
        store.put_new("log/0.json", b"by the next process")
    else:
        assert store.get("log/0.json") == b"x" * 100_000
        assert store.list() == ["log/0.json"]


def test_readers_of_an_object_being_replaced_never_see_a_mixture(tmp_path: Path):
    code = """
import sys
from infra.store import open_store
store = open_store(sys.argv[1])
for n in range(300):
    store.put("role/a.json", bytes([n % 256]) * 20_000)
"""
    store = open_store(str(tmp_path))
    store.put("role/a.json", b"\0" * 20_000)
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    seen = set()
    while writer.poll() is None:
        body = store.get("role/a.json")
        assert len(body) == 20_000
        assert len(set(body)) == 1
        seen.add(body[0])
    assert writer.returncode == 0
    assert len(seen) > 1
