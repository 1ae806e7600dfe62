"""Attention over sequences that lie packed in one row, registered with transformers.

A packed row holds many sequences one after the other. Blocks of sequences of similar length are cut out of it,
padded to the longest, and attend at once. Legend: T tokens in the row, N asked tokens, H heads, D head width,
M sequences of a block.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from data_contracts.errors import ConfigError

ATTENTION = "rollflow_packed"
"""Name of the packed attention in the registry of transformers."""


@dataclass(frozen=True, slots=True)
class Block:
    """M sequences whose attention runs at once. Its queries are the next rows of the packed row."""

    num_rows: int
    """Rows of the packed row that are its queries."""
    shape: tuple[int, int]
    """(M, longest query length)."""
    query_index: Tensor | None
    """[M * longest] rows within the block's own rows; None when all lengths are equal."""
    valid: Tensor | None
    """[num_rows] places of the real queries among M * longest; None when all lengths are equal."""
    key_index: Tensor | None
    """[M * keys] rows of the whole row; None when keys are the queries' own rows."""
    mask: Tensor | None
    """[M or 1, 1, longest, keys] bool, True where a query may look; None for a causal block."""
    prompt_lengths: Tensor | None
    """[M] of the prompts whose rows come first among the keys; None for a causal block."""

    def windowed(self, window: int) -> Tensor:
        """Return the mask [M or 1, 1, longest, keys] of queries that see the last `window` positions only."""
        rows = torch.arange(self.shape[1])
        if self.mask is None or self.prompt_lengths is None:
            distance = rows[:, None] - rows
            return ((distance >= 0) & (distance < window))[None, None]
        prompts = self.prompt_lengths.cpu()[:, None]
        of_prompt = torch.arange(self.mask.shape[-1] - len(rows)).expand(len(prompts), -1)
        keys, queries = torch.cat([of_prompt, prompts + rows], 1), prompts + rows
        near = queries[:, :, None] - keys[:, None, :] < window
        return self.mask & near[:, None].to(self.mask.device)


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed row and the tokens whose log-probabilities are asked for."""

    input_ids: Tensor
    """[1, T] int64."""
    position_ids: Tensor
    """[1, T] int64."""
    blocks: tuple[Block, ...]
    predicted_at: Tensor
    """[N] row whose output predicts the token."""
    targets: Tensor
    """[N] int64 token ids, sample by sample in the order given."""
    temperature: Tensor | None
    """[N] float32; None when it is 1 everywhere."""

    @property
    def num_rows(self) -> int:
        """T, tokens that go through the linear layers."""
        return self.input_ids.shape[1]

    def to(self, device: torch.device) -> "Packed":
        """Return this layout on a device; itself if it is there."""
        if self.input_ids.device == device:
            return self
        return _moved(self, device, blocks=tuple(_moved(block, device) for block in self.blocks))


def _moved(value: Any, device: torch.device, **changes: Any) -> Any:
    tensors = {f.name: getattr(value, f.name) for f in fields(value) if isinstance(getattr(value, f.name), Tensor)}
    return replace(value, **{name: tensor.to(device) for name, tensor in tensors.items()}, **changes)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: Packed | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend within the sequences of a packed row [1, H, T, D]; without `packed`, as the sdpa of transformers.

    Raises:
        ConfigError: the model asks for something that packing does not do.
    """
    if packed is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    odd = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if odd:
        raise ConfigError(f"packed attention: expected plain attention, got a model with {odd}; choose another model")
    window = kwargs.get("sliding_window")
    if window is not None and int(packed.position_ids.max()) < window:
        window = None
    rows = [t[0].transpose(0, 1) for t in (query, key, value)]  # [T, H, D] each
    sizes = [block.num_rows for block in packed.blocks]
    parts = zip(packed.blocks, *(t.split(sizes) for t in rows), strict=True)
    outputs = [_attend(block, (q, k, v), (rows[1], rows[2]), scaling, window) for block, q, k, v in parts]
    return torch.cat(outputs)[None], None


def _attend(
    block: Block, own: tuple[Tensor, ...], row: tuple[Tensor, ...], scaling: float | None, window: int | None
) -> Tensor:
    """Return the outputs [rows of the block, H, D].

    Args:
        block: which rows look at which.
        own: queries, keys and values [rows of the block, H, D].
        row: keys and values [T, H, D] of the whole packed row.
        scaling: of the products; None is one over the root of D.
        window: positions that a query sees; None is all before it.
    """
    num, longest = block.shape
    if block.query_index is not None:
        own = tuple(t.index_select(0, block.query_index) for t in own)
    if block.key_index is not None:
        own = (own[0], *(t.index_select(0, block.key_index) for t in row))
    q, k, v = (t.view(num, -1, *t.shape[1:]).transpose(1, 2) for t in own)
    mask = block.mask if window is None else block.windowed(window)
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    out = out.transpose(1, 2).reshape(num * longest, out.shape[1], out.shape[3])
    return out if block.valid is None else out.index_select(0, block.valid)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)
