"""A sampled response as the trainer takes it, and the way from the rows of a batch to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
    """Divides the logits."""
    finish_reason: str = "stop"
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    max_age: int | None = None
    """Bound in versions on the age of its tokens, in place of the run's; None takes the run's."""

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
        )
    }
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
        )
        for row in good_rows(table).tolist()
    ]


def _ragged(column: pa.ChunkedArray) -> Sequence[np.ndarray]:
    """Return one numpy view per row of a list column."""
    whole = column.combine_chunks()
    array = whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
    values = array.values.to_numpy(zero_copy_only=False)
    offsets = array.offsets.to_numpy()
    return [values[offsets[row] : offsets[row + 1]] for row in range(len(array))]
