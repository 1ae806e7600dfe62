"""Object storage over a network that fails: what is asked for happens once, in a budget, or one sentence says why."""

import threading
from collections.abc import Iterator

import pytest

from data_contracts.errors import ObjectExists, StoreError
from data_contracts.records import Control
from infra.log import Log
from infra.store import Store, open_store
from tests.servers import faulty_proxy
from tests.servers.faulty_proxy import Proxy

MIXTURE = {
    "slowdown": 0.08,
    "error": 0.05,
    "throttle": 0.05,
    "conflict": 0.06,
    "reset": 0.05,
    "hang": 0.02,
    "lost": 0.08,
    "torn": 0.05,
}


@pytest.fixture(scope="session")
def _proxy(s3_server) -> Iterator[Proxy]:
    with faulty_proxy.running(s3_server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxy(_proxy: Proxy, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """A proxy without faults at first, which the AWS variables point to."""
    _proxy.set()
    monkeypatch.setenv("AWS_ENDPOINT_URL", _proxy.endpoint)
    return _proxy


def open_through(proxy: Proxy, url: str, *, retry_s: float = 30.0) -> Store:
    return open_store(url, retry_s=retry_s, timeout_s=0.6)


def test_every_operation_holds_while_requests_fail_in_every_way(proxy: Proxy, s3_url: str) -> None:
    proxy.set(seed=1, hang_s=1.0, **MIXTURE)
    store = open_through(proxy, s3_url)
    bodies = {f"folder/{n}": bytes([n]) * (1000 + 5000 * n) for n in range(25)}
    for key, body in bodies.items():
        assert store.put_or_get(key, body) in (None, body), "taken by nobody but this very put"
        with pytest.raises(ObjectExists):
            store.put_new(key, b"another")
    store.put("beat", b"1")
    store.put("beat", b"2")
    assert store.get_many([*bodies, "none"]) == [*bodies.values(), None]
    assert store.list() == sorted([*bodies, "beat"])
    assert store.list_folders() == ["folder"]
    store.delete("folder/0")
    assert not store.exists("folder/0")
    counts = proxy.counts()
    assert {fault for fault in MIXTURE if counts.get(fault)} == set(MIXTURE), counts


def test_writers_of_one_log_append_each_record_once_while_replies_are_lost(proxy: Proxy, s3_url: str) -> None:
    proxy.set(seed=2, slowdown=0.1, conflict=0.1, lost=0.2, reset=0.1)

    def write(writer: str) -> None:
        log, number = Log(open_through(proxy, s3_url), "log/control", Control), 0
        for n in range(8):
            record = Control(writer=writer, kind="amend", detail={"n": n})
            while log.append(number, record) is not None:
                number += 1
            number += 1

    threads = [threading.Thread(target=write, args=(f"w{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    proxy.set()
    records = Log(open_through(proxy, s3_url), "log/control", Control).read_from(0)
    assert sorted((record.writer, record.detail["n"]) for record in records) == [
        (f"w{i}", n) for i in range(4) for n in range(8)
    ]
    for i in range(4):
        assert [record.detail["n"] for record in records if record.writer == f"w{i}"] == list(range(8))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("slowdown", r"503 Service Unavailable \(SlowDown\)"),
        ("error", r"500 Internal Server Error \(InternalError\)"),
        ("throttle", r"429 Too Many Requests \(TooManyRequests\)"),
        ("reset", "no reply"),
        ("hang", "no reply"),
        ("torn", "no reply"),
    ],
)
def test_when_the_budget_is_spent_one_sentence_says_what_happened(
    fault: str, said: str, proxy: Proxy, s3_url: str
) -> None:
    open_through(proxy, s3_url).put_new("there", b"x" * 1000)
    proxy.set(**{fault: 1.0})
    store = open_through(proxy, s3_url, retry_s=1.0)
    with pytest.raises(
        StoreError, match=rf"there: could not be read: {said}, tried (?!0|1 )\d+ times in [\d.]+ s; check"
    ) as told:
        store.get("there")
    assert "\n" not in str(told.value)
    assert proxy.counts()[fault] >= 2


def test_pauses_grow_so_that_a_throttling_server_is_left_alone(proxy: Proxy, s3_url: str) -> None:
    proxy.set(slowdown=1.0)
    with pytest.raises(StoreError):
        open_through(proxy, s3_url, retry_s=3.0).get("a")
    assert 4 <= proxy.counts()["slowdown"] <= 9, "0.05 s, 0.1 s, 0.2 s, ...: each pause at least half of that"


def test_the_budget_is_set_by_the_environment(proxy: Proxy, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_STORE_RETRY_S", "0.4")
    proxy.set(throttle=1.0)
    with pytest.raises(StoreError, match=r"tried \d times in 0\.\d s"):
        open_store(s3_url).get("a")


def test_a_conflict_over_a_plain_put_is_tried_again(small_s3) -> None:
    server = small_s3()
    server.faults["PUT"] = ["409", "409"]
    open_store("s3://bucket").put("beat", b"1")
    assert server.objects == {"/bucket/beat": b"1"}
