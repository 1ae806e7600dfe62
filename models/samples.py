"""A sampled response as the trainer takes it, and the way from the rows of a batch to it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to one prompt; per-token arrays have one entry per response token."""

    prompt_ids: np.ndarray
    """[P] int, at least one token."""
    response_ids: np.ndarray
    """[T] int."""
    action_mask: np.ndarray
    """[T] bool, True where the policy sampled the token."""
    behavior_logprobs: np.ndarray
    """[T] float32 nats, NaN where nothing was sampled."""
    policy_versions: np.ndarray
    """[T] int, version of the weights that sampled the token, -1 where nothing was sampled."""
    reward: float = 0.0
    ticket: int = -1
    sample: int = 0
    """Index in its group."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token everywhere."""
    finish_reason: str = "stop"
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    max_age: int | None = None
    """Bound in versions on the age of its tokens, in place of the run's; None takes the run's."""
    is_guided: bool = False
    """Whether it was sampled from another prompt, with guidance in it, than the one it is trained on."""
    branch_of: int = -1
    """Index in its group of the sample whose response it shares the beginning of; -1 for none."""
    branch_at: int = 0
    """Leading response tokens that it shares."""

    @property
    def is_greedy(self) -> bool:
        """Whether it is a baseline for the others of its group, and out of the loss: nothing in it was drawn."""
        return self.temperature == 0

    @property
    def name(self) -> str:
        """How a message calls this sample."""
        return f"ticket {self.ticket}, sample {self.sample}"


def good_rows(table: pa.Table) -> np.ndarray:
    """Return the numbers of the rows of a scored table whose rollout and reward both succeeded."""
    failed = table.column("finish_reason").to_numpy() == "error"
    failed |= (table.column("error").to_numpy() != "") | (table.column("reward_error").to_numpy() != "")
    return np.flatnonzero(~failed)


def samples_from_table(table: pa.Table) -> list[Sample]:
    """Return the good rows of a scored table in row order; error rows are left out.

    A row is good when neither its rollout nor its reward failed.
    """
    names = ("prompt_ids", "response_ids", "action_mask", "behavior_logprobs", "policy_versions")
    arrays = {name: _ragged(table.column(name)) for name in names}
    columns = {
        name: table.column(name).to_pylist()
        for name in (
            "ticket",
            "sample",
            "reward",
            "temperature",
            "finish_reason",
            "reward_names",
            "branch_of",
            "branch_at",
        )
    }
    guided = table.column("guided_prompt_ids").combine_chunks().value_lengths().to_numpy() > 0
    columns["reward_values"] = table.column("reward_values").to_pylist()
    return [
        Sample(
            *(arrays[name][row] for name in names),
            reward=columns["reward"][row],
            ticket=columns["ticket"][row],
            sample=columns["sample"][row],
            temperature=columns["temperature"][row],
            finish_reason=columns["finish_reason"][row],
            components=dict(zip(columns["reward_names"][row], columns["reward_values"][row], strict=True)),
            is_guided=bool(guided[row]),
            branch_of=columns["branch_of"][row],
            branch_at=columns["branch_at"][row],
        )
        for row in good_rows(table).tolist()
    ]


_ARRAYS = ("prompt_ids", "response_ids", "action_mask", "behavior_logprobs", "policy_versions")
_REST = tuple(field.name for field in fields(Sample) if field.name not in _ARRAYS)


def groups_to_bytes(groups: Sequence[Sequence[Sample]]) -> bytes:
    """Return the samples of a step as an Arrow stream, for another process; `groups_from_bytes` gives the same back."""
    samples = [sample for group in groups for sample in group]
    rest = [[_plain(getattr(sample, name)) for name in _REST] for sample in samples]
    metadata = {"rest": json.dumps(rest, default=float), "sizes": json.dumps([len(group) for group in groups])}
    columns = {name: _list_array([getattr(sample, name) for sample in samples]) for name in _ARRAYS}
    table = pa.table(columns).replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def groups_from_bytes(body: bytes) -> list[list[Sample]]:
    """Return the groups of `groups_to_bytes`."""
    table = pa.ipc.open_stream(body).read_all()
    metadata = {name.decode(): json.loads(text) for name, text in table.schema.metadata.items()}
    arrays = [_ragged(table.column(name)) for name in _ARRAYS]
    samples = iter(
        Sample(*values, **dict(zip(_REST, rest, strict=True)))
        for *values, rest in zip(*arrays, metadata["rest"], strict=True)
    )
    return [[next(samples) for _ in range(size)] for size in metadata["sizes"]]


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value


def _list_array(rows: Sequence[np.ndarray]) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, np.concatenate(rows) if rows else np.zeros(0, np.int32))


def _ragged(column: pa.ChunkedArray) -> Sequence[np.ndarray]:
    """Return one numpy view per row of a list column."""
    whole = column.combine_chunks()
    array = whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
    values = array.values.to_numpy(zero_copy_only=False)
    offsets = array.offsets.to_numpy()
    return [values[offsets[row] : offsets[row + 1]] for row in range(len(array))]
