"""Objects as files of a folder.

A put writes a hidden file beside its target, syncs it, and links it to the target's name: the link either
creates the name with the whole content or fails because the name is taken, in one step of the file system.
Then the folder is synced. A process killed in between leaves at most a hidden file, which nobody reads.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence

from data_contracts.errors import ObjectExists, ObjectMissing, StoreError
from infra import crash

TMP = ".tmp-"
ABSENT = (FileNotFoundError, NotADirectoryError)

REMEDIES = {
    errno.ENOSPC: "free space on this disk or choose another folder",
    errno.EDQUOT: "free space within the quota or choose another folder",
    errno.EFBIG: "raise the limit on file sizes or choose another folder",
    errno.EACCES: "give this user permission or choose another folder",
    errno.EPERM: "give this user permission or choose another folder",
    errno.EROFS: "choose a folder that can be written",
    errno.ENOTDIR: "choose a path whose parents are all folders",
    errno.EMFILE: "raise the limit on open files",
}


class FolderObjects:
    """The files below `root`."""

    pacing = (0.002, 0.05)
    parallel_reads = 1

    def __init__(self, root: str) -> None:
        self._root = root

    def put_new(self, key: str, body: bytes) -> None:
        """Create `key`, durably and whole, or raise ObjectExists."""
        path = self._path(key)
        with _explained("written", path):
            if os.path.lexists(path):  # spares a loser the writing
                raise ObjectExists(f"{path}: exists already")
            with _written(path, body) as tmp:
                crash.point("store.written")
                try:
                    os.link(tmp, path)
                except FileExistsError:
                    raise ObjectExists(f"{path}: exists already") from None
                crash.point("store.linked")
            _sync_folder(os.path.dirname(path))

    def put(self, key: str, body: bytes) -> None:
        """Create or replace `key`; readers see the old or the new bytes, never a mixture."""
        path = self._path(key)
        with _explained("written", path), _written(path, body) as tmp:
            os.replace(tmp, path)

    def get(self, key: str) -> bytes:
        """Return all bytes of `key`, or raise ObjectMissing."""
        path = self._path(key)
        with _explained("read", path):
            try:
                with open(path, "rb") as file:
                    return file.read()
            except ABSENT:
                raise ObjectMissing(f"{path}: no such object") from None

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the bytes of every key, None for those that do not exist."""
        bodies: list[bytes | None] = []
        for key in keys:
            try:
                bodies.append(self.get(key))
            except ObjectMissing:
                bodies.append(None)
        return bodies

    def exists(self, key: str) -> bool:
        """Tell whether `key` exists."""
        path = self._path(key)
        with _explained("looked at", path):
            try:
                return stat.S_ISREG(os.stat(path).st_mode)
            except ABSENT:
                return False

    def list_folders(self, prefix: str) -> list[str]:
        """Return the names of the folders right below the folder `prefix`."""
        top = self._path(prefix) if prefix else self._root
        with _explained("listed", top), contextlib.suppress(*ABSENT), os.scandir(top) as entries:
            return [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
        return []

    def list(self, prefix: str) -> list[str]:
        """Return all keys below the folder `prefix`."""
        top = self._path(prefix) if prefix else self._root
        with _explained("listed", top):
            return [path[len(self._root) + 1 :] for path in _files_below(top)]

    def delete(self, key: str) -> None:
        """Remove `key` if it exists, and its folder if that is empty now."""
        path = self._path(key)
        with _explained("deleted", path), contextlib.suppress(*ABSENT):
            os.unlink(path)
            if "/" in key:
                with contextlib.suppress(OSError):  # not empty, the usual case
                    os.rmdir(os.path.dirname(path))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"


@contextlib.contextmanager
def _explained(what: str, path: str) -> Iterator[None]:
    """Turn an error of the operating system into one sentence."""
    try:
        yield
    except StoreError:
        raise
    except OSError as cause:
        remedy = REMEDIES.get(cause.errno or 0)
        raise StoreError(
            f"{path}: could not be {what}: {(cause.strerror or str(cause)).lower()}{f'; {remedy}' if remedy else ''}"
        ) from cause


@contextlib.contextmanager
def _written(path: str, body: bytes) -> Iterator[str]:
    """Write and sync a hidden file beside `path` and yield its name; it is gone afterwards."""
    folder, name = os.path.split(path)
    tmp = f"{folder}/{TMP}{secrets.token_hex(8)}-{name[:64]}"
    handle = _create_file(tmp)
    try:
        try:
            rest = memoryview(body)
            while rest:
                rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        yield tmp
    finally:
        with contextlib.suppress(FileNotFoundError):  # os.replace has taken it
            os.unlink(tmp)


def _create_file(path: str) -> int:
    """Create an empty file, and its folder where it is missing; return the open file."""
    for _ in range(5):
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            with contextlib.suppress(FileNotFoundError):  # a delete removes folders that it leaves empty
                _make_folder(os.path.dirname(path))
    raise FileNotFoundError(errno.ENOENT, "its folder vanishes as soon as it is created", path)


def _make_folder(folder: str) -> None:
    """Create `folder` and its parents so that they outlive a power cut."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    _make_folder(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    _sync_folder(parent)


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files_below(folder: str) -> Iterator[str]:
    """Yield the paths of all files below `folder` that are not hidden."""
    try:
        entries = os.scandir(folder)
    except ABSENT:
        return
    with entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _files_below(entry.path)
            else:
                yield entry.path
