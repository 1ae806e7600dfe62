"""Keys and values of the sequences in flight, and the attention over them.

A model of the `transformers` library calls one function for attention, chosen by name, and hands it every extra
keyword of the forward call. `route_attention` puts the function below in that place; the engine passes the object
that knows which token belongs to which slot as the keyword `slots`. So any decoder-only model works that uses
this interface, with rotary or learned positions, grouped queries, sliding windows and soft-capped scores.

All tokens of a forward pass lie in one row (batch 1, N tokens); the `slots` object gives them their shape back:

    Prompts   R prompts, padded on the right to C tokens; each attends causally to itself
    Decode    one new token for each of the first N slots; each attends to what its slot holds

Legend: S slots, N tokens of a forward pass, R prompts, C tokens of the longest, L positions, H query heads,
M key-value heads, G = H / M, D width of a head.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from data_contracts.errors import ConfigError, EngineError

ATTENTION_NAME = "rollflow_slots"
_GROWTH_POSITIONS = 16
_COUPLED_ROPES = {"dynamic", "longrope"}


class Score(NamedTuple):
    """How a layer scores a key, beside the dot product."""

    scaling: float
    window: int | None
    """Positions a query sees, itself included; None sees all."""
    softcap: float | None
    """Scores are squashed into (-softcap, softcap) by tanh; None leaves them."""


class KeyValues:
    """The keys and values of all slots, one pair of tensors [S, M, L, D] per layer, made when first written.

    Positions are allocated for the longest sequence in flight and grow in steps, so that short sequences lie
    close together in memory: whether a step's keys fit the processor's cache decides the speed of small models.
    With `fixed`, positions are allocated for the maximum at once, so that shapes never change.
    """

    def __init__(self, num_slots: int, max_length: int, *, fixed: bool) -> None:
        self.num_slots = num_slots
        self.max_length = max_length
        self.fixed = fixed
        self.capacity = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, num_positions: int, num_used: int) -> None:
        """Make room for `num_positions` in every slot, keeping the first `num_used` slots."""
        if num_used == 0 and not self.fixed and num_positions < self.capacity // 2:
            self.layers.clear()
            self.capacity = 0
        if num_positions <= self.capacity:
            return
        wanted = self.max_length if self.fixed else num_positions + num_positions // 4
        capacity = min(self.max_length, -(-wanted // _GROWTH_POSITIONS) * _GROWTH_POSITIONS)
        for index, (keys, values) in self.layers.items():
            grown = self._empty(keys, capacity), self._empty(values, capacity)
            for old, new in zip((keys, values), grown, strict=True):
                new[:num_used, :, : self.capacity] = old[:num_used]
            self.layers[index] = grown
        self.capacity = capacity

    def place(self, first_slot: int, prompts: "Prompts", rows: Sequence[int]) -> None:
        """Copy the keys and values of prompts `rows` into the slots from `first_slot` on, one each."""
        width = min(prompts.width, self.max_length)  # what lies beyond is padding
        self.reserve(width, first_slot)
        source = torch.as_tensor(rows, device=prompts.device)
        slots = slice(first_slot, first_slot + len(rows))
        for index, pair in prompts.layers.items():
            if index not in self.layers:
                self.layers[index] = self._empty(pair[0], self.capacity), self._empty(pair[1], self.capacity)
            for own, new in zip(self.layers[index], pair, strict=True):
                own[slots, :, :width] = new[:, :, :width].index_select(0, source)

    def move(self, sources: Sequence[int], targets: Sequence[int], num_positions: int) -> None:
        """Copy the first positions of some slots over others; the two lists share no slot."""
        for pair in self.layers.values():
            for own in pair:
                used = own[:, :, :num_positions]
                at, of = (torch.as_tensor(slots, device=own.device) for slots in (targets, sources))
                used.index_copy_(0, at, used.index_select(0, of))

    def _empty(self, like: Tensor, capacity: int) -> Tensor:
        # Zeros, not garbage: a masked position still meets a weight of 0, and 0 times NaN is NaN.
        return like.new_zeros(self.num_slots, like.shape[1], capacity, like.shape[3])


class Prompts:
    """The forward pass over R prompts padded to C tokens; keeps their keys and values [R, M, C, D]."""

    def __init__(self, num_prompts: int, width: int, device: torch.device) -> None:
        self.num_prompts = num_prompts
        self.width = width
        self.device = device
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, score: Score) -> Tensor:
        """Return the attention's output [N, H, D] for queries [H, N, D], keys and values [M, N, D]."""
        q, k, v = (x.unflatten(1, (self.num_prompts, self.width)).transpose(0, 1) for x in (query, key, value))
        self.layers[layer] = k, v = k.contiguous(), v.contiguous()
        plain = score.softcap is None and (score.window is None or score.window >= self.width)
        if plain:
            grouped = q.shape[1] != k.shape[1]
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=score.scaling, enable_gqa=grouped)
        else:
            out = _attend(q, k, v, self._mask(score.window), score)
        return out.transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int | None) -> Tensor:
        """Return [C, C], 0 where a query sees a key and -inf elsewhere."""
        if window not in self._masks:
            at = torch.arange(self.width, device=self.device)
            self._masks[window] = _mask(at[:, None], at, window)
        return self._masks[window]


class Decode:
    """The forward pass over one new token in each of the first N slots."""

    def __init__(self, store: KeyValues, positions: Tensor, num_positions: int) -> None:
        """Prepare for tokens at `positions` [N] of their sequences, all below `num_positions` (L)."""
        self.store = store
        self.positions = positions
        self.num_positions = num_positions
        self._slots = torch.arange(positions.shape[0], device=positions.device)
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, score: Score) -> Tensor:
        """Store keys and values [M, N, D]; return the attention's output [N, H, D] for queries [H, N, D]."""
        keys, values = self.store.layers[layer]
        keys[self._slots, :, self.positions] = key.transpose(0, 1)
        values[self._slots, :, self.positions] = value.transpose(0, 1)
        num = self.positions.shape[0]
        k, v = keys[:num, :, : self.num_positions], values[:num, :, : self.num_positions]
        q = query.transpose(0, 1).unsqueeze(2)  # [N, H, 1, D]
        return _attend(q, k, v, self._mask(score.window), score).squeeze(2)

    def _mask(self, window: int | None) -> Tensor:
        """Return [N, 1, 1, L], 0 where the new token sees a position and -inf elsewhere."""
        if window not in self._masks:
            at = torch.arange(self.num_positions, device=self.positions.device)
            self._masks[window] = _mask(self.positions[:, None], at, window)[:, None, None]
        return self._masks[window]


def slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    slots: Prompts | Decode | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend for one layer: query [1, H, N, D], key and value [1, M, N, D] to output [1, N, H, D].

    Raises:
        EngineError: called outside an engine, or the layer asks for something that is not supported.
    """
    if slots is None:
        raise EngineError("this model belongs to an engine and cannot run by itself: make a copy of it")
    for name in ("s_aux", "position_bias"):
        if others.get(name) is not None:
            raise EngineError(f"{type(module).__name__} uses {name}, which this engine's attention does not support")
    score = Score(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    return slots.attend(module.layer_idx, query[0], key[0], value[0], score).unsqueeze(0), None


def route_attention(model: Any) -> None:
    """Make `model` attend through slots from now on; it then runs only inside an engine.

    Raises:
        ConfigError: the model's code does not use the attention interface.
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"{type(model).__name__} does not use the transformers attention interface: choose another model or engine"
        )
    coupled = _COUPLED_ROPES & set(_rope_types(getattr(model.config.get_text_config(), "rope_parameters", None)))
    if coupled:
        raise ConfigError(
            f"{type(model).__name__} has rotary positions of type {sorted(coupled)[0]}, which change with the longest "
            "sequence of a batch: choose another model or engine"
        )
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, slot_attention)
    model.set_attn_implementation(ATTENTION_NAME)


def _rope_types(parameters: Any) -> list[str]:
    """Return every rope_type in a config's rotary parameters, which may be nested by layer type."""
    if not isinstance(parameters, dict):
        return []
    inner = [name for value in parameters.values() for name in _rope_types(value)]
    return inner + [str(parameters["rope_type"])] if "rope_type" in parameters else inner


def _mask(query_at: Tensor, key_at: Tensor, window: int | None) -> Tensor:
    """Return 0 where a query may see a key and -inf elsewhere, broadcast over both positions."""
    hidden = key_at > query_at
    if window is not None:
        hidden = hidden | (key_at <= query_at - window)
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -math.inf)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, score: Score) -> Tensor:
    """Return softmax(q k + mask) v for q [N, H, T, D], k and v [N, M, L, D]; scores in float32."""
    num, heads, steps, _ = q.shape
    grouped = (num, k.shape[1], heads // k.shape[1] * steps)
    # Queries of one key-value head lie together, so keys are not repeated for each of them.
    weights = torch.matmul((q * score.scaling).reshape(*grouped, -1), k.transpose(2, 3)).float()
    if score.softcap is not None:
        weights = torch.tanh(weights / score.softcap) * score.softcap
    weights = weights.view(num, k.shape[1], -1, steps, k.shape[2]) + mask.unsqueeze(-3)
    weights = torch.softmax(weights, dim=-1).to(v.dtype)
    return torch.matmul(weights.view(*grouped, -1), v).view(num, heads, steps, -1)
