"""Logs: nobody doubles, skips or half reads a record."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from data_contracts.errors import ProtocolError, StoreError
from data_contracts.records import Control, Evaluation
from infra.log import GROWTH, Log, Pacer
from infra.store import Store, open_store

ROOT = Path(__file__).parents[2]


def control(writer: str = "me", **fields) -> Control:
    return Control(writer=writer, kind="start", **fields)


@pytest.fixture
def log(store: Store) -> Log[Control]:
    return Log(store, "log/control", Control)


def fill(log: Log[Control], num_records: int) -> list[Control]:
    records = [control(detail={"n": n}) for n in range(num_records)]
    for number, record in enumerate(records):
        assert log.append(number, record) is None
    return records


def test_an_empty_log_has_no_records(log: Log[Control]):
    assert log.tail() == 0
    assert log.last() is None
    assert log.read(0) is None
    assert log.read_from(0) == []


def test_reads_back_what_was_appended(store: Store, log: Log[Control]):
    records = fill(log, 3)
    assert store.list() == [f"log/control/{n:010d}.json" for n in range(3)]
    assert log.read_from(0) == records
    assert [log.read(n) for n in range(4)] == [*records, None]
    assert log.last() == records[-1]


def test_the_loser_gets_the_winners_record(store: Store, log: Log[Control]):
    winner = control("winner")
    assert log.append(0, winner) is None
    other = Log(store, "log/control", Control)
    assert other.append(0, control("loser")) == winner
    assert other.append(1, control("loser")) is None


def test_appending_ones_own_record_again_has_won(log: Log[Control]):
    record = control()
    assert log.append(0, record) is None
    assert log.append(0, record) is None
    assert log.tail() == 1


def test_the_same_writer_with_another_nonce_has_lost(log: Log[Control]):
    first = control()
    log.append(0, first)
    assert log.append(0, control()) == first


def test_refuses_to_make_a_gap(store: Store, log: Log[Control]):
    with pytest.raises(ProtocolError, match="log/control: record 1 must not be appended before record 0 exists"):
        log.append(1, control())
    assert store.list() == []
    fill(log, 2)
    with pytest.raises(ProtocolError, match="record 7 must not"):
        Log(store, "log/control", Control).append(7, control())
    with pytest.raises(ProtocolError, match="expected a record number from 0"):
        log.append(-1, control())


@pytest.mark.parametrize("num_records", [*range(9), 15, 16, 17, 33])
def test_finds_the_tail(store: Store, log: Log[Control], num_records: int):
    fill(log, num_records)
    fresh = Log(store, "log/control", Control)
    assert fresh.tail() == num_records
    fresh.append(num_records, control())
    assert fresh.tail() == num_records + 1
    assert log.tail() == num_records + 1


def test_follows_what_others_append(store: Store, log: Log[Control]):
    reader = Log(store, "log/control", Control)
    records = []
    for batch in (1, 5, 0, 40):
        new = [control(detail={"batch": batch, "n": n}) for n in range(batch)]
        for record in new:
            log.append(log.tail(), record)
        assert reader.read_from(len(records)) == new
        records += new
    assert reader.read_from(3, limit=20) == records[3:23]
    assert reader.read_from(40, limit=100) == records[40:]
    assert reader.read_from(0, limit=0) == []
    assert Log(store, "log/control", Control).read_from(0) == records


class CountingFolder:
    """A real store that counts its look-ups."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.num_lookups = 0

    def exists(self, key: str) -> bool:
        self.num_lookups += 1
        return self.store.exists(key)

    def __getattr__(self, name: str):
        return getattr(self.store, name)


def test_looks_up_a_logarithm_of_names_for_the_tail(tmp_path: Path):
    (tmp_path / "log").mkdir()
    for n in range(3000):
        (tmp_path / f"log/{n:010d}.json").touch()
    counting = CountingFolder(open_store(str(tmp_path)))
    log = Log(counting, "log", Control)  # type: ignore[arg-type]
    assert log.tail() == 3000
    assert counting.num_lookups <= 24
    counting.num_lookups = 0
    assert log.tail() == 3000
    assert counting.num_lookups == 1


BROKEN = {
    "torn": b'{"writer": "me", "no',
    "empty": b"",
    "other kind": Evaluation(writer="me", version=1, digest="d", metrics={}).model_dump_json().encode(),
    "no json": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
def test_what_is_no_record_of_this_kind_is_named_and_refused(store: Store, log: Log[Control], body: bytes):
    fill(log, 1)
    store.put_new("log/control/0000000001.json", body)
    expected = rf"log/control/0000000001\.json: expected a Control record, got {len(body)} bytes"
    with pytest.raises(StoreError, match=expected):
        log.read(1)
    with pytest.raises(StoreError, match=expected):
        log.read_from(0)
    with pytest.raises(StoreError, match=expected):
        log.append(1, control())


def test_a_record_with_a_field_from_another_version_is_refused(store: Store, log: Log[Control]):
    body = {**json.loads(control().model_dump_json()), "from_the_future": 1}
    store.put_new("log/control/0000000000.json", json.dumps(body).encode())
    with pytest.raises(StoreError, match="from_the_future: Extra inputs are not permitted"):
        log.read(0)


def test_after_a_lost_reply_its_own_nonce_tells_that_it_won(small_s3):
    server = small_s3()
    log = Log(open_store("s3://bucket/run"), "log/commit", Control)
    server.faults["PUT"] = ["lost reply"]
    record = control()
    assert log.append(0, record) is None
    assert server.requests["PUT"] == 2
    assert log.read_from(0) == [record]


def test_with_every_fault_at_once_each_record_lands_once_and_in_order(small_s3):
    server = small_s3()
    log = Log(open_store("s3://bucket/run"), "log/raw/me", Control)
    server.faults["PUT"] = ["503", "lost reply", "", "409", "no reply", "lost reply", "503", "503", "lost reply", "409"]
    server.faults["GET"] = ["503", "no reply", "lost reply"]
    records = fill(log, 6)
    assert server.faults["PUT"] == []
    assert log.read_from(0) == records
    assert len(server.objects) == 6


def test_a_lost_reply_and_a_rival_leave_one_winner(small_s3):
    """The put did not happen, a rival took the number, and the repeated put must see that."""
    server = small_s3()
    store = open_store("s3://bucket/run")
    rival = control("rival")
    Log(store, "log/commit", Control).append(0, rival)
    server.faults["PUT"] = ["no reply"]
    assert Log(store, "log/commit", Control).append(0, control("me")) == rival


APPENDER = """
import sys
from data_contracts.records import Control
from infra.log import Log
from infra.store import open_store
url, writer, wanted = sys.argv[1], sys.argv[2], int(sys.argv[3])
log = Log(open_store(url), "log/claim", Control)
print("ready", flush=True)
sys.stdin.readline()
done = number = 0
while done < wanted:
    record = Control(writer=writer, kind="start", detail={"k": done})
    if log.append(number, record) is None:
        done += 1
    number += 1
"""


def test_processes_that_append_at_once_lose_and_double_nothing(store_url: str):
    if store_url.startswith("memory://"):
        pytest.skip("memory belongs to one process")
    num_writers, num_each = 3, 15
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", APPENDER, store_url, f"w{n}", str(num_each)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for n in range(num_writers)
    ]
    for writer in writers:
        assert writer.stdout and writer.stdout.readline() == b"ready\n"
    for writer in writers:
        assert writer.stdin
        writer.stdin.write(b"go\n")
        writer.stdin.close()
    assert [writer.wait(60) for writer in writers] == [0] * num_writers
    log = Log(open_store(store_url), "log/claim", Control)
    records = log.read_from(0)
    assert len(records) == log.tail() == num_writers * num_each
    for n in range(num_writers):
        assert [r.detail["k"] for r in records if r.writer == f"w{n}"] == list(range(num_each))


def test_pacing_lengthens_without_progress_and_shortens_with_it():
    pacer = Pacer(0.001, 0.001 * GROWTH**6.5)  # seven times GROWTH would be beyond the longest
    intervals = []
    for _ in range(9):
        intervals.append(pacer.interval_s)
        assert pacer.wait() is False
    assert intervals[:3] == pytest.approx([0.001, 0.001 * GROWTH, 0.001 * GROWTH**2])
    assert intervals == sorted(intervals)
    assert intervals[-1] == 0.001 * GROWTH**6.5
    pacer.reset()
    assert pacer.interval_s == 0.001


def test_a_stop_ends_a_wait_at_once():
    stop = threading.Event()
    pacer = Pacer(3600.0, 3600.0)
    threading.Timer(0.05, stop.set).start()
    assert pacer.wait(stop) is True
    assert pacer.wait(stop) is True


def test_waits_at_least_as_long_as_it_says():
    pacer = Pacer(0.02, 0.02)
    started = time.monotonic()
    pacer.wait()
    pacer.wait(threading.Event())
    assert time.monotonic() - started >= 0.035  # a lower bound holds under any load


def test_a_log_is_paced_by_its_store(store: Store, log: Log[Control]):
    pacer = log.pacer()
    assert pacer.interval_s == store.pacing[0] < store.pacing[1]
