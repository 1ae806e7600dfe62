"""Objects prove that they are what was named."""

import hashlib

import pyarrow as pa
import pytest

from data_contracts import trajectory
from data_contracts.errors import DigestMismatch, ObjectExists, ObjectMissing, SchemaMismatch, StoreError
from data_contracts.records import BatchRef, ObjectRef
from infra.objects import get_batch, get_object, put_batch, put_named, put_object
from infra.store import Store, open_store

SHA256_OF_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1


def make_batch(num_rows: int = 3) -> pa.Table:
    row = {
        "ticket": 0, "attempt": 0, "prompt_id": "sum/1", "env": "sum", "seed": 7,
        "prompt_ids": [1, 2], "response_ids": [3, 4, 5], "action_mask": [True, False, True],
        "behavior_logprobs": [-0.5, float("nan"), -1.25], "policy_versions": [4, -1, 5],
        "used_versions": [4, 5], "used_digests": ["d4", "d5"], "finish_reason": "stop", "error": "",
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 8, "engine": "cpu", "dtype": "float32",
        "queued_at": 1.0, "started_at": 2.0, "finished_at": 3.0,
    }  # fmt: skip
    table = trajectory.make_table([{**row, "sample": n} for n in range(num_rows)], "raw")
    return trajectory.check(table, "raw")


def test_an_object_is_named_by_its_hash(store: Store):
    ref = put_object(store, "curriculum", ".json", b"abc")
    assert ref == ObjectRef(key=f"curriculum/{SHA256_OF_ABC}.json", num_bytes=3, sha256=SHA256_OF_ABC)
    assert get_object(store, ref) == b"abc"


def test_putting_the_same_bytes_again_changes_nothing(store: Store):
    assert put_object(store, "batch", ".x", b"abc") == put_object(store, "batch", ".x", b"abc")
    assert len(store.list()) == 1
    assert put_named(store, "policy/1-me/model", b"abc") == put_named(store, "policy/1-me/model", b"abc")


def test_other_bytes_under_a_given_name_are_refused(store: Store):
    put_named(store, "run.json", b"abc")
    with pytest.raises(ObjectExists, match=r"run\.json: exists already, with other bytes"):
        put_named(store, "run.json", b"abd")
    assert store.get("run.json") == b"abc"


def test_a_damaged_object_under_its_hash_is_reported_to_who_puts_it(store: Store):
    store.put_new(f"batch/{SHA256_OF_ABC}.x", b"damaged")
    with pytest.raises(StoreError, match="holds 7 bytes that are not those of its name"):
        put_object(store, "batch", ".x", b"abc")


def test_after_a_lost_reply_a_put_knows_its_own_bytes(small_s3):
    server = small_s3()
    store = open_store("s3://bucket/run")
    server.faults["PUT"] = ["lost reply", "", "503", "lost reply"]
    assert get_object(store, put_object(store, "batch", ".x", b"abc")) == b"abc"
    assert get_object(store, put_named(store, "policy/0-me/model", b"weights")) == b"weights"
    assert server.requests["PUT"] == 5
    server.faults["PUT"] = ["lost reply"]
    with pytest.raises(ObjectExists, match="with other bytes"):
        put_named(store, "policy/0-me/model", b"other weights")


def test_a_missing_object_is_missing(store: Store):
    with pytest.raises(ObjectMissing, match="gone"):
        get_object(store, ObjectRef(key="gone", num_bytes=3, sha256=SHA256_OF_ABC))


def test_a_torn_or_altered_object_is_refused(store: Store):
    store.put_new("torn", b"ab")
    with pytest.raises(DigestMismatch, match="torn: expected 3 bytes, got 2"):
        get_object(store, ObjectRef(key="torn", num_bytes=3, sha256=SHA256_OF_ABC))
    store.put_new("altered", b"abd")
    with pytest.raises(DigestMismatch, match=f"altered: expected SHA-256 {SHA256_OF_ABC}, got"):
        get_object(store, ObjectRef(key="altered", num_bytes=3, sha256=SHA256_OF_ABC))


def test_a_batch_comes_back_as_it_was(store: Store):
    table = make_batch()
    ref = put_batch(store, table)
    body = store.get(ref.key)
    assert ref.key == f"batch/{hashlib.sha256(body).hexdigest()}.arrow"
    assert (ref.num_rows, ref.num_bytes) == (3, len(body))
    found = get_batch(store, ref, "raw")
    assert found.schema.equals(table.schema, check_metadata=True)
    assert trajectory.encode(found) == trajectory.encode(table)
    assert put_batch(store, found) == ref


def test_a_batch_of_another_length_or_stage_is_refused(store: Store):
    ref = put_batch(store, make_batch())
    with pytest.raises(DigestMismatch, match="expected 4 rows, got 3"):
        get_batch(store, ref.model_copy(update={"num_rows": 4}), "raw")
    with pytest.raises(SchemaMismatch, match="expected contract trajectory/scored"):
        get_batch(store, ref, "scored")


def test_bytes_that_are_no_batch_are_refused(store: Store):
    body = trajectory.encode(make_batch())[:-20]
    ref = BatchRef(**put_object(store, "batch", ".arrow", body).model_dump(), num_rows=3)
    with pytest.raises(SchemaMismatch, match="expected a complete Arrow IPC file"):
        get_batch(store, ref, "raw")
