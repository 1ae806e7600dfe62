"""Sequence packing: a forward pass that computes nothing for padding and shares common prompts.

All sequences of a microbatch lie one after the other in a single row [1, T], positions restarting with each
of them, so embeddings, norms and linear layers see real tokens only. A prompt that several samples share is
put in once, its responses after all the prompts. Attention alone needs to know where a sequence ends: it runs
on blocks of sequences of similar length, cut out of the row. Log-probabilities are computed for the asked
tokens only, some rows at a time, so the [T, V] logits never exist at once.

Works for decoder-only models of transformers that take their attention from its registry and treat positions
by `position_ids`; `verify_packing` compares with the plain forward pass and refuses the others.

Legend: T tokens in the row, N asked tokens, V vocabulary, H heads, D head width, M sequences of a block.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from data_contracts.errors import ConfigError
from models.logprobs import head_of, target_logprobs
from models.packed_attention import ATTENTION, Block, Packed
from models.samples import Sample

LENGTH_WASTE = 0.25
"""A block takes sequences down to this fraction below its longest one."""


def pack(samples: Sequence[Sample], *, share_prompts: bool = True) -> Packed:
    """Lay out samples in one row, asking for every token that the policy sampled.

    Tokens after the last sampled one are left out: nothing depends on them.
    """
    if not samples:
        raise ValueError("pack needs at least one sample")
    last = [int(np.flatnonzero(s.action_mask)[-1]) if s.action_mask.any() else 0 for s in samples]
    units = _by_prompt(samples) if share_prompts else [[i] for i in range(len(samples))]
    heads: list[tuple[np.ndarray, list[int]]] = []
    tails: list[tuple[int, int]] = []
    for number, members in enumerate(units):
        head = samples[members[0]].prompt_ids
        if len(members) == 1:
            head = np.concatenate([head, samples[members[0]].response_ids[: last[members[0]]]])
        else:
            tails += [(i, number) for i in members if last[i] > 0]
        heads.append((head, members))
    return _Layout(samples, last, heads, tails).packed()


def _by_prompt(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the indices of the samples of each distinct prompt, in order of appearance."""
    units: dict[bytes, list[int]] = {}
    for i, sample in enumerate(samples):
        units.setdefault(np.asarray(sample.prompt_ids, np.int64).tobytes(), []).append(i)
    return list(units.values())


class _Layout:
    """Places heads (a prompt, or a whole sequence that shares nothing) and then the tails of shared prompts."""

    def __init__(
        self,
        samples: Sequence[Sample],
        last: list[int],
        heads: list[tuple[np.ndarray, list[int]]],
        tails: list[tuple[int, int]],
    ) -> None:
        self.samples, self.last = samples, last
        self.heads, self.tails = heads, tails
        self.head_start = np.zeros(len(heads), np.int64)
        self.first_row = np.zeros(len(samples), np.int64)  # row that predicts a sample's first response token
        self.tail_start = np.zeros(len(samples), np.int64)  # row of its first response token
        self.ids: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.rows = 0

    def packed(self) -> Packed:
        blocks = [*self._place_heads(), *self._place_tails()]
        predicted_at, targets, temperature = self._asked()
        plain = not temperature.size or bool((temperature == 1).all())
        return Packed(
            input_ids=torch.from_numpy(np.concatenate(self.ids).astype(np.int64))[None],
            position_ids=torch.from_numpy(np.concatenate(self.positions))[None],
            blocks=tuple(blocks),
            predicted_at=torch.from_numpy(predicted_at),
            targets=torch.from_numpy(targets),
            temperature=None if plain else torch.from_numpy(temperature),
        )

    def _place(self, ids: np.ndarray, first_position: int) -> int:
        start = self.rows
        self.ids.append(ids)
        self.positions.append(np.arange(first_position, first_position + len(ids), dtype=np.int64))
        self.rows += len(ids)
        return start

    def _place_heads(self) -> list[Block]:
        lengths = np.array([len(ids) for ids, _ in self.heads])
        order = np.argsort(-lengths, kind="stable")
        for unit in order.tolist():
            ids, members = self.heads[unit]
            start = self.head_start[unit] = self._place(ids, 0)
            for i in members:
                self.first_row[i] = start + len(self.samples[i].prompt_ids) - 1
                self.tail_start[i] = start + len(self.samples[i].prompt_ids)
        return [_causal_block(lengths[order[a:b]]) for a, b in _similar(lengths[order])]

    def _place_tails(self) -> list[Block]:
        if not self.tails:
            return []
        members = np.array([i for i, _ in self.tails])
        prompts = self.head_start[[unit for _, unit in self.tails]]
        lengths = np.array([self.last[i] for i in members])
        prompt_lengths = np.array([len(self.samples[i].prompt_ids) for i in members])
        order = np.lexsort((np.arange(len(members)), -prompt_lengths, -lengths))
        for at in order.tolist():
            i = int(members[at])
            self.tail_start[i] = self._place(self.samples[i].response_ids[: self.last[i]], int(prompt_lengths[at]))
        starts = self.tail_start[members]
        return [
            _tail_block(lengths[o], starts[o], prompt_lengths[o], prompts[o])
            for a, b in _similar(lengths[order])
            for o in [order[a:b]]
        ]

    def _asked(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        predicted_at, targets, temperature = [], [], []
        for i, sample in enumerate(self.samples):
            at = np.flatnonzero(sample.action_mask)
            predicted_at.append(np.where(at == 0, self.first_row[i], self.tail_start[i] + at - 1))
            targets.append(sample.response_ids[at])
            temperature.append(np.full(len(at), sample.temperature, np.float32))
        return (
            np.concatenate(predicted_at).astype(np.int64),
            np.concatenate(targets).astype(np.int64),
            np.concatenate(temperature),
        )


def _similar(descending: np.ndarray) -> list[tuple[int, int]]:
    """Cut lengths that descend into runs (start, stop) of similar ones."""
    runs, start = [], 0
    for i in range(1, len(descending) + 1):
        if i == len(descending) or descending[i] < (1 - LENGTH_WASTE) * descending[start]:
            runs.append((start, i))
            start = i
    return runs


def _padded(lengths: np.ndarray, starts: np.ndarray) -> Tensor:
    """Return rows [M * longest] of sequences at `starts`; the padding repeats a sequence's last row."""
    within = np.minimum(np.arange(lengths.max()), np.maximum(lengths[:, None] - 1, 0))
    return torch.from_numpy((starts[:, None] + within).reshape(-1))


def _queries(lengths: np.ndarray) -> tuple[Tensor | None, Tensor | None]:
    if (lengths == lengths[0]).all():
        return None, None
    starts = np.cumsum(lengths) - lengths
    real = np.arange(lengths.max()) < lengths[:, None]
    return _padded(lengths, starts), torch.from_numpy(np.flatnonzero(real))


def _causal_block(lengths: np.ndarray) -> Block:
    # padding stands behind the real tokens, so causality alone hides it
    query_index, valid = _queries(lengths)
    return Block(int(lengths.sum()), (len(lengths), int(lengths.max())), query_index, valid, None, None, None)


def _tail_block(lengths: np.ndarray, starts: np.ndarray, prompt_lengths: np.ndarray, prompts: np.ndarray) -> Block:
    query_index, valid = _queries(lengths)
    shape = (len(lengths), int(lengths.max()))
    of_prompt = _padded(prompt_lengths, prompts).view(shape[0], -1)
    own = _padded(lengths, starts).view(shape)
    causal = np.tri(shape[1], dtype=bool)
    seen = np.arange(of_prompt.shape[1]) < prompt_lengths[:, None]
    if seen.all():
        seen = seen[:1]
    mask = np.concatenate(
        [
            np.broadcast_to(seen[:, None, None, :], (len(seen), 1, shape[1], seen.shape[1])),
            np.broadcast_to(causal, (len(seen), 1, *causal.shape)),
        ],
        axis=-1,
    )
    return Block(
        num_rows=int(lengths.sum()),
        shape=shape,
        query_index=query_index,
        valid=valid,
        key_index=torch.cat([of_prompt, own], 1).view(-1),
        mask=torch.from_numpy(mask),
        prompt_lengths=torch.from_numpy(prompt_lengths),
    )


def packed_logprobs(model: PreTrainedModel, packed: Packed, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of every asked token, [N] float32 each, with gradient.

    They are those of the distribution sampled from: the logits are divided by the sample's temperature. The
    entropy carries a gradient only with `entropy_grad`.
    """
    packed = packed.to(model.device)
    return hidden_logprobs(model, packed_hidden(model, packed), packed, entropy_grad=entropy_grad)


def hidden_logprobs(
    model: PreTrainedModel, hidden: Tensor, packed: Packed, *, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """Return what `packed_logprobs` does, from what `packed_hidden` returned; `packed` is on the model's device."""
    return target_logprobs(hidden, head_of(model), packed.targets, packed.temperature, entropy_grad=entropy_grad)


def packed_hidden(model: PreTrainedModel, packed: Packed) -> Tensor:
    """Return the last hidden state from which each asked token is predicted, [N, D] in the model's format.

    The model is left with packed attention as its attention, which without a packed row is the sdpa of transformers.
    """
    if model.config._attn_implementation != ATTENTION:
        model.set_attn_implementation(ATTENTION)
    packed = packed.to(model.device)
    # A mask of four dimensions is taken as ready-made; none is built, and packed_attention looks at `packed`.
    unused = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=packed.input_ids.device)
    hidden = model.base_model(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        attention_mask=unused,
        use_cache=False,
        packed=packed,
    ).last_hidden_state[0]
    return hidden.index_select(0, packed.predicted_at)


def microbatches(samples: Sequence[Sample], tokens: int) -> list[list[int]]:
    """Split samples into lists of indices whose packed rows hold at most `tokens` each.

    Longest first, samples of one prompt together, in an order that depends on the samples alone. The samples of
    a prompt are split only if they do not fit together; a sample longer than `tokens` is alone.
    """
    units = [
        (len(samples[members[0]].prompt_ids), sorted(members, key=lambda i: -len(samples[i].response_ids)))
        for members in _by_prompt(samples)
    ]
    batches: list[list[int]] = []
    room = 0
    for prompt, members in sorted(units, key=lambda unit: -unit[0] - len(samples[unit[1][0]].response_ids)):
        lengths = [len(samples[i].response_ids) for i in members]
        if room < prompt + sum(lengths) <= tokens:
            room = 0  # they fit together, but no longer here
        due = prompt  # tokens of the prompt that this microbatch does not hold yet
        for i, length in zip(members, lengths, strict=True):
            if room < due + length:
                batches.append([])
                room, due = tokens, prompt
            batches[-1].append(i)
            room -= due + length
            due = 0
    return batches


def even_microbatches(samples: Sequence[Sample], tokens: int, ranks: int) -> list[list[int]]:
    """Split samples as `microbatches` does, into a number that `ranks` divides where it can, of similar sizes."""
    batches = microbatches(samples, tokens)
    if ranks == 1 or not samples:
        return batches
    wanted = -(-len(batches) // ranks) * ranks
    prompts = sum(len(samples[members[0]].prompt_ids) for members in _by_prompt(samples))
    limit = -(-(prompts + sum(len(s.response_ids) for s in samples)) // wanted)
    while limit < tokens:
        found = microbatches(samples, limit)
        if len(found) <= wanted:
            return found
        limit += max(limit // 16, 1)
    return batches


def verify_packing(model: PreTrainedModel) -> None:
    """Compare packed and plain log-probabilities on a few short sequences.

    Raises:
        ConfigError: they differ, so this architecture cannot be packed.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, vocabulary, 4), rng.integers(0, vocabulary, 7)
    samples = [_probe(p, rng.integers(0, vocabulary, n)) for p, n in ((first, 3), (first, 5), (second, 2))]
    tolerance = 1e-4 if model.dtype == torch.float32 else 0.2
    try:
        with torch.no_grad():
            difference = (packed_logprobs(model, pack(samples))[0] - _plain_logprobs(model, samples)).abs().max().item()
    except (TypeError, ValueError) as cause:
        raise ConfigError(f"{type(model).__name__}: cannot be packed, choose another model: {cause}") from cause
    if not difference <= tolerance:
        raise ConfigError(
            f"{type(model).__name__}: cannot be packed, choose another model: packed log-probabilities differ from "
            f"the plain ones by {difference:.2g}, expected at most {tolerance}"
        )


def _probe(prompt: np.ndarray, response: np.ndarray) -> Sample:
    every = np.ones(len(response), bool)
    return Sample(prompt, response, every, np.zeros(len(response), np.float32), np.zeros(len(response), np.int32))


def _plain_logprobs(model: PreTrainedModel, samples: Sequence[Sample]) -> Tensor:
    found = []
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]))[None].to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(1, ids[0, len(sample.prompt_ids) :, None])[:, 0])
    return torch.cat(found)
