"""Objects that prove themselves: named by the hash of their bytes, verified by whoever reads them."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from data_contracts import trajectory
from data_contracts.errors import DigestMismatch, ObjectExists, StoreError
from data_contracts.records import BatchRef, ObjectRef
from infra.store import Store

LARGE_BYTES = 1 << 20
"""From here on a hash takes long enough to be worth a thread of its own."""


def put_object(store: Store, folder: str, suffix: str, body: bytes) -> ObjectRef:
    """Store `body` as <folder>/<sha256><suffix>; putting the same bytes again changes nothing.

    Raises:
        StoreError: other bytes hold this name, so the store has been damaged.
    """
    sha256 = _sha256(body)
    key = f"{folder}/{sha256}{suffix}"
    found = store.put_or_get(key, body)
    if found is not None and found != body:
        raise StoreError(
            f"{store.url}/{key}: holds {len(found)} bytes that are not those of its name;"
            " the store was damaged: delete the object and try again"
        )
    return ObjectRef(key=key, num_bytes=len(body), sha256=sha256)


def put_named(store: Store, key: str, body: bytes) -> ObjectRef:
    """Create `key`. Putting the same bytes again, also after a lost reply, changes nothing.

    Raises:
        ObjectExists: the key holds other bytes.
    """
    if len(body) < LARGE_BYTES:
        _create(store, key, body)
        return ObjectRef(key=key, num_bytes=len(body), sha256=_sha256(body))
    with ThreadPoolExecutor(1) as beside:  # both leave the interpreter to others, so the longer one alone counts
        sha256 = beside.submit(_sha256, body)
        _create(store, key, body)
        return ObjectRef(key=key, num_bytes=len(body), sha256=sha256.result())


def _create(store: Store, key: str, body: bytes) -> None:
    found = store.put_or_get(key, body)
    if found is not None and found != body:
        raise ObjectExists(f"{store.url}/{key}: exists already, with other bytes")


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def get_object(store: Store, ref: ObjectRef) -> bytes:
    """Return the bytes that `ref` names.

    Raises:
        ObjectMissing: there is no object of that key.
        DigestMismatch: its length or SHA-256 is not the one named.
    """
    body = store.get(ref.key)
    if len(body) != ref.num_bytes:
        raise DigestMismatch(f"{store.url}/{ref.key}: expected {ref.num_bytes} bytes, got {len(body)}")
    sha256 = _sha256(body)
    if sha256 != ref.sha256:
        raise DigestMismatch(f"{store.url}/{ref.key}: expected SHA-256 {ref.sha256}, got {sha256}")
    return body


def put_batch(store: Store, table: pa.Table) -> BatchRef:
    """Store `table` as batch/<sha256>.arrow, an Arrow IPC file."""
    ref = put_object(store, "batch", ".arrow", trajectory.encode(table))
    return BatchRef(**ref.model_dump(), num_rows=table.num_rows)


def get_batch(store: Store, ref: BatchRef, stage: trajectory.Stage) -> pa.Table:
    """Return the batch that `ref` names: verified bytes, the named number of rows, the columns of `stage`.

    The rows themselves are not judged here: `trajectory.check` does that.

    Raises:
        ObjectMissing: there is no object of that key.
        DigestMismatch: length, SHA-256 or row count is not the one named.
        SchemaMismatch: it is not a batch of `stage`.
    """
    table = trajectory.decode(get_object(store, ref), name=f"{store.url}/{ref.key}")
    trajectory.check_schema(table.schema, stage)
    if table.num_rows != ref.num_rows:
        raise DigestMismatch(f"{store.url}/{ref.key}: expected {ref.num_rows} rows, got {table.num_rows}")
    return table
