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
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_contracts.errors import ConfigError, EngineError
from models.digest import weights_digest
from models.policy import load_weights, named_weights
from models.requests import Finished, FinishReason, Request, SlotTable, check_request, never_started, stop_texts
from models.sampling import sample, uniforms
from models.slots import Decode, KeyValues, Prompts, route_attention

__all__ = ["Engine", "FinishReason", "Finished", "Request", "stop_texts"]

_ROW_MULTIPLE = 32  # element-wise kernels handle 32 floats at once; a shorter tail may differ in the last bit
_POSITION_MULTIPLE = 16
_SHORT_PROMPT = 16
_PROMPT_TOKENS = 2048  # of one pass, padding included
_PROMPT_TOKENS_DETERMINISTIC = 512


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
        if slots < 1:
            raise ConfigError(f"engine needs at least one slot, got {slots}")
        if deterministic and torch.get_num_threads() != 1:
            raise ConfigError(f"a deterministic engine needs one thread, got {torch.get_num_threads()}")
        route_attention(model)
        self._model = model.eval()
        self._device = next(model.parameters()).device
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._deterministic = deterministic
        self._max_length = _usable_length(model, max_length)
        self._vocab_size = model.config.get_text_config().vocab_size
        self._num_slots = slots
        num_rows = -(-slots // _ROW_MULTIPLE) * _ROW_MULTIPLE if deterministic else slots
        self._store = KeyValues(num_rows, self._max_length, fixed=deterministic)
        self._slots = SlotTable(num_rows, self._max_length)
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
            EngineError: the prompt is empty, leaves no room for a token or has ids outside of the vocabulary, or a
                sampling parameter is out of range.
        """
        check_request(request, max_length=self._max_length, vocab_size=self._vocab_size)
        self._queue.append(request)
        self._queued_prompts[request.prompt_key] += 1

    def step(self) -> list[Finished]:
        """Draw one token for every sequence, newly placed ones included, and return those that ended.

        Raises:
            EngineError: the model's output is not finite.
        """
        with torch.inference_mode():
            parts = [part for part in (self._decode(), self._admit()) if part is not None]
            if not parts:
                return []
            num, state = self.num_in_flight, self._slots
            index = state.length[:num] - state.prompt_length[:num]
            uniform = uniforms(self._run_seed, state.seed[:num], index)
            tokens, logprobs = sample(
                torch.cat(parts), uniform, state.temperature[:num], state.top_p[:num], state.top_k[:num]
            )
            state.add(tokens, logprobs, self._version)
            self._num_tokens += num
            return self._finish(state.ended(tokens, self._eos_ids))

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
        needed = self._slots.versions_in_use()
        self._digests = {old: digest for old, digest in self._digests.items() if old in needed}
        self._digests[version] = weights_digest(named_weights(self._model))
        return self._digests[version]

    def abort(self, keys: Iterable[Hashable]) -> list[Finished]:
        """Take requests out, queued or in flight, and return what they have so far; unknown keys are ignored."""
        wanted = set(keys)
        taken = [r for r in self._queue if r.key in wanted]
        self._queue = deque(r for r in self._queue if r.key not in wanted)
        self._leave_queue(taken)
        rows = [row for row, request in enumerate(self._slots.requests) if request.key in wanted]
        with torch.inference_mode():  # the slots' memory was made in this mode and may be written only in it
            finished = self._finish(dict.fromkeys(rows, "aborted"))
        return finished + [never_started(request) for request in taken]

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
        requests = list(islice(self._queue, self._num_slots - self.num_in_flight))
        if not requests:
            return None
        self._pass_prompts(requests)  # before anything is taken from the queue: a failure loses no request
        for _ in requests:
            self._queue.popleft()
        logits = []
        for done in self._passes:
            placed = [r for r in requests if r.prompt_key in done.rows]
            if placed:
                rows = [done.rows[r.prompt_key] for r in placed]
                self._store.place(self.num_in_flight, done.prompts, rows)
                self._slots.fill(self.num_in_flight, placed, time.time())
                logits.append(done.logits.index_select(0, torch.as_tensor(rows, device=self._device)))
        self._leave_queue(requests)
        return torch.cat(logits)

    def _pass_prompts(self, requests: Sequence[Request]) -> None:
        """Run the prompts of `requests` that no kept pass holds, several of similar length at once."""
        prompts = {r.prompt_key: np.asarray(r.prompt_ids, np.int64) for r in requests}
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
            width = max(_SHORT_PROMPT, 1 << (longest - 1).bit_length())
            num_rows = max(1, _PROMPT_TOKENS_DETERMINISTIC // width)
        else:
            width = -(-longest // 8) * 8
            num_rows = max(1, _PROMPT_TOKENS // width)
        alike = sum(length > width // 2 or width <= _SHORT_PROMPT for length in lengths)
        num_taken = min(num_rows, alike)
        return width, num_rows if self._deterministic else num_taken, num_taken

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

    def _finish(self, ended: Mapping[int, FinishReason]) -> list[Finished]:
        """Return what the ended rows hold, and close the gaps so that active slots come first."""
        finished = [self._slots.collect(row, reason, self._digests) for row, reason in ended.items()]
        sources, targets = self._slots.close_gaps(ended)
        if targets:
            self._store.move(sources, targets, int(self._slots.length[targets].max()))
        return finished

    def _leave_queue(self, requests: Iterable[Request]) -> None:
        """Forget queued requests, and the prompt passes that no other queued request needs."""
        for request in requests:
            self._queued_prompts[request.prompt_key] -= 1
            if not self._queued_prompts[request.prompt_key]:
                del self._queued_prompts[request.prompt_key]
        self._passes = [done for done in self._passes if any(key in self._queued_prompts for key in done.rows)]


def _usable_length(model: Any, wanted: int | None) -> int:
    """Return the engine's max_length: what is wanted, or the model's limit when that is None."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if wanted is None and limit is None:
        raise ConfigError("the model's config names no max_position_embeddings: set the engine's max_length")
    if wanted is not None and (wanted < 2 or (limit is not None and wanted > limit)):
        raise ConfigError(f"engine max_length {wanted}: expected 2 to {limit}, the model's number of positions")
    return int(wanted or limit)  # pyright: ignore[reportArgumentType]
