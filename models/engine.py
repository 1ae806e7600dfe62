"""Generation in process: continuous batching over slots with a KV cache.

One `step` draws one token for every sequence in flight, ends those that are done, and their slots are filled
again at the next step. Samples of one prompt share its forward pass. New weights are taken between two steps;
sequences in flight go on with the keys and values they have, and every token says which version sampled it.

Who waits for whom: nobody. A step works on what is there and returns; the caller submits, steps, loads.

With `deterministic`, every forward pass has a shape that does not depend on what else is in flight (decode: all
slots and all positions; prompts: a width given by the prompt's own length), so a request's tokens and
log-probabilities are the same bits in any slot, in any company, after any history. This rests on the matrix
kernels treating all rows of one shape alike, which holds for the CPU kernels of PyTorch on one thread and is
tested. It does not hold for mixtures of experts, where the number of tokens of an expert depends on the batch.

Without it, only active slots and the positions in use are computed.

Legend: S slots, N active slots (always the first N), V vocabulary.
"""

import inspect
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from data_contracts.errors import ConfigError, EngineError
from models.digest import weights_digest
from models.policy import load_weights, named_weights
from models.sampling import sample, uniforms
from models.slots import Decode, KeyValues, Prompts, route_attention

FinishReason = Literal["stop", "length", "aborted"]

_ROW_MULTIPLE = 32  # element-wise kernels handle 32 floats at once; a shorter tail may differ in the last bit
_POSITION_MULTIPLE = 16
_PROMPT_TOKENS = 2048
_PROMPT_TOKENS_DETERMINISTIC = 512


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
    stops: Callable[[Sequence[int]], bool] | None = None
    """Called with the response's ids after every token; true ends the response (see `stop_texts`)."""


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


class _Slots:
    """What is known of each slot, as arrays: row i is slot i, the first N rows are active."""

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
        self.seed[rows] = [r.seed for r in requests]
        self.temperature[rows] = [r.temperature for r in requests]
        self.top_p[rows] = [r.top_p for r in requests]
        self.top_k[rows] = [r.top_k for r in requests]
        self.has_own_stop[rows] = [bool(r.stop_ids) or r.stops is not None for r in requests]
        self.started_at[rows] = now
        self.requests[first:] = requests

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows over others."""
        for values in vars(self).values():
            if isinstance(values, np.ndarray):
                values[targets] = values[sources]
        for source, target in zip(sources, targets, strict=True):
            self.requests[target] = self.requests[source]

    def add(self, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Append one token to each active row."""
        rows = np.arange(len(tokens))
        at = self.length[: len(tokens)]
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs
        self.versions[rows, at] = version
        self.last_token[: len(tokens)] = tokens
        at += 1

    def response(self, row: int) -> slice:
        """Return the positions of the row's response."""
        return slice(int(self.prompt_length[row]), int(self.length[row]))


@dataclass
class _PromptPass:
    """A finished forward pass over several prompts, kept while queued requests still need it."""

    prompts: Prompts
    logits: Tensor
    """float32 [R, V], after each prompt's last token."""
    rows: dict[bytes, int] = field(default_factory=dict)
    """Prompt to its row."""


class Engine:
    """Generates with one model on one device; not thread-safe.

    The engine owns the model: its attention is rerouted for good and its weights are overwritten.
    """

    def __init__(
        self,
        model: Any,
        *,
        version: int,
        slots: int,
        max_length: int | None = None,
        eos_ids: Iterable[int] = (),
        run_seed: int = 0,
        deterministic: bool = False,
    ) -> None:
        """Take over `model`.

        Args:
            model: a transformers causal language model that uses the attention interface.
            version: version of the weights it holds.
            slots: sequences decoded at once.
            max_length: prompt and response together, in tokens; None takes the model's limit.
            eos_ids: tokens that end every response.
            run_seed: enters the random stream beside a request's seed.
            deterministic: bitwise independence of batch, slot and history; see the module's text.

        Raises:
            ConfigError: the model, the sizes or the number of threads cannot be used.
        """
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if max_length is None and limit is None:
            raise ConfigError("the model's config names no max_position_embeddings: set the engine's max_length")
        if slots < 1 or (max_length or limit) < 2:
            raise ConfigError(f"engine needs slots >= 1 and max_length >= 2, got {slots} and {max_length}")
        if limit is not None and max_length is not None and max_length > limit:
            raise ConfigError(f"engine max_length {max_length} exceeds the model's {limit} positions: lower it")
        if deterministic and torch.get_num_threads() != 1:
            raise ConfigError(f"a deterministic engine needs one thread, got {torch.get_num_threads()}")
        route_attention(model)
        self._model = model.eval()
        self._device = next(model.parameters()).device
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._deterministic = deterministic
        self._max_length = int(max_length or limit)
        self._num_slots = slots
        num_rows = -(-slots // _ROW_MULTIPLE) * _ROW_MULTIPLE if deterministic else slots
        self._store = KeyValues(num_rows, self._max_length, fixed=deterministic)
        self._slots = _Slots(num_rows, self._max_length)
        self._eos_ids = np.array(sorted(set(eos_ids)), np.int64)
        self._run_seed = run_seed
        self._queue: deque[Request] = deque()
        self._queued_prompts: Counter[bytes] = Counter()
        self._passes: list[_PromptPass] = []
        self._version = version
        self._digests = {version: weights_digest(named_weights(model))}
        self._num_tokens = 0

    @property
    def version(self) -> int:
        """Version of the weights that the next token is sampled under."""
        return self._version

    @property
    def digest(self) -> str:
        """Digest computed over the weights in the model."""
        return self._digests[self._version]

    @property
    def max_length(self) -> int:
        """Limit on prompt and response together, in tokens."""
        return self._max_length

    @property
    def num_in_flight(self) -> int:
        """Sequences that hold a slot."""
        return len(self._slots.requests)

    @property
    def num_queued(self) -> int:
        """Requests that wait for a slot."""
        return len(self._queue)

    @property
    def num_free(self) -> int:
        """Slots that neither a sequence nor a queued request will take."""
        return max(0, self._num_slots - self.num_in_flight - self.num_queued)

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since the start."""
        return self._num_tokens

    def progress(self) -> dict[Hashable, int]:
        """Return the number of tokens sampled so far for each sequence in flight."""
        rows = range(self.num_in_flight)
        return {self._slots.requests[i].key: int(self._slots.length[i] - self._slots.prompt_length[i]) for i in rows}

    def submit(self, request: Request) -> None:
        """Queue a request; it takes a slot in the order of arrival.

        Raises:
            EngineError: the prompt is empty, leaves no room for a token, or a sampling parameter is out of range.
        """
        num = len(request.prompt_ids)
        if not 0 < num < self._max_length:
            raise EngineError(
                f"request {request.key}: prompt has {num} tokens, expected 1 to {self._max_length - 1} "
                f"(max_length {self._max_length}): shorten it or raise the engine's max_length"
            )
        if request.max_new_tokens < 1 or request.temperature < 0 or not 0 < request.top_p <= 1 or request.top_k < 0:
            raise EngineError(
                f"request {request.key}: expected max_new_tokens >= 1, temperature >= 0, 0 < top_p <= 1, top_k >= 0, got "
                f"{request.max_new_tokens}, {request.temperature}, {request.top_p}, {request.top_k}"
            )
        self._queue.append(request)
        self._queued_prompts[_prompt_key(request)] += 1

    def step(self) -> list[Finished]:
        """Draw one token for every sequence, newly placed ones included, and return those that ended.

        Raises:
            EngineError: the model's output is not finite.
        """
        with torch.inference_mode():
            parts = self._decode(), self._admit()
            logits = torch.cat([part for part in parts if part is not None]) if any(p is not None for p in parts) else None
            if logits is None:
                return []
            num, state = self.num_in_flight, self._slots
            index = state.length[:num] - state.prompt_length[:num]
            uniform = uniforms(self._run_seed, state.seed[:num], index)
            tokens, logprobs = sample(logits, uniform, state.temperature[:num], state.top_p[:num], state.top_k[:num])
            state.add(tokens, logprobs, self._version)
            self._num_tokens += num
            return self._finish(self._ended(tokens))

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> str:
        """Replace the weights between two steps; sequences in flight go on under the new version.

        Args:
            weights: by state-dict name, in the model's dtype.
            version: from now on the version of every sampled token.

        Returns:
            The digest, computed over what the model holds after loading.

        Raises:
            ContractError: the weights do not fit; the old ones stay.
        """
        load_weights(self._model, weights)
        self._passes.clear()  # prompts passed under the old weights; a new sequence starts under the new ones only
        self._version = version
        needed = set(np.unique(self._versions_in_flight()).tolist())
        self._digests = {v: d for v, d in self._digests.items() if v in needed}
        self._digests[version] = weights_digest(named_weights(self._model))
        return self._digests[version]

    def abort(self, keys: Iterable[Hashable]) -> list[Finished]:
        """Take requests out, queued or in flight, and return what they have so far; unknown keys are ignored."""
        wanted = set(keys)
        taken = [r for r in self._queue if r.key in wanted]
        self._queue = deque(r for r in self._queue if r.key not in wanted)
        self._queued_prompts.subtract(_prompt_key(r) for r in taken)
        self._drop_passes()
        rows = [i for i, r in enumerate(self._slots.requests) if r.key in wanted]
        finished = self._finish({row: "aborted" for row in rows})
        return finished + [self._never_started(request) for request in taken]

    def _decode(self) -> Tensor | None:
        """Run the last token of every active slot; return logits float32 [N, V], None when nothing is in flight."""
        num, state = self.num_in_flight, self._slots
        if not num:
            return None
        rows = len(state.length) if self._deterministic else num
        ids, at = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        ids[:num], at[:num] = state.last_token[:num], state.length[:num] - 1
        longest = int(at.max()) + 1
        self._store.reserve(longest, num)
        width = self._store.capacity
        if not self._deterministic:
            width = min(width, -(-longest // _POSITION_MULTIPLE) * _POSITION_MULTIPLE)
        positions = torch.from_numpy(at).to(self._device)
        slots = Decode(self._store, positions, width)
        return self._forward(torch.from_numpy(ids), positions, slots, None)[:num]

    def _admit(self) -> Tensor | None:
        """Give free slots to queued requests; return the logits float32 [M, V] of their prompts in slot order."""
        first = self.num_in_flight
        requests = [self._queue.popleft() for _ in range(min(self._num_slots - first, len(self._queue)))]
        if not requests:
            return None
        self._pass_prompts(requests)
        logits = []
        for done in self._passes:
            placed = [r for r in requests if _prompt_key(r) in done.rows]
            if placed:
                rows = [done.rows[_prompt_key(r)] for r in placed]
                self._store.place(self.num_in_flight, done.prompts, rows)
                self._slots.fill(self.num_in_flight, placed, time.time())
                logits.append(done.logits[rows])
        self._queued_prompts.subtract(_prompt_key(r) for r in requests)
        self._drop_passes()
        return torch.cat(logits)

    def _pass_prompts(self, requests: Sequence[Request]) -> None:
        """Run the prompts of `requests` that no kept pass holds, several of similar length at once."""
        prompts = {_prompt_key(r): np.asarray(r.prompt_ids, np.int64) for r in requests}
        known = {key for done in self._passes for key in done.rows}
        todo = sorted((item for item in prompts.items() if item[0] not in known), key=lambda item: len(item[1]))
        while todo:
            width, num_rows, num_taken = self._prompt_shape([len(ids) for _, ids in todo])
            taken, todo = todo[len(todo) - num_taken :], todo[: len(todo) - num_taken]
            self._passes.append(self._pass_batch(taken, width, num_rows))

    def _prompt_shape(self, lengths: Sequence[int]) -> tuple[int, int, int]:
        """Return (width, rows, prompts taken from the end) of the next pass over prompts of ascending lengths."""
        longest = lengths[-1]
        if self._deterministic:  # width from the prompt's own length, rows from the width
            width = max(16, 1 << (longest - 1).bit_length())
            num_rows = max(1, _PROMPT_TOKENS_DETERMINISTIC // width)
            alike = sum(length > width // 2 or width == 16 for length in lengths)
            return width, num_rows, min(num_rows, alike)
        width = -(-longest // 8) * 8
        num = max(1, min(len(lengths), _PROMPT_TOKENS // width))
        return width, num, num

    def _pass_batch(self, batch: Sequence[tuple[bytes, np.ndarray]], width: int, num_rows: int) -> _PromptPass:
        """Run one padded batch of prompts, [num_rows, width]."""
        ids = np.zeros((num_rows, width), np.int64)
        last = np.arange(num_rows) * width
        for row, (_, prompt) in enumerate(batch):
            ids[row, : len(prompt)] = prompt
            last[row] += len(prompt) - 1
        prompts = Prompts(num_rows, width, self._device)
        at = torch.arange(width, device=self._device).clamp(max=self._max_length - 1).repeat(num_rows)
        logits = self._forward(torch.from_numpy(ids.reshape(-1)), at, prompts, torch.from_numpy(last))
        num_layers = self._model.config.get_text_config().num_hidden_layers
        if len(prompts.layers) != num_layers:
            raise EngineError(
                f"{type(self._model).__name__} attended in {len(prompts.layers)} of {num_layers} layers through the "
                "attention interface: this model is not supported"
            )
        return _PromptPass(prompts, logits, {key: row for row, (key, _) in enumerate(batch)})

    def _forward(self, ids: Tensor, positions: Tensor, slots: Prompts | Decode, keep: Tensor | None) -> Tensor:
        """Run tokens [N] at positions [N]; return logits float32 of the tokens in `keep` (all when None)."""
        extra = {"logits_to_keep": keep.to(self._device)} if keep is not None and self._keeps_logits else {}
        out = self._model(
            input_ids=ids.to(self._device)[None], position_ids=positions[None], use_cache=False, slots=slots, **extra
        )
        logits = out.logits[0]
        if keep is not None and not extra:
            logits = logits[keep.to(self._device)]
        return logits.float()

    def _ended(self, tokens: np.ndarray) -> dict[int, FinishReason]:
        """Return the rows that end with the tokens just added, and why."""
        num, state = len(tokens), self._slots
        stopped = np.isin(tokens, self._eos_ids)
        for row in np.flatnonzero(state.has_own_stop[:num] & ~stopped):
            request = state.requests[row]
            stopped[row] = int(tokens[row]) in request.stop_ids or (
                request.stops is not None and request.stops(state.tokens[row, state.response(row)])
            )
        full = state.length[:num] >= state.limit[:num]
        return {int(row): "stop" if stopped[row] else "length" for row in np.flatnonzero(stopped | full)}

    def _finish(self, ended: Mapping[int, FinishReason]) -> list[Finished]:
        """Return what the ended rows hold, and close the gaps so that active slots come first."""
        finished = [self._collect(row, reason) for row, reason in ended.items()]
        num, state = self.num_in_flight, self._slots
        left = num - len(ended)
        targets = [row for row in sorted(ended) if row < left]
        sources = [row for row in range(left, num) if row not in ended]
        if targets:
            state.move(sources, targets)
            self._store.move(sources, targets, int(state.length[targets].max()))
        del state.requests[left:]
        return finished

    def _collect(self, row: int, reason: FinishReason) -> Finished:
        state = self._slots
        at = state.response(row)
        versions = state.versions[row, at].copy()
        return Finished(
            request=state.requests[row],
            response_ids=state.tokens[row, at].copy(),
            logprobs=state.logprobs[row, at].copy(),
            versions=versions,
            digests={v: self._digests[v] for v in np.unique(versions).tolist()},
            finish_reason=reason,
            started_at=float(state.started_at[row]),
            finished_at=time.time(),
        )

    def _never_started(self, request: Request) -> Finished:
        nothing = np.zeros(0, np.int32)
        return Finished(request, nothing, np.zeros(0, np.float32), nothing, {}, "aborted", 0.0, time.time())

    def _versions_in_flight(self) -> np.ndarray:
        state = self._slots
        rows = range(self.num_in_flight)
        return np.concatenate([np.zeros(0, np.int32), *(state.versions[row, state.response(row)] for row in rows)])

    def _drop_passes(self) -> None:
        """Forget prompt passes that no queued request needs."""
        self._queued_prompts = +self._queued_prompts
        self._passes = [done for done in self._passes if done.rows.keys() & self._queued_prompts.keys()]


def stop_texts(tokenizer: Any, texts: Sequence[str]) -> Callable[[Sequence[int]], bool]:
    """Return a check for `Request.stops`: does one of `texts` end with the newest token?

    Only the last tokens are decoded: enough for the longest text even at four tokens a character.
    """
    if not texts or not all(texts):
        raise ConfigError(f"stop texts {list(texts)} must be at least one, none of them empty")
    tail = 4 * max(len(text) for text in texts) + 8

    def stops(response_ids: Sequence[int]) -> bool:
        decoded = tokenizer.decode(list(response_ids[-tail:]))
        return any(text in decoded for text in texts)

    return stops


def _prompt_key(request: Request) -> bytes:
    return np.asarray(request.prompt_ids, np.int64).tobytes()
