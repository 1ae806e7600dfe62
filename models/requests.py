"""What an engine is asked for, what it knows of the sequences in flight, and what it gives back.

Legend: S slots, N active slots (always the first N), T tokens of a response.
"""

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from data_contracts.errors import ConfigError, EngineError

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True)
class Request:
    """One response wanted.

    Requests with equal `prompt_ids` that stand together in the queue share one forward pass over the prompt.
    """

    key: Hashable
    """Names the request among those in the engine."""
    prompt_ids: Sequence[int]
    """At least one token id."""
    seed: int
    """Seed of this sample's random stream."""
    max_new_tokens: int
    """Limit on the response in tokens; the engine's max_length limits it too."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_p: float = 1.0
    """Nucleus kept; 1 keeps all."""
    top_k: int = 0
    """Most likely tokens kept; 0 keeps all."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end this response, beside the engine's eos_ids."""
    stops: Callable[[np.ndarray], bool] | None = None
    """Called with the response's ids, int32 [T], after every token; true ends the response (see `stop_texts`)."""

    @cached_property
    def prompt_key(self) -> bytes:
        """Equal for equal prompts."""
        return np.asarray(self.prompt_ids, np.int64).tobytes()


@dataclass(frozen=True)
class Finished:
    """A response that ended; arrays have one entry per sampled token (T)."""

    request: Request
    response_ids: np.ndarray
    """int32 [T]; ends with the end-of-sequence token if one was sampled."""
    logprobs: np.ndarray
    """float32 [T], nats, under the distribution sampled from."""
    versions: np.ndarray
    """int32 [T], version of the weights that sampled the token."""
    digests: dict[int, str]
    """Digest of every version used, by version, ascending."""
    finish_reason: FinishReason
    started_at: float
    """Seconds since the epoch when a slot was taken; 0 when the request never had one."""
    finished_at: float

    @property
    def key(self) -> Hashable:
        """The request's key."""
        return self.request.key


class SlotTable:
    """What is known of each slot, as arrays: row i is slot i, the first N rows are active.

    Arrays, so that a step costs the same handful of operations for any number of slots.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        self.length = np.zeros(num_slots, np.int64)
        """Prompt and response tokens so far."""
        self.prompt_length = np.zeros(num_slots, np.int64)
        self.limit = np.zeros(num_slots, np.int64)
        """Length at which the response ends."""
        self.last_token = np.zeros(num_slots, np.int64)
        self.seed = np.zeros(num_slots, np.int64)
        self.temperature = np.ones(num_slots)
        self.top_p = np.ones(num_slots)
        self.top_k = np.zeros(num_slots, np.int64)
        self.has_own_stop = np.zeros(num_slots, bool)
        self.started_at = np.zeros(num_slots)
        self.tokens = np.zeros((num_slots, max_length), np.int32)
        """Sampled tokens, at their position in the sequence; the prompt's positions stay unused."""
        self.logprobs = np.zeros((num_slots, max_length), np.float32)
        self.versions = np.zeros((num_slots, max_length), np.int32)
        self.requests: list[Request] = []

    def fill(self, first: int, requests: Sequence[Request], now: float) -> None:
        """Start `requests` in the slots from `first` on."""
        rows = slice(first, first + len(requests))
        self.prompt_length[rows] = self.length[rows] = [len(r.prompt_ids) for r in requests]
        self.limit[rows] = [min(len(r.prompt_ids) + r.max_new_tokens, self.tokens.shape[1]) for r in requests]
        self.last_token[rows] = [r.prompt_ids[-1] for r in requests]
        self.seed[rows] = [r.seed for r in requests]
        self.temperature[rows] = [r.temperature for r in requests]
        self.top_p[rows] = [r.top_p for r in requests]
        self.top_k[rows] = [r.top_k for r in requests]
        self.has_own_stop[rows] = [bool(r.stop_ids) or r.stops is not None for r in requests]
        self.started_at[rows] = now
        self.requests[first:] = requests

    def add(self, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Append one token to each active row."""
        rows = np.arange(len(tokens))
        at = self.length[: len(tokens)]
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs
        self.versions[rows, at] = version
        self.last_token[: len(tokens)] = tokens
        at += 1

    def ended(self, tokens: np.ndarray, eos_ids: np.ndarray) -> dict[int, FinishReason]:
        """Return the rows that end with the tokens just added, ascending, and why."""
        num = len(tokens)
        stopped = np.isin(tokens, eos_ids)
        for row in np.flatnonzero(self.has_own_stop[:num] & ~stopped).tolist():
            request = self.requests[row]
            stopped[row] = int(tokens[row]) in request.stop_ids or (
                request.stops is not None and request.stops(self.tokens[row, self._response(row)])
            )
        full = self.length[:num] >= self.limit[:num]
        return {row: "stop" if stopped[row] else "length" for row in np.flatnonzero(stopped | full).tolist()}

    def collect(self, row: int, reason: FinishReason, digests: Mapping[int, str]) -> Finished:
        """Return what a row holds, as a response that ended now."""
        at = self._response(row)
        versions = self.versions[row, at].copy()
        return Finished(
            request=self.requests[row],
            response_ids=self.tokens[row, at].copy(),
            logprobs=self.logprobs[row, at].copy(),
            versions=versions,
            digests={version: digests[version] for version in _distinct(versions)},
            finish_reason=reason,
            started_at=float(self.started_at[row]),
            finished_at=time.time(),
        )

    def close_gaps(self, ended: Collection[int]) -> tuple[list[int], list[int]]:
        """Remove rows; the last active rows move into the gaps. Return (moved rows, where they went)."""
        num = len(self.requests)
        left = num - len(ended)
        gone = set(ended)
        targets = sorted(row for row in gone if row < left)
        sources = [row for row in range(left, num) if row not in gone]
        if targets:
            for values in vars(self).values():
                if isinstance(values, np.ndarray):
                    values[targets] = values[sources]
            for source, target in zip(sources, targets, strict=True):
                self.requests[target] = self.requests[source]
        del self.requests[left:]
        return sources, targets

    def versions_in_use(self) -> set[int]:
        """Return the versions that sampled a token of an active row."""
        rows = range(len(self.requests))
        return {version for row in rows for version in _distinct(self.versions[row, self._response(row)])}

    def _response(self, row: int) -> slice:
        """Return the positions of the row's response."""
        return slice(int(self.prompt_length[row]), int(self.length[row]))


def check_request(request: Request, *, max_length: int, vocab_size: int) -> None:
    """Raise EngineError unless an engine of this length and vocabulary can answer a request."""
    num = len(request.prompt_ids)
    if not 0 < num < max_length:
        raise EngineError(
            f"request {request.key}: prompt has {num} tokens, expected 1 to {max_length - 1} "
            f"(max_length {max_length}): shorten it or raise the engine's max_length"
        )
    low, high = min(request.prompt_ids), max(request.prompt_ids)
    if low < 0 or high >= vocab_size:
        raise EngineError(
            f"request {request.key}: prompt ids reach from {low} to {high}, expected 0 to {vocab_size - 1}: "
            "encode it with the model's own tokenizer"
        )
    if request.max_new_tokens < 1 or request.temperature < 0 or not 0 < request.top_p <= 1 or request.top_k < 0:
        raise EngineError(
            f"request {request.key}: expected max_new_tokens >= 1, temperature >= 0, 0 < top_p <= 1, top_k >= 0, "
            f"got {request.max_new_tokens}, {request.temperature}, {request.top_p}, {request.top_k}"
        )


def never_started(request: Request) -> Finished:
    """Return the empty, aborted response of a request that had no slot."""
    nothing = np.zeros(0, np.int32)
    return Finished(request, nothing, np.zeros(0, np.float32), nothing, {}, "aborted", 0.0, time.time())


def stop_texts(tokenizer: Any, texts: Sequence[str]) -> Callable[[np.ndarray], bool]:
    """Return a check for `Request.stops`: does the decoded response hold one of `texts`?

    Only the last tokens are decoded, enough for the longest text even at four tokens a character: an earlier
    occurrence would have ended the response when it was completed.

    Raises:
        ConfigError: there is no text, or an empty one.
    """
    if not texts or not all(texts):
        raise ConfigError(f"stop texts {list(texts)} must be at least one, none of them empty")
    tail = 4 * max(len(text) for text in texts) + 8

    def stops(response_ids: np.ndarray) -> bool:
        decoded = tokenizer.decode(response_ids[-tail:].tolist())
        return any(text in decoded for text in texts)

    return stops


def _distinct(versions: np.ndarray) -> list[int]:
    """Return the distinct versions, ascending; nearly always there is one, which needs no sorting."""
    if len(versions) and (versions == versions[0]).all():
        return [int(versions[0])]
    return np.unique(versions).tolist()
