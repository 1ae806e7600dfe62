"""What every store promises, on every kind of store."""

import threading

import pytest

from data_contracts.errors import ConfigError, ObjectExists, ObjectMissing, StoreError
from infra.store import Store, open_store


def test_reads_back_what_was_put(store: Store):
    for key, body in {"a": b"x", "run/log/0.json": b"{}", "empty": b"", "big": bytes(range(256)) * 5000}.items():
        store.put_new(key, body)
        assert store.get(key) == body
        assert store.exists(key)


def test_a_second_create_of_a_key_loses_and_changes_nothing(store: Store):
    store.put_new("log/0.json", b"first")
    with pytest.raises(ObjectExists, match=r"log/0\.json: exists already"):
        store.put_new("log/0.json", b"second")
    assert store.get("log/0.json") == b"first"


def test_of_many_threads_that_create_one_key_one_wins(store: Store):
    for round_ in range(5):
        barrier = threading.Barrier(6)
        winners = []

        def create(body: bytes, key=f"race/{round_}", barrier=barrier, winners=winners):
            barrier.wait()
            try:
                store.put_new(key, body)
                winners.append(body)
            except ObjectExists:
                pass

        threads = [threading.Thread(target=create, args=(bytes([n]) * 1000,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1
        assert store.get(f"race/{round_}") == winners[0]


def test_put_or_get_tells_who_holds_the_key(store: Store):
    assert store.put_or_get("k", b"first") is None
    assert store.put_or_get("k", b"second") == b"first"


def test_put_replaces(store: Store):
    store.put("role/train.json", b"1")
    store.put("role/train.json", b"22")
    assert store.get("role/train.json") == b"22"
    assert store.list() == ["role/train.json"]


def test_what_is_missing_says_so(store: Store):
    assert not store.exists("nothing/here")
    with pytest.raises(ObjectMissing, match="nothing/here: no such object"):
        store.get("nothing/here")
    store.put_new("nothing", b"now a plain object")
    assert not store.exists("nothing/here")
    assert store.list("nowhere") == []


def test_a_folder_of_objects_is_no_object(store: Store):
    store.put_new("log/claim/0.json", b"x")
    assert not store.exists("log/claim")


def test_get_many_keeps_order_and_gaps(store: Store):
    for n in range(40):
        store.put_new(f"n/{n}", str(n).encode())
    keys = [f"n/{n}" for n in range(45, -1, -1)]
    assert store.get_many(keys) == [None] * 6 + [str(n).encode() for n in range(39, -1, -1)]


def test_lists_by_folder_sorted(store: Store):
    for key in ("role2/x", "role/b", "role/a/deep", "role-c", "a"):
        store.put_new(key, b"")
    assert store.list("role") == ["role/a/deep", "role/b"]
    assert store.list() == ["a", "role-c", "role/a/deep", "role/b", "role2/x"]


def test_lists_the_folders_right_below(store: Store):
    assert store.list_folders() == []
    for key in ("run-b/log/0", "run-a/run.json", "run-a/log/claim/0", "file"):
        store.put_new(key, b"")
    assert store.list_folders() == ["run-a", "run-b"]
    assert store.at("run-a").list_folders() == ["log"]
    assert store.at("nothing").list_folders() == []


def test_delete_removes_and_may_be_repeated(store: Store):
    store.put_new("probe", b"x")
    store.delete("probe")
    store.delete("probe")
    assert not store.exists("probe")
    assert store.list() == []


def test_a_view_sees_only_what_lies_below(store: Store):
    run = store.at("runs/one")
    run.put_new("log/0.json", b"x")
    assert store.list() == ["runs/one/log/0.json"]
    assert run.list() == ["log/0.json"]
    assert run.list("log") == ["log/0.json"]
    assert store.at("runs").at("one").get("log/0.json") == b"x"
    assert store.at("runs/on").list() == []


def test_its_url_opens_the_same_view(store: Store):
    run = store.at("runs/one")
    run.put_new("k", b"x")
    again = open_store(run.url)
    assert again.get("k") == b"x"
    assert again.url == run.url


BAD_KEYS = [
    "",
    "/etc/passwd",
    "..",
    "a/../b",
    "a//b",
    "a/",
    "./a",
    ".hidden",
    "a/.tmp-1",
    "a\\b",
    "a\nb",
    "a\n",
    "ü",
    "a b",
]


@pytest.mark.parametrize("key", [*BAD_KEYS, "x" * 201])
def test_refuses_keys_that_are_no_plain_relative_paths(store: Store, key: str):
    for use in (store.get, store.exists, store.delete, store.at, lambda key: store.put_new(key, b"x")):
        with pytest.raises(StoreError, match="is not a plain relative path"):
            use(key)


@pytest.mark.parametrize("url", ["", "gs://bucket/x", "s3://", "s3:///x", "s3://b//x", "s3://b/../x", "memory://"])
def test_refuses_urls_that_it_does_not_know(url: str):
    with pytest.raises(ConfigError, match=r"store.*expected"):
        open_store(url)


def test_does_not_repeat_a_secret_in_a_url():
    with pytest.raises(ConfigError) as refused:
        open_store("s3://user:hunter2@bucket/x")
    assert "hunter2" not in str(refused.value)
