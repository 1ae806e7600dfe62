"""A group of processes that work together, started and watched by one parent that talks to each over a socket.

The parent sends every rank a message and waits for every rank's answer. When a rank dies or fails, all others are
ended and the parent gets the error of the rank that was first. When the parent dies, however, its ends of the sockets
close, and the ranks end themselves: nobody outlives it.

What the ranks compute, and how they talk to each other, is not known here. Messages are JSON with named bytes beside.
"""

import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from data_contracts import errors
from data_contracts.errors import RankFailed, RollflowError

GRACE_S = 2.0
"""How long the other ranks may take to say or show what has happened, once one of them is in trouble."""

TAIL_LINES = 4
"""Last lines of a rank's output that its error quotes."""

_LENGTH_BYTES = 8


class Message(NamedTuple):
    """What parent and rank say to each other."""

    fields: dict[str, Any]
    """JSON-able."""
    blobs: Mapping[str, bytes] = {}
    """Bytes by name."""


class Channel:
    """Messages over a stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            OSError: the other side is gone.
        """
        sizes = [[name, len(body)] for name, body in message.blobs.items()]
        header = json.dumps({"fields": message.fields, "blobs": sizes}).encode()
        self._socket.sendall(len(header).to_bytes(_LENGTH_BYTES, "big") + header)
        for body in message.blobs.values():
            self._socket.sendall(body)

    def receive(self) -> Message:
        """Wait for a message and return it.

        Raises:
            EOFError: the other side is gone.
        """
        length = int.from_bytes(self._read(_LENGTH_BYTES), "big")
        header = json.loads(self._read(length))
        return Message(header["fields"], {name: self._read(size) for name, size in header["blobs"]})

    def close(self) -> None:
        """Close this side."""
        self._socket.close()

    def _read(self, size: int) -> bytes:
        body = bytearray(size)
        view = memoryview(body)
        while view:
            try:
                count = self._socket.recv_into(view)
            except ConnectionError as cause:
                raise EOFError("the other side is gone") from cause
            if not count:
                raise EOFError("the other side is gone")
            view = view[count:]
        return bytes(body)


@dataclass(slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    channel: Channel
    output: IO[bytes]
    """Everything it prints."""
    error: dict[str, Any] = field(default_factory=dict)
    """What it has answered instead of a result."""

    def describe(self) -> str:
        """Say in one line what has become of it."""
        name = f"rank {self.number} (process {self.process.pid})"
        if self.error:
            return f"{name}: {self.error['type']}: {self.error['text']}"
        code = self.process.returncode
        if code is None:
            return f"{name} gave no answer"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        words = self._last_words()
        return f"{name} {how}; its last words: {words}" if words else f"{name} {how}"

    def _last_words(self) -> str:
        size = os.fstat(self.output.fileno()).st_size
        tail = os.pread(self.output.fileno(), 4096, max(size - 4096, 0)).decode(errors="replace")
        return " | ".join([line.strip() for line in tail.splitlines() if line.strip()][-TAIL_LINES:])


class RankGroup:
    """Runs `python -m MODULE FD` once for each rank; the module answers with `serve`. For use from one thread."""

    def __init__(self, module: str, num_ranks: int) -> None:
        self._ranks: list[_Rank] = []
        self._ended = weakref.finalize(self, _end, self._ranks)  # also at the interpreter's exit
        for number in range(num_ranks):
            self._ranks.append(_start(module, number))

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [rank.process.pid for rank in self._ranks]

    def call(self, messages: Sequence[Message]) -> Message:
        """Send each rank its message; return the answer of the first rank when all have answered.

        Raises:
            RankFailed: a rank died or failed; the group has ended.
            RollflowError: of the class that a rank raised; the group has ended.
        """
        if not self._ended.alive:
            raise RankFailed("the group of ranks has ended")
        try:
            for rank, message in zip(self._ranks, messages, strict=True):
                rank.channel.send(message)
        except OSError:
            self._fail()
        answers: dict[int, Message] = {}
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.channel, selectors.EVENT_READ, rank)
            while len(answers) < len(self._ranks):
                for key, _ in selector.select():
                    answer = _receive(key.data)
                    if answer is None:
                        self._fail()
                    else:
                        answers[key.data.number] = answer
                        selector.unregister(key.fileobj)
        return answers[0]

    def close(self) -> None:
        """End all ranks."""
        self._ended()

    def _fail(self) -> None:
        """End the group and raise the error of the rank that was first."""
        self._hear_others()
        killed = [rank for rank in self._ranks if (rank.process.poll() or 0) < 0]
        told = sorted((rank for rank in self._ranks if rank.error), key=lambda rank: rank.error["at"])
        ended = [rank for rank in self._ranks if rank.process.poll() is not None]
        first = (killed or told or ended or self._ranks)[0]
        text = first.describe()
        self.close()
        kind = getattr(errors, first.error.get("type", ""), None)
        if first in told and not killed and isinstance(kind, type) and issubclass(kind, RollflowError):
            raise kind(first.error["text"])
        raise RankFailed(text)

    def _hear_others(self) -> None:
        """Give every rank a little time to answer or to end."""
        open_ranks = [rank for rank in self._ranks if not rank.error]
        give_up = time.monotonic() + GRACE_S
        while open_ranks and time.monotonic() < give_up:
            ready, _, _ = select.select([rank.channel for rank in open_ranks], [], [], 0.05)
            for rank in list(open_ranks):
                if rank.channel in ready and _receive(rank) is None:
                    open_ranks.remove(rank)
        for rank in self._ranks:  # whoever has closed its end is about to be dead
            if rank not in open_ranks and not rank.error:
                _wait(rank, give_up - time.monotonic())


def _start(module: str, number: int) -> _Rank:
    ours, theirs = socket.socketpair()
    output = tempfile.TemporaryFile()  # noqa: SIM115 closed when the group ends
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
    return _Rank(number, process, Channel(ours), output)


def _receive(rank: _Rank) -> Message | None:
    """Return a rank's answer; None when it has failed, which is noted, or is gone."""
    try:
        answer = rank.channel.receive()
    except EOFError:
        return None
    if "error" in answer.fields:
        rank.error = answer.fields["error"]
        return None
    return answer


def _wait(rank: _Rank, seconds: float) -> None:
    try:
        rank.process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        return


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.channel.close()
    for rank in ranks:
        rank.process.kill()
        rank.process.wait()
        rank.output.close()


def end_with_parent(channel: Channel) -> None:
    """In a rank: end this process at once when the parent has closed its side or is dead."""

    def watch() -> None:
        poll = select.poll()
        poll.register(channel.fileno(), 0)  # wakes up when the other side hangs up, and for nothing else
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def tell_error(channel: Channel, error: BaseException) -> None:
    """In a rank: answer with an error."""
    told = {"type": type(error).__name__, "text": str(error), "at": time.monotonic()}
    channel.send(Message({"error": told}))
