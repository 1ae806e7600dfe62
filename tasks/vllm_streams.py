"""What a vLLM server has in flight: requests on their way out, responses on their way in.

One thread for each request to the server reads what is streamed and puts it into a queue, which the role's thread
empties: all else here belongs to that thread. After `forget` nothing of what was in flight is heard any more.
"""

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from data_contracts.errors import EngineError, ServiceError
from infra.vllm_client import Piece, Sampling, VllmClient
from models.requests import Request


@dataclass
class Sample:
    """A response on its way."""

    request: Request
    submitted_at: float
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(eq=False)
class _Stream:
    """A request to the server and the thread that reads it."""

    generation: int
    keys: tuple[Hashable, ...]
    salt: str
    is_dropped: bool = False
    """Nobody wants it any more: its thread hangs up, and the server then lets it go."""


@dataclass(frozen=True)
class _News:
    """What a reading thread has to say about its request."""

    stream: _Stream
    piece: Piece | None = None
    error: Exception | None = None


class Streams:
    """The requests that one server has in flight."""

    def __init__(self, most_at_once: int, sampling: Callable[[Request], Sampling]) -> None:
        """Send nothing yet.

        Args:
            most_at_once: samples of one request to the server; it refuses more.
            sampling: makes what the server is told of the first of several requests for one prompt.
        """
        self._most_at_once = most_at_once
        self._sampling = sampling
        self._samples: dict[Hashable, Sample] = {}
        self._streams: dict[Hashable, _Stream] = {}
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._generation = 0

    @property
    def samples(self) -> dict[Hashable, Sample]:
        """Responses in flight, by the key of their request."""
        return self._samples

    def send(self, client: VllmClient, requests: Sequence[Request], salt: str) -> None:
        """Ask the server: requests for one prompt whose seeds follow each other are one request to it.

        Args:
            client: of the server.
            requests: none of them in flight.
            salt: prompts share what was computed for them with those of the same salt.
        """
        runs = groupby(enumerate(requests), lambda at: (at[1].prompt_key, at[1].seed - at[0], _distribution(at[1])))
        now = time.time()
        for _, run in runs:
            alike = [request for _, request in run]
            self._samples |= {request.key: Sample(request, now) for request in alike}
            for first in range(0, len(alike), self._most_at_once):
                part = alike[first : first + self._most_at_once]
                stream = _Stream(self._generation, tuple(request.key for request in part), salt)
                self._streams |= dict.fromkeys(stream.keys, stream)
                threading.Thread(target=self._read, args=(client, stream, part[0]), daemon=True).start()

    def hear(self, limit_s: float) -> Iterator[tuple[Sample, Piece]]:
        """Yield the pieces that have come, taken into their samples; wait for the first for `limit_s` at most.

        A sample whose piece has a finish_reason is complete, and in flight until `end` is told of it.

        Raises:
            EngineError: the server refuses a request.
            ServiceError: the server is gone, or broke off.
        """
        try:
            news: _News | None = self._news.get(timeout=limit_s)
        except queue.Empty:
            return
        while news is not None:
            found = self._take_in(news)
            if found is not None:
                yield found
            news = None if self._news.empty() else self._news.get()

    def end(self, sample: Sample) -> None:
        """Take out a sample that is complete."""
        del self._samples[sample.request.key], self._streams[sample.request.key]

    def drop(self, keys: Iterable[Hashable]) -> list[Sample]:
        """Take samples out and return them; a stream that nobody wants any more ends."""
        wanted = set(keys)
        taken = [self._samples.pop(key) for key in wanted & self._samples.keys()]
        for stream in {self._streams.pop(key) for key in wanted & self._streams.keys()}:
            stream.is_dropped = not self._samples.keys() & set(stream.keys)
        return taken

    def forget(self) -> list[Request]:
        """Hear no more of what is in flight; return the requests."""
        self._generation += 1
        lost = [sample.request for sample in self._samples.values()]
        self._samples.clear()
        self._streams.clear()
        return lost

    def _read(self, client: VllmClient, stream: _Stream, first: Request) -> None:
        """Read one request's stream into the queue; runs in a thread of its own."""
        try:
            with contextlib.closing(
                client.generate(first.prompt_ids, len(stream.keys), self._sampling(first), stream.salt)
            ) as pieces:
                for piece in pieces:
                    if stream.is_dropped:
                        return
                    self._news.put(_News(stream, piece))
            self._news.put(_News(stream))
        except (ServiceError, EngineError) as cause:
            self._news.put(_News(stream, error=cause))

    def _take_in(self, news: _News) -> tuple[Sample, Piece] | None:
        stream = news.stream
        if stream.generation != self._generation or stream.is_dropped:  # asked for again, or not wanted any more
            return None
        if news.error is not None:
            raise news.error
        if news.piece is None:
            if any(self._streams.get(key) is stream for key in stream.keys):
                raise ServiceError("vLLM server ended a stream before its last response")
            return None
        key = stream.keys[news.piece.index]
        if self._streams.get(key) is not stream:  # dropped, its stream goes on for others
            return None
        sample = self._samples[key]
        sample.token_ids += news.piece.token_ids
        sample.logprobs += news.piece.logprobs
        return sample, news.piece


def _distribution(request: Request) -> str:
    values = (request.max_new_tokens, request.temperature, request.top_p, request.top_k, sorted(request.stop_ids))
    return json.dumps(values)
