"""One store for a run's objects: a folder, `s3://` or, for unit tests, memory.

Rollouts and training meet only here, so everything above relies on three promises:

- `put_new` is create-only: of any number of processes that put one key at once, exactly one wins, and
  every other gets `ObjectExists`;
- what it has returned for is durable, and whoever can see an object sees all of it;
- a listing or a read that starts after a put has returned sees that put.

`infra.probe` checks them at the start of a run. What is not here: numbering (`infra.log`) and digests
(`infra.objects`).
"""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from data_contracts.errors import ConfigError, ObjectExists, ObjectMissing, StoreError
from infra import settings

SEGMENT = r"[A-Za-z0-9_=+@~-][A-Za-z0-9_=+@~.-]{0,199}"
KEY = re.compile(rf"{SEGMENT}(?:/{SEGMENT})*")
"""Plain relative paths: no empty, hidden or parent segment, nothing that a server would have to escape."""

SETTLE_S = 10.0
"""How long an object may stay unreadable after a create-only put of it lost."""


class Backend(Protocol):
    """What a kind of storage must do. Keys are valid and relative to its root."""

    pacing: tuple[float, float]
    """Shortest and longest sensible interval, in seconds, between two looks for something new."""

    parallel_reads: int
    """How many reads at once are worth it."""

    def put_new(self, key: str, body: bytes) -> None:
        """Create `key`, durably and whole, or raise ObjectExists."""
        ...

    def put(self, key: str, body: bytes) -> None:
        """Create or replace `key`; readers see the old or the new bytes, never a mixture."""
        ...

    def get(self, key: str) -> bytes:
        """Return all bytes of `key`, or raise ObjectMissing."""
        ...

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the bytes of every key, None for those that do not exist."""
        ...

    def exists(self, key: str) -> bool:
        """Tell whether `key` exists."""
        ...

    def list_folders(self, prefix: str) -> list[str]:
        """Return the names of the folders right below the folder `prefix`, without listing what is in them."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Return all keys below the folder `prefix` ("" is the root), in any order."""
        ...

    def delete(self, key: str) -> None:
        """Remove `key`; nothing happens if it does not exist."""
        ...


class Store:
    """A view of a store below a prefix. Safe to use from several threads.

    Every method raises StoreError, in one sentence, when storage is full, forbidden or out of reach.
    """

    def __init__(self, backend: Backend, root_url: str, prefix: str = "") -> None:
        self._backend = backend
        self._root_url = root_url
        self._prefix = prefix

    @property
    def url(self) -> str:
        """Where this view begins; `open_store` of it gives the same view."""
        return f"{self._root_url.rstrip('/')}/{self._prefix}" if self._prefix else self._root_url

    @property
    def pacing(self) -> tuple[float, float]:
        """Shortest and longest sensible interval, in seconds, between two looks for something new."""
        return self._backend.pacing

    @property
    def parallel_reads(self) -> int:
        """How many reads at once are worth it: 1 on a folder, more where a read waits for a network."""
        return self._backend.parallel_reads

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def at(self, prefix: str) -> "Store":
        """Return the view below `prefix`, a run for example."""
        return Store(self._backend, self._root_url, self._full(prefix))

    def put_new(self, key: str, body: bytes) -> None:
        """Create `key`; it is durable when this returns.

        Raises:
            ObjectExists: the key is taken. After a lost reply it may have been taken by this very call:
                whoever needs to know compares what is there (`put_or_get`).
        """
        self._backend.put_new(self._full(key), body)

    def put_or_get(self, key: str, body: bytes) -> bytes | None:
        """Create `key` and return None, or return the bytes that hold the key already.

        The bytes may be those of an earlier try of this call whose reply was lost: compare them.
        """
        give_up = time.monotonic() + SETTLE_S
        while True:
            try:
                self.put_new(key, body)
                return None
            except ObjectExists:
                try:
                    return self.get(key)
                except ObjectMissing:
                    # A server that answers 409 while two puts race may have stored neither yet.
                    if time.monotonic() > give_up:
                        raise StoreError(
                            f"{self.url}/{key}: refused as existing and yet not readable for {SETTLE_S:.0f} s;"
                            " check the server, and that nothing deletes objects of a live run"
                        ) from None
            time.sleep(self.pacing[0])

    def put(self, key: str, body: bytes) -> None:
        """Create or replace `key`. For heartbeats only: everything else is created once."""
        self._backend.put(self._full(key), body)

    def get(self, key: str) -> bytes:
        """Return the object's bytes.

        Raises:
            ObjectMissing: there is no such object.
        """
        return self._backend.get(self._full(key))

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the bytes of every key, None for those that do not exist; concurrently where it helps."""
        return self._backend.get_many([self._full(key) for key in keys])

    def exists(self, key: str) -> bool:
        """Tell whether the object exists."""
        return self._backend.exists(self._full(key))

    def list_folders(self) -> list[str]:
        """Return the names of the folders right below this view, sorted. What is in them is not listed."""
        return sorted(self._backend.list_folders(self._prefix))

    def list(self, prefix: str = "") -> list[str]:
        """Return the keys of all objects below the folder `prefix` (all by default), sorted."""
        full = self._full(prefix) if prefix else self._prefix
        skip = len(self._prefix) + 1 if self._prefix else 0
        return sorted(key[skip:] for key in self._backend.list(full))

    def delete(self, key: str) -> None:
        """Remove the object; nothing happens if it does not exist."""
        self._backend.delete(self._full(key))

    def _full(self, key: str) -> str:
        if not KEY.fullmatch(key):
            raise StoreError(
                f"{self.url}: key {key!r} is not a plain relative path;"
                " use letters, digits and _=+@~.- in parts that do not begin with a dot"
            )
        return f"{self._prefix}/{key}" if self._prefix else key


def open_store(url: str, *, retry_s: float | None = None, timeout_s: float | None = None) -> Store:
    """Open the store at `url`; a folder is created by the first put.

    Args:
        url: a folder's path, "file:///path", "s3://bucket/prefix", or "memory://name" (shared by all that
            open the name in this process; for tests).
        retry_s: S3 only: how long a request is tried again after throttling, server errors and timeouts; None takes
            ROLLFLOW_STORE_RETRY_S, or 60.
        timeout_s: S3 only: how long one request for up to 16 MB may take; None takes ROLLFLOW_STORE_TIMEOUT_S, or 30.

    Raises:
        ConfigError: the URL is of no kind known here, or one of these is no positive number.
    """
    scheme, separator, rest = url.partition("://")
    if not url or (separator and not rest):
        raise ConfigError(f"store {url!r}: expected a folder, file://, s3://bucket/prefix or memory://name")
    if not separator:
        return _open_folder(Path(url).expanduser())
    if scheme == "file":
        return _open_folder(Path(unquote(urlsplit(url).path)))
    root, _, prefix = rest.rstrip("/").partition("/")
    if not KEY.fullmatch(f"{root}/{prefix}" if prefix else root):
        # The URL is not repeated here: what stands before an @ in one is often a secret.
        raise ConfigError(f"store: expected {scheme}://name/prefix of letters, digits and _=+~.-, got something else")
    if scheme == "memory":
        from infra.store_memory import MemoryObjects

        return Store(MemoryObjects.named(root), f"memory://{root}", prefix)
    if scheme == "s3":
        from infra.store_s3 import S3Objects  # here, so that a folder needs no object-store client

        retry_s = settings.seconds("ROLLFLOW_STORE_RETRY_S") if retry_s is None else retry_s
        timeout_s = settings.seconds("ROLLFLOW_STORE_TIMEOUT_S") if timeout_s is None else timeout_s
        return Store(S3Objects(root, retry_s=retry_s, timeout_s=timeout_s), f"s3://{root}", prefix)
    raise ConfigError(f"store {scheme}://{root}: expected a folder, file://, s3:// or memory://, got {scheme}://")


def _open_folder(path: Path) -> Store:
    from infra.store_folder import FolderObjects

    root = str(path.absolute())
    return Store(FolderObjects(root), root)
