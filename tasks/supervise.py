"""What whoever starts the roles of a run does for them: declare the dead, pass on failures, open and close.

Only the starter of processes can say at once that one is dead. Everybody else waits for a lease to run out.
"""

import os
import secrets
import time

import psutil

from data_contracts.records import Control, Heartbeat
from infra.heartbeats import read_heartbeats
from infra.log import Log
from infra.store import Store
from tasks.role import append_control, machine_id

EXPENDABLE = ("export", "audit")
"""Roles that a run goes on without: what they find or show can be made again from the records."""


class Supervisor:
    """Writes to log/control on behalf of the processes it started."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._writer = secrets.token_hex(6)
        self._buried: set[str] = set()

    def open(self) -> None:
        """Begin, or begin again: what was said before (stop, fail) no longer counts."""
        append_control(self._store, self._writer, "start", role="supervisor")

    def bury_the_dead(self) -> list[str]:
        """Declare dead every writer of this host whose process is gone; return their ids."""
        dead = [
            beat.writer
            for beat in read_heartbeats(self._store)
            if beat.writer not in self._buried and not beat.done and is_local(beat) and not is_alive(beat)
        ]
        for writer in dead:
            self.bury(writer)
        return dead

    def bury(self, writer: str) -> None:
        """Declare a writer dead whose process is known to be gone: what it held is taken over at once."""
        if writer not in self._buried:
            append_control(self._store, self._writer, "dead", role="supervisor", target=writer)
            self._buried.add(writer)

    def settle_role(self, name: str, error: BaseException | None) -> None:
        """Take note that a role is over; a failure that nobody announced is announced now."""
        if error is not None and name not in EXPENDABLE and not self.failure():
            append_control(self._store, self._writer, "fail", role=name, error=f"{type(error).__name__}: {error}")

    def stop_if_open(self, reason: str) -> None:
        """Ask every role to stop, unless the run is over already."""
        if not self.closing():
            append_control(self._store, self._writer, "stop", role="supervisor", error=reason)

    def closing(self) -> str:
        """Return how the run is being closed: stop, end or fail; empty while it goes on."""
        return next((record.kind for record in self._current() if record.kind in ("stop", "end", "fail")), "")

    def failure(self) -> str:
        """Return the first error that ended the run, as `role: error`; empty when there is none."""
        failures = [record for record in self._current() if record.kind == "fail"]
        return f"{failures[0].role}: {failures[0].error}" if failures else ""

    def was_stopped(self) -> bool:
        """Return whether the run was stopped before its end."""
        kinds = {record.kind for record in self._current()}
        return "stop" in kinds and "end" not in kinds

    def _current(self) -> list[Control]:
        records = Log(self._store, "log/control", Control).read_from(0)
        starts = [i for i, record in enumerate(records) if record.kind == "start"]
        return records[starts[-1] :] if starts else records


def find_living(store: Store) -> list[Heartbeat]:
    """Return the writers of a run that are alive on this host, this process aside."""
    beats = [beat for beat in read_heartbeats(store) if not beat.done and is_local(beat) and is_alive(beat)]
    return [beat for beat in beats if beat.pid != os.getpid()]


def find_moving(store: Store, during_s: float) -> list[Heartbeat]:
    """Return the writers of a run, on whatever host, whose heartbeat moves while this process looks on for a while."""
    before = {beat.writer: beat.beat for beat in read_heartbeats(store)}
    time.sleep(during_s)
    return [beat for beat in read_heartbeats(store) if not beat.done and beat.beat != before.get(beat.writer)]


def is_local(beat: Heartbeat) -> bool:
    """Return whether a writer runs, or ran, where this process could see it."""
    return beat.machine == machine_id()


def is_alive(beat: Heartbeat) -> bool:
    """Return whether the very process of a writer of this host still exists; a reused pid is not it."""
    try:
        process = psutil.Process(beat.pid)
        return abs(process.create_time() - beat.process_started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
