"""What curation's rules look at: the rows of one ticket that neither rollout nor reward failed, as arrays.

N rows of the group, M of its batch, T tokens, K bins of a sketch.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from data_contracts import features
from data_contracts.records import GroupRef


class Rows:
    """The rows of a scored batch, with what rules ask of them; each column is computed when first asked for."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    @cached_property
    def is_good(self) -> np.ndarray:
        """[M] bool: rollout and reward both succeeded."""
        finished = self.table.column("finish_reason").to_numpy() != "error"
        return finished & (self.table.column("reward_error").to_numpy() == "")

    @cached_property
    def reward(self) -> np.ndarray:
        """[M] float32, NaN where the row is not good."""
        return self.table.column("reward").to_numpy()

    @cached_property
    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """([T] ids of all responses, [M] their lengths)."""
        return features.ragged(self.table, "response_ids")

    @cached_property
    def num_tokens(self) -> np.ndarray:
        """[M] int64."""
        return self.tokens[1]

    @cached_property
    def is_truncated(self) -> np.ndarray:
        """[M] bool: cut off by the length limit."""
        return self.table.column("finish_reason").to_numpy() == "length"

    @cached_property
    def repetition(self) -> np.ndarray:
        """[M] float64: share of 4-grams that had occurred before."""
        return features.repetition(*self.tokens, 4)

    @cached_property
    def fingerprint(self) -> np.ndarray:
        """[M] uint64: equal for equal responses."""
        return features.fingerprints(*self.tokens)

    @cached_property
    def sketch(self) -> np.ndarray:
        """[M, K] uint64: MinHash of the 4-grams."""
        return features.sketch(*self.tokens, 4)


@dataclass(frozen=True)
class Group:
    """The good rows of one ticket. `places` counts from the group's first row; take columns with `of`."""

    ref: GroupRef
    rows: Rows
    places: np.ndarray
    """[N] int64, ascending."""

    @staticmethod
    def of_ref(ref: GroupRef, rows: Rows) -> "Group":
        """Return the good rows of a group of the batch, without those that its reference leaves out."""
        kept = rows.is_good[ref.first_row : ref.first_row + ref.num_rows].copy()
        kept[list(ref.left_out)] = False
        return Group(ref, rows, np.flatnonzero(kept))

    def of(self, column: np.ndarray) -> np.ndarray:
        """Return [N, ...]: the group's part of a column of `rows`."""
        return column[self.ref.first_row + self.places]

    def without(self, broken: np.ndarray) -> "Group":
        """Return the group without the rows marked in `broken`, [N] bool."""
        return replace(self, places=self.places[~broken])

    @property
    def joined_rewards(self) -> np.ndarray:
        """[J] float32: rewards of the rows of earlier tickets that are trained with the group."""
        return np.array([reward for joined in self.ref.joined for reward in joined.rewards], np.float32)

    @property
    def all_rewards(self) -> np.ndarray:
        """[N + J] float32: rewards of everything that would be trained, its own rows first."""
        return np.concatenate([self.of(self.rows.reward), self.joined_rewards])

    def keeping(self, kept: np.ndarray) -> "Group":
        """Return the group with only those rows, its own and joined ones, that are marked in `kept`, [N + J] bool."""
        left, end, joined = kept[self.places.size :], 0, []
        for one in self.ref.joined:
            mine, end = left[end : end + len(one.rows)], end + len(one.rows)
            pairs = [pair for pair, stays in zip(zip(one.rows, one.rewards, strict=True), mine, strict=True) if stays]
            if pairs:
                rows, rewards = zip(*pairs, strict=True)
                joined.append(one.model_copy(update={"rows": rows, "rewards": rewards}))
        ref = self.ref.model_copy(update={"joined": tuple(joined)})
        return replace(self, ref=ref, places=self.places[kept[: self.places.size]])

    @property
    def prompt_id(self) -> str:
        """Which prompt was answered."""
        return self.rows.table.column("prompt_id")[self.ref.first_row].as_py()

    @property
    def table(self) -> pa.Table:
        """The rows with all their columns; slower than arrays."""
        return self.rows.table.take(pa.array(self.ref.first_row + self.places))
