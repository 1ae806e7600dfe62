"""What every role shares: an identity, a heartbeat, the control log, and waits that end.

A role is a loop over the store. It learns from log/control that the run stops, ends or has failed, and it
never waits for ever: a wait names the roles it waits for, and when none of their heartbeats moves for
`heartbeat_limit_s` (by this process's own monotonic clock) the wait raises instead of hanging.
"""

import functools
import hashlib
import os
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil

from data_contracts.config import RunConfig
from data_contracts.errors import RoleFailed, RunStopped, StoreError
from data_contracts.records import Control, Heartbeat, PolicyRef, encode_record
from infra.heartbeats import heartbeat_key, read_heartbeats
from infra.log import Log, Pacer
from infra.store import Store


class Role:
    """One process's part in a run. Use as a context manager: the heartbeat beats inside it.

    Attributes:
        name: rollout, reward, curate, train, evaluate, export or start.
        writer: id of this process in records; never used by another start.
        store: the run's prefix.
        is_over: True once log/control says that the run has ended as planned.
        is_finishing: True once this process was asked to deliver what it holds and go; the run goes on without it.
        full_weights: versions that somebody asked for in full, and where the trainer has put them.
    """

    def __init__(self, name: str, store: Store, config: RunConfig, writer: str = "") -> None:
        self.name = name
        self.writer = writer or new_writer()
        self.store = store
        self.config = config
        self.is_over = False
        self.is_finishing = False
        self.full_weights: dict[int, PolicyRef] = {}
        self.held: dict[str, int] = {}
        self.busy_s = 0.0
        self.waiting_s = 0.0
        self.tokens = 0
        self._told = (0.0, 0.0)
        self._state = "starting"
        self._beat = 0
        self._done = False
        self._quit = threading.Event()
        self._process_started = psutil.Process().create_time()
        self._control = Log(store, "log/control", Control)
        self._control_next = 0
        self._asked: set[int] = set()
        self._dead: set[str] = set()
        self._leaving = ""
        self._pacer = Pacer(*store.pacing)
        self._watch = HeartbeatWatch(store, config.orchestration.heartbeat_s, config.orchestration.heartbeat_limit_s)
        self._last_checked = float("-inf")
        self._clock = time.monotonic()
        self._processor_began = time.process_time()
        self._thread = threading.Thread(target=self._beat_on, name=f"heartbeat-{name}", daemon=True)

    def __enter__(self) -> "Role":
        self._write_heartbeat()
        self._thread.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._done = error_type is None or issubclass(error_type, RunStopped)
        self._state = "done" if self._done else "failed"
        self._quit.set()
        self._thread.join(timeout=10)
        self._write_heartbeat()

    def check(self, *, often: bool = False) -> None:
        """Read log/control, at most about twice a second unless `often`.

        Raises:
            RunStopped: somebody asked the run to stop, or this process to leave it.
            RoleFailed: another role died for good; the message is that role's own error.
        """
        if self._leaving:
            raise RunStopped(self._leaving)
        now = time.monotonic()
        if not often and now - self._last_checked < 0.5:
            return
        self._last_checked = now
        records = self._control.read_from(self._control_next)
        self._control_next += len(records)
        # Only what came after the newest start counts: a resumed run begins with a start record.
        starts = [i for i, record in enumerate(records) if record.kind == "start"]
        for i, record in enumerate(records):
            if record.kind == "dead":
                self._dead.add(record.target)
                if record.target == self.writer:  # given up for good, and another plays this part already
                    self.leave("declared dead by the supervisor")
            if record.kind == "full_weights" and record.version is not None:
                self._asked.add(record.version)
            if record.kind == "weights" and record.weights is not None and record.version is not None:
                self._asked.discard(record.version)
                self.full_weights[record.version] = record.weights
            if starts and i < starts[-1]:
                continue
            if record.kind == "start":
                self.is_over = False
            elif record.kind == "end":
                self.is_over = True
            elif record.kind == "stop":
                raise RunStopped(f"run was asked to stop: {record.error or 'no reason given'}")
            elif record.kind == "fail" and record.role != self.name:
                raise RoleFailed(f"role {record.role} failed: {record.error}")

    def leave(self, reason: str) -> None:
        """Have this process end its part at the next check; the run goes on. May be called from any thread."""
        self._leaving = reason

    @property
    def is_leaving(self) -> bool:
        """Whether this process was told to leave."""
        return bool(self._leaving)

    @property
    def dead_writers(self) -> frozenset[str]:
        """Writers that a supervisor has declared dead."""
        return frozenset(self._dead)

    def take_requests(self, newest: int) -> list[int]:
        """Return versions up to `newest` that were asked for in full since they were last given; each only once."""
        taken = sorted(version for version in self._asked if version <= newest)
        self._asked.difference_update(taken)
        return taken

    def tell(self, kind: str, **fields: object) -> None:
        """Append a control record."""
        append_control(self.store, self.writer, kind, role=self.name, **fields)

    def wait(self, what: str, *, on: Sequence[str] = ()) -> None:
        """Sleep a little: less while things move, more while they do not.

        Args:
            what: what is waited for, shown in the heartbeat.
            on: names of the roles that can end the wait.

        Raises:
            RunStopped: the run, or this process, was asked to stop.
            RoleFailed: none of the writers of a role in `on` has shown life within the limit.
        """
        self._state = f"waiting for {what}"
        self._settle(busy=True)
        if self.is_finishing:  # it holds nothing, or it would not wait
            self.leave("asked to leave")
        self.check()
        for role in on:
            if (
                role != "rollout" or self.config.rollout.workers
            ):  # without any of its own, a run waits for sites to join
                self._watch.check(role)
        self._pacer.wait(self._quit)
        self._settle(busy=False)

    def progressed(self, state: str) -> None:
        """Say that something happened: waits get short again."""
        self._state = state
        self._pacer.reset()

    def take_times(self) -> dict[str, float]:
        """Return the seconds worked and waited since the last call, for a record's metrics."""
        busy_s, waiting_s = self._told
        self._told = (self.busy_s, self.waiting_s)
        return {"busy_s": self.busy_s - busy_s, "waiting_s": self.waiting_s - waiting_s}

    def _settle(self, *, busy: bool) -> None:
        now = time.monotonic()
        if busy:
            self.busy_s += now - self._clock
        else:
            self.waiting_s += now - self._clock
        self._clock = now

    def pause(self, seconds: float) -> None:
        """Sleep, and count it as waiting; for loops that have their own pace."""
        self._settle(busy=True)
        self._quit.wait(seconds)
        self._settle(busy=False)

    def _beat_on(self) -> None:
        while not self._quit.wait(self.config.orchestration.heartbeat_s):
            self._write_heartbeat()

    def _write_heartbeat(self) -> None:
        self._beat += 1
        beat = Heartbeat(
            role=self.name,
            writer=self.writer,
            host=socket.gethostname(),
            machine=machine_id(),
            pid=os.getpid(),
            process_started=self._process_started,
            beat=self._beat,
            state=self._state,
            held=dict(self.held),
            busy_s=self.busy_s,
            waiting_s=self.waiting_s,
            processor_s=time.process_time() - self._processor_began,
            tokens=self.tokens,
            done=self._done,
        )
        try:
            self.store.put(heartbeat_key(self.name, self.writer), encode_record(beat))
        except StoreError:  # a heartbeat that is missed costs nothing; the role's own puts will report the store
            return


class HeartbeatWatch:
    """Notices that a role shows no life, by this process's own monotonic clock."""

    def __init__(self, store: Store, interval_s: float, limit_s: float) -> None:
        self._store = store
        self._interval_s = interval_s
        self._limit_s = limit_s
        self._checked: dict[str, float] = {}
        self._seen: dict[str, tuple[int, float]] = {}
        self._moved: dict[str, float] = {}

    def check(self, role: str) -> None:
        """Raise RoleFailed when no writer of `role` has moved its heartbeat within the limit."""
        now = time.monotonic()
        if now - self._checked.get(role, float("-inf")) < self._interval_s:
            return
        self._checked[role] = now
        self._moved.setdefault(role, now)
        for beat in read_heartbeats(self._store, role):
            before = self._seen.get(beat.writer)
            if before is None or before[0] != beat.beat:
                self._seen[beat.writer] = (beat.beat, now)
                if not beat.done or before is None:
                    self._moved[role] = now
        silent = now - self._moved[role]
        if silent > self._limit_s:
            raise RoleFailed(f"role {role} has shown no life for {silent:.0f} s (limit {self._limit_s:.0f} s)")


@functools.cache
def machine_id() -> str:
    """Return what tells the processes that this one can see from all others, also where host names are alike.

    On Linux the installation and the process namespace: a container's process ids mean nothing outside of it.
    """
    try:
        installation = Path("/etc/machine-id").read_text().strip()
    except OSError:
        installation = f"{uuid.getnode():x}"
    try:
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{socket.gethostname()} {installation} {namespace}".encode()).hexdigest()[:16]


def new_writer() -> str:
    """Return the id of a process that is about to be started: another one every time."""
    return secrets.token_hex(6)


def append_control(store: Store, writer: str, kind: str, **fields: object) -> None:
    """Append one control record at the end of log/control, whoever else appends meanwhile."""
    log = Log(store, "log/control", Control)
    record = Control.model_validate({"writer": writer, "kind": kind, **fields})
    number = log.tail()
    while log.append(number, record) is not None:
        number += 1
