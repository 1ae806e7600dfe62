"""The probe accepts stores that keep their promises and refuses those that do not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_contracts.errors import StoreError, StoreUnfit
from infra.probe import probe
from infra.store import open_store

ROOT = Path(__file__).parents[2]


def test_accepts_every_kind_of_store_and_leaves_nothing(store_url: str):
    open_store(store_url).put_new("run.json", b"{}")
    probe(store_url)
    assert open_store(store_url).list() == ["run.json"]


def test_accepts_a_server_that_keeps_the_condition(small_s3):
    server = small_s3()
    server.faults = {"PUT": ["", "503", "", "lost reply"], "GET": ["503"]}
    probe("s3://bucket/run")
    assert server.objects == {}


def test_refuses_a_server_that_ignores_the_condition(small_s3):
    server = small_s3(keeps_condition=False)
    with pytest.raises(StoreUnfit, match="a second create-only put of one name succeeded"):
        probe("s3://bucket/run")
    assert server.objects == {}


def test_refuses_a_server_that_keeps_the_condition_only_without_a_race(small_s3):
    server = small_s3(races=True)
    with pytest.raises(StoreUnfit, match="of two processes that created one name at once 2 won instead of one"):
        probe("s3://bucket/run")
    assert server.objects == {}


@pytest.mark.parametrize("alter", [lambda body: body + b"\r\n0;chunk-signature", lambda body: body[:100]])
def test_refuses_a_server_that_alters_objects(small_s3, alter):
    small_s3(alter=alter)
    with pytest.raises(StoreUnfit, match="what is read back is not what was written"):
        probe("s3://bucket/run")


def test_refuses_a_server_whose_listing_lags(small_s3):
    small_s3(lists=False)
    with pytest.raises(StoreUnfit, match="a listing leaves out"):
        probe("s3://bucket/run")


def test_a_place_that_cannot_be_written_says_so(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="could not be written: not a directory"):
        probe(str(tmp_path / "file"))


def test_the_second_process_loads_nothing_heavy():
    code = (
        "import sys, infra.probe\n"
        "heavy = {'torch', 'prefect', 'mlflow', 'pyarrow', 'pydantic', 'numpy', 'obstore'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("passing", [1, 4])
def test_a_second_process_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passing: int):
    monkeypatch.setenv("ROLLFLOW_CRASH_POINT", f"probe.second:{passing}")
    with pytest.raises(StoreError, match="the second process of the probe failed: it ended or was silent"):
        probe(str(tmp_path))
    assert open_store(str(tmp_path)).list() == []
