"""Objects in the memory of one process, for unit tests."""

import threading
from collections.abc import Sequence

from data_contracts.errors import ObjectExists, ObjectMissing


class MemoryObjects:
    """A dictionary under a lock."""

    pacing = (0.001, 0.01)
    parallel_reads = 1

    _stores: dict[str, "MemoryObjects"] = {}
    _stores_lock = threading.Lock()

    def __init__(self, name: str) -> None:
        self._name = name
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @classmethod
    def named(cls, name: str) -> "MemoryObjects":
        """Return this process's objects of that name, empty at first."""
        with cls._stores_lock:
            return cls._stores.setdefault(name, cls(name))

    def put_new(self, key: str, body: bytes) -> None:
        """Create `key` or raise ObjectExists."""
        with self._lock:
            if key in self._objects:
                raise ObjectExists(f"memory://{self._name}/{key}: exists already")
            self._objects[key] = bytes(body)

    def put(self, key: str, body: bytes) -> None:
        """Create or replace `key`."""
        with self._lock:
            self._objects[key] = bytes(body)

    def get(self, key: str) -> bytes:
        """Return all bytes of `key`, or raise ObjectMissing."""
        with self._lock:
            if key not in self._objects:
                raise ObjectMissing(f"memory://{self._name}/{key}: no such object")
            return self._objects[key]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the bytes of every key, None for those that do not exist."""
        with self._lock:
            return [self._objects.get(key) for key in keys]

    def exists(self, key: str) -> bool:
        """Tell whether `key` exists."""
        with self._lock:
            return key in self._objects

    def list_folders(self, prefix: str) -> list[str]:
        """Return the names of the folders right below the folder `prefix`."""
        skip = len(prefix) + 1 if prefix else 0
        below = (key[skip:] for key in self.list(prefix))
        return list({key.split("/", 1)[0] for key in below if "/" in key})

    def list(self, prefix: str) -> list[str]:
        """Return all keys below the folder `prefix`."""
        with self._lock:
            return [key for key in self._objects if not prefix or key.startswith(f"{prefix}/")]

    def delete(self, key: str) -> None:
        """Remove `key` if it exists."""
        with self._lock:
            self._objects.pop(key, None)
