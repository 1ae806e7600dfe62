"""Logs: append-only, gap-free sequences of small numbered records in the store.

A record is appended by creating the next number, create-only. Whoever finds the number taken reads what is
there: its own nonce means that it had won and the reply was lost; another's means that it lost, and must
decide again from what the winner said. The cost of an append or a read does not depend on the length of
the log, and finding the tail takes a number of look-ups that grows with its logarithm.

An appender waits for nobody. A follower waits for the next number, at an interval that adapts (`Pacer`).
"""

import threading
import time
from typing import Generic, TypeVar

from pydantic import ValidationError

from data_contracts.errors import ProtocolError, StoreError
from data_contracts.records import Record, decode_record, encode_record
from infra.store import Store

R = TypeVar("R", bound=Record)

DIGITS = 10


class Log(Generic[R]):
    """The records of one kind below `path`, for example log/claim/0000000000.json and so on.

    Safe to use from several threads. Objects of this class keep no state but how far the log is known to
    reach, so any number of them, in any number of processes, may be open at once.
    """

    def __init__(self, store: Store, path: str, kind: type[R]) -> None:
        self._store = store
        self._path = path
        self._kind = kind
        self._seen = 0  # every number below it exists; logs only grow

    @property
    def path(self) -> str:
        """Where the log lies in the store."""
        return self._path

    def __repr__(self) -> str:
        return f"Log({self._store.url}/{self._path}, {self._kind.__name__})"

    def append(self, number: int, record: R) -> R | None:
        """Append `record` as `number`, durably.

        Returns:
            None if it is there now, also when an earlier try of this very record had put it there and its
            reply was lost; otherwise the record that holds the number.

        Raises:
            ProtocolError: the number before does not exist, so a gap would arise.
        """
        if number > self._seen and not self._store.exists(self._key(number - 1)):
            raise ProtocolError(f"{self._path}: record {number} must not be appended before record {number - 1} exists")
        body = self._store.put_or_get(self._key(number), encode_record(record))
        self._saw(number)
        if body is None:
            return None
        found = self._decode(number, body)
        is_own = (found.writer, found.nonce) == (record.writer, record.nonce)
        return None if is_own else found

    def read(self, number: int) -> R | None:
        """Return record `number`, or None if it does not exist yet.

        Raises:
            StoreError: what is there is no record of this log's kind.
        """
        found = self.read_from(number, limit=1)
        return found[0] if found else None

    def read_from(self, number: int, limit: int | None = None) -> list[R]:
        """Return the records from `number` on, in order: all that exist, or the first `limit` of them.

        Costs one read more than there are records; over a network, reads run ahead in growing numbers.
        """
        found: list[R] = []
        widest = self._store.parallel_reads
        window = min(widest, max(1, self._seen - number))
        while limit is None or len(found) < limit:
            start = number + len(found)
            stop = start + window if limit is None else min(start + window, number + limit)
            numbers = range(start, stop)
            for at, body in zip(numbers, self._store.get_many([self._key(n) for n in numbers]), strict=True):
                if body is None:
                    return found
                found.append(self._decode(at, body))
                self._saw(at)
            window = min(2 * window, widest)
        return found

    def tail(self) -> int:
        """Return the number of records, which is the next free number.

        Gallops from the last number that this object has seen, then bisects: O(log n) look-ups at first,
        one or two afterwards.
        """
        exists_below = self._seen
        step = 1
        while self._store.exists(self._key(exists_below + step - 1)):
            exists_below += step
            step *= 2
        missing = exists_below + step - 1
        while exists_below < missing:
            middle = (exists_below + missing) // 2
            if self._store.exists(self._key(middle)):
                exists_below = middle + 1
            else:
                missing = middle
        self._saw(exists_below - 1)
        return exists_below

    def last(self) -> R | None:
        """Return the newest record, or None while the log is empty."""
        tail = self.tail()
        return self.read(tail - 1) if tail else None

    def pacer(self) -> "Pacer":
        """Return a pacer for following this log, as fast as its store can bear."""
        return Pacer(*self._store.pacing)

    def _saw(self, number: int) -> None:
        self._seen = max(self._seen, number + 1)

    def _key(self, number: int) -> str:
        if not 0 <= number < 10**DIGITS:
            raise ProtocolError(f"{self._path}: expected a record number from 0 to {10**DIGITS - 1}, got {number}")
        return f"{self._path}/{number:0{DIGITS}d}.json"

    def _decode(self, number: int, body: bytes) -> R:
        try:
            return decode_record(self._kind, body)
        except ValidationError as cause:
            first = cause.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise StoreError(
                f"{self._store.url}/{self._key(number)}: expected a {self._kind.__name__} record, got {len(body)} bytes"
                f" that are none ({where + ': ' if where else ''}{first['msg']});"
                " it was torn or altered, or another version of Rollflow wrote it"
            ) from cause


class Cached(Generic[R]):
    """The records of a short log, each read once: records never change."""

    def __init__(self, log: Log[R]) -> None:
        self._log = log
        self._records: list[R] = []

    def read(self) -> list[R]:
        """Return all records that exist now."""
        self._records += self._log.read_from(len(self._records))
        return self._records


GROWTH = 1.01
"""A wait found something late by about a hundredth of how long it took: roles in a row add their delays up."""


class Pacer:
    """How long to wait between two looks for something new: short after progress, longer and longer without.

    One per loop; not for sharing between threads.
    """

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._shortest_s = shortest_s
        self._longest_s = longest_s
        self.interval_s = shortest_s
        """How long the next wait will be."""

    def wait(self, stop: threading.Event | None = None) -> bool:
        """Wait, and lengthen the next one a little. Returns at once, and True, when `stop` is set."""
        interval_s, self.interval_s = self.interval_s, min(self.interval_s * GROWTH, self._longest_s)
        if stop is not None:
            return stop.wait(interval_s)
        time.sleep(interval_s)
        return False

    def reset(self) -> None:
        """Tell that there was progress: the next wait is the shortest."""
        self.interval_s = self._shortest_s
