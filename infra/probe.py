"""Does a store keep its promises? Asked at the start of a run, from two processes.

Some servers accept a create-only put and overwrite all the same, some let several racers win, and some
store what the client's framing added. None of them may hold a run. A second process, which imports nothing
but the store, creates the same names as this one at the same moments; then both read what is there.

    this process:    ready? ── go 0 ── put ── outcome? ── go 1 ── ...
    second process:  ready ─────────── put ── outcome ─────────── ...

Each waits for the other's line; a second process that says nothing for ANSWER_S seconds is given up.
"""

import contextlib
import hashlib
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from data_contracts.errors import StoreError, StoreUnfit
from infra import crash
from infra.store import Store, open_store

ROUNDS = 8
ANSWER_S = 60.0
ROOT = Path(__file__).resolve().parent.parent


def probe(url: str) -> None:
    """Return if the store at `url` keeps the promises of `infra.store`.

    Leaves nothing behind, unless the store forbids to delete.

    Raises:
        StoreUnfit: it does not; the message says which promise it broke.
        StoreError: it cannot be reached or written.
    """
    store = open_store(url, retry_s=15.0)  # a store that is not there should say so soon
    folder = f"probe-{secrets.token_hex(8)}"
    keys = [f"{folder}/{name}" for name in ("first", "alone", "again", *map(str, range(ROUNDS)))]
    store.put_new(keys[0], b"")  # fails, with nothing to clean up, if the store is out of reach or read-only
    try:
        _check_alone(store, keys[1], keys[2])
        if url.startswith("memory://"):
            _check_race(store, keys[3:], _thread_racer(store))
        else:
            _check_race_of_processes(store, keys[3:])
        _check_listed(store, folder, keys)
    finally:
        with contextlib.suppress(StoreError):  # a store may forbid to delete: runs never do
            for key in keys:
                store.delete(key)


def _check_alone(store: Store, key: str, overwritten: str) -> None:
    """Check what one process can see."""
    first, second = os.urandom(300_000), os.urandom(1000)
    if store.exists(key):
        raise StoreUnfit(f"{store.url}: says that an object exists that nobody wrote; use another store")
    store.put_new(key, first)
    _check_bytes(store, key, [first])
    if _create(store, key, second) == "won":
        raise StoreUnfit(
            f"{store.url}: a second create-only put of one name succeeded (If-None-Match is ignored);"
            " runs would lose records: use a folder or a server that keeps the condition"
        )
    _check_bytes(store, key, [first])
    store.put(overwritten, first)
    store.put(overwritten, second)
    _check_bytes(store, overwritten, [second])


def _check_bytes(store: Store, key: str, expected: list[bytes]) -> bytes:
    body = store.get(key)
    if body not in expected or not store.exists(key):
        raise StoreUnfit(
            f"{store.url}: what is read back is not what was written (expected {len(expected[0])} bytes,"
            f" got {len(body)}); a server or proxy alters objects: use another store"
        )
    return body


def _check_listed(store: Store, folder: str, keys: list[str]) -> None:
    missing = set(keys) - set(store.list(folder))
    if missing:
        raise StoreUnfit(f"{store.url}: a listing leaves out {len(missing)} objects just written; use another store")


Racer = Callable[[str, bytes], Callable[[], tuple[str, str]]]
"""Starts a create-only put of (key, body) elsewhere; the result waits for (won or lost, SHA-256 read back)."""


def _check_race(store: Store, keys: list[str], start: Racer) -> None:
    """Check that of two racing create-only puts exactly one wins, and that both then read the winner's bytes."""
    for key in keys:
        ours, theirs = os.urandom(1000), os.urandom(1000)
        finish = start(key, theirs)
        our_outcome = _create(store, key, ours)
        their_outcome, their_sha256 = finish()
        wins = [our_outcome, their_outcome].count("won")
        if wins != 1:
            raise StoreUnfit(
                f"{store.url}: of two processes that created one name at once {wins} won instead of one;"
                " runs would lose records: use a folder or a server that keeps If-None-Match in a race"
            )
        body = _check_bytes(store, key, [ours if our_outcome == "won" else theirs])
        if their_sha256 != hashlib.sha256(body).hexdigest():
            raise StoreUnfit(f"{store.url}: two processes read different bytes under one name; use another store")


def _create(store: Store, key: str, body: bytes) -> str:
    """Return "won" or "lost"; as everywhere, finding one's own bytes after a lost reply is to have won."""
    found = store.put_or_get(key, body)
    return "won" if found in (None, body) else "lost"


def _race_once(store: Store, key: str, body: bytes, both_done: Callable[[], object]) -> tuple[str, str]:
    outcome = _create(store, key, body)
    both_done()
    return outcome, hashlib.sha256(store.get(key)).hexdigest()


def _thread_racer(store: Store) -> Racer:
    """Race in a thread: what is in memory has no second process."""

    def start(key: str, body: bytes) -> Callable[[], tuple[str, str]]:
        result: list[tuple[str, str]] = []
        thread = threading.Thread(target=lambda: result.append(_race_once(store, key, body, lambda: None)))
        thread.start()

        def finish() -> tuple[str, str]:
            thread.join()
            return result[0]

        return finish

    return start


def _check_race_of_processes(store: Store, keys: list[str]) -> None:
    """Race against a second process."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.Popen(
        [sys.executable, "-m", "infra.probe"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert child.stdin and child.stdout and child.stderr  # noqa: S101 they are pipes
    to_child, from_child, errors = child.stdin, child.stdout, child.stderr
    watchdog = threading.Timer(ANSWER_S, child.kill)
    watchdog.start()

    def say(**line: str) -> None:
        try:
            to_child.write(json.dumps(line) + "\n")
            to_child.flush()
        except BrokenPipeError:
            hear()

    def hear() -> dict[str, str]:
        line = from_child.readline()
        if line:
            said = json.loads(line)
        else:
            child.kill()
            last_words = errors.read().strip().rpartition("\n")[2]
            said = {"error": f"it ended or was silent for {ANSWER_S:.0f} s {last_words}".strip()}
        if "error" in said:
            raise StoreError(f"{store.url}: the second process of the probe failed: {said['error']}")
        return said

    def start(key: str, body: bytes) -> Callable[[], tuple[str, str]]:
        say(key=key, body=body.hex())
        hear()  # it is ready
        say(go="now")

        def finish() -> tuple[str, str]:
            outcome = hear()["outcome"]
            say(done="both")
            return outcome, hear()["sha256"]

        return finish

    try:
        say(url=store.url)
        _check_race(store, keys, start)
    finally:
        watchdog.cancel()
        to_child.close()
        child.kill()
        child.wait()
        from_child.close()
        errors.close()


def _serve_second_process() -> None:
    """Do what the first process says on stdin, one JSON object a line; end with it."""

    def say(**line: str) -> None:
        print(json.dumps(line), flush=True)

    try:
        store = open_store(json.loads(sys.stdin.readline())["url"])
        for line in sys.stdin:
            order = json.loads(line)
            say(ready="yes")
            sys.stdin.readline()
            crash.point("probe.second")
            outcome = _create(store, order["key"], bytes.fromhex(order["body"]))
            say(outcome=outcome)
            sys.stdin.readline()
            say(sha256=hashlib.sha256(store.get(order["key"])).hexdigest())
    except StoreError as cause:
        say(error=str(cause))


if __name__ == "__main__":
    _serve_second_process()
