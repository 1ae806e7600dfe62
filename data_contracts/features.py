"""What can be said of a trajectory in one number: scalars derived from the columns of a batch, all rows at once.

Statistics, curation rules and expectations look at these and never at lists of tokens. Whatever may be missing has a
count beside it: a mean that leaves NaN out hides it, `n_nonfinite_...` does not.

N rows, T tokens of all rows together, K = SKETCH_BINS.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.trajectory import PER_TOKEN, Stage

SKETCH_BINS = 64
NO_SHINGLE = np.uint64(2**64 - 1)
"""Stands in a bin of a sketch into which no shingle fell."""

FEATURES: dict[str, tuple[str, str]] = {
    "ticket": ("ticket number", "group of the row"),
    "num_prompt_tokens": ("tokens", "length of the prompt"),
    "num_tokens": ("tokens", "length of the response, inserted tokens included"),
    "num_sampled": ("tokens", "tokens of the response that the policy sampled"),
    "min_token_id": ("token id", "smallest id in the response; 0 when it is empty"),
    "max_token_id": ("token id", "largest id in the response; 0 when it is empty"),
    "n_nonfinite_logprobs": ("tokens", "sampled tokens whose log-probability is not a finite number"),
    "logprob_mean": ("nats", "mean log-probability of the sampled tokens; NaN when nothing was sampled"),
    "logprob_min": ("nats", "lowest log-probability of a sampled token; NaN when nothing was sampled"),
    "oldest_version": ("commits", "oldest weights that sampled a token; -1 when nothing was sampled"),
    "num_versions": ("count", "distinct weights that sampled"),
    "truncated": ("0 or 1", "1 when the response was cut off by the length limit"),
    "failed": ("0 or 1", "1 when the rollout of the row failed"),
    "repetition": ("fraction", "4-grams of the response that had occurred in it before; 0 when it has none"),
    "reward": ("reward", "NaN for a row without a reward"),
    "n_nonfinite_rewards": ("count", "1 when the reward is not finite although no error explains it"),
    "reward_failed": ("0 or 1", "1 when the row could not be judged"),
    "zero_variance": ("0 or 1", "1 when all good rows of the row's group have the same reward"),
}
"""Name to (unit, meaning). Those from `reward` on exist from stage scored on."""

SCORED_ONLY = ("reward", "n_nonfinite_rewards", "reward_failed", "zero_variance")

_NGRAM = 4
_MULTIPLIER = 0x9E3779B97F4A7C15


def derive(table: pa.Table, stage: Stage) -> pa.Table:
    """Return the features of every row of a checked table, [N] rows in the same order, no nulls."""
    response, lengths = ragged(table, "response_ids")
    starts = np.cumsum(lengths) - lengths
    sampled = ragged(table, "action_mask")[0]
    num_sampled = _sums(sampled.astype(np.int64), starts, lengths)
    logprobs = ragged(table, "behavior_logprobs")[0]
    finite = sampled & np.isfinite(logprobs)
    totals = _sums(np.where(finite, logprobs, 0).astype(np.float64), starts, lengths)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = totals / _sums(finite.astype(np.int64), starts, lengths)
    lowest = _reduce(np.minimum, np.where(finite, logprobs, np.inf), starts, lengths, np.inf)
    reasons = table.column("finish_reason").to_numpy()
    versions, num_used = ragged(table, "used_versions")
    columns: dict[str, np.ndarray] = {
        "ticket": table.column("ticket").to_numpy(),
        "num_prompt_tokens": ragged(table, "prompt_ids")[1],
        "num_tokens": lengths,
        "num_sampled": num_sampled,
        "min_token_id": _reduce(np.minimum, response, starts, lengths, 0).astype(np.int64),
        "max_token_id": _reduce(np.maximum, response, starts, lengths, 0).astype(np.int64),
        "n_nonfinite_logprobs": num_sampled - _sums(finite.astype(np.int64), starts, lengths),
        "logprob_mean": means,
        "logprob_min": np.where(np.isfinite(lowest), lowest, np.nan).astype(np.float64),
        "oldest_version": _reduce(np.minimum, versions, np.cumsum(num_used) - num_used, num_used, -1).astype(np.int64),
        "num_versions": num_used,
        "truncated": (reasons == "length").astype(np.int64),
        "failed": (reasons == "error").astype(np.int64),
        "repetition": repetition(response, lengths, _NGRAM),
    }
    if stage != "raw":
        columns |= _of_rewards(table, columns["failed"])
    return pa.table({name: pa.array(columns[name]) for name in FEATURES if name in columns})


def find_intact(table: pa.Table) -> np.ndarray:
    """Return [N] bool: rows from which features can be derived: nothing is null, per-token columns are equally long."""
    intact = np.ones(table.num_rows, bool)
    for column, field in zip(table.columns, table.schema, strict=True):
        if column.null_count:
            intact &= column.is_valid().to_numpy()
        if pa.types.is_list(field.type) and pc.list_flatten(column).null_count:  # pyright: ignore[reportAttributeAccessIssue]
            intact &= [row is None or None not in row for row in column.to_pylist()]
    lengths = [pc.fill_null(pc.list_value_length(table.column(name)), -1).to_numpy() for name in PER_TOKEN]  # pyright: ignore[reportAttributeAccessIssue]
    return intact & np.all([length == lengths[0] for length in lengths], axis=0)


def ragged(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a list column as (values of all rows in one array, lengths of the rows)."""
    column = table.column(name)
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)  # pyright: ignore[reportAttributeAccessIssue]
    return pc.list_flatten(column).to_numpy(), lengths  # pyright: ignore[reportAttributeAccessIssue]


def repetition(tokens: np.ndarray, lengths: np.ndarray, width: int) -> np.ndarray:
    """Return [N] float64: the share of a row's n-grams of `width` tokens that had occurred earlier in the row.

    Args:
        tokens: [T] ids of all rows, one after the other.
        lengths: [N] tokens of each row.
        width: n, from 1.
    """
    hashes, rows = shingles(tokens, lengths, width)
    # Rows in the upper bits, hashes in the lower ones: equal neighbours after sorting are repetitions within a row.
    row_bits = max(len(lengths) - 1, 1).bit_length()
    keys = np.sort((rows.astype(np.uint64) << np.uint64(64 - row_bits)) | (hashes >> np.uint64(row_bits)))
    again = np.zeros(keys.size, bool)
    again[1:] = keys[1:] == keys[:-1]
    repeated = np.bincount((keys[again] >> np.uint64(64 - row_bits)).astype(np.int64), minlength=len(lengths))
    return repeated / np.maximum(lengths - width + 1, 1)


def sketch(tokens: np.ndarray, lengths: np.ndarray, width: int) -> np.ndarray:
    """Return [N, K] uint64: for each row the smallest shingle hash in each of K bins.

    One-permutation MinHash (Li, Owen and Zhang 2012): two rows agree in about as large a share of their bins as they
    have of their shingles in common. See `resemblance`.
    """
    hashes, rows = shingles(tokens, lengths, width)
    bins = (hashes >> np.uint64(64 - (SKETCH_BINS - 1).bit_length())).astype(np.int64)
    smallest = np.full(len(lengths) * SKETCH_BINS, NO_SHINGLE)
    np.minimum.at(smallest, rows * SKETCH_BINS + bins, hashes)
    return smallest.reshape(len(lengths), SKETCH_BINS)


def resemblance(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return [A, B]: estimated Jaccard similarity of the shingles of each pair of sketches [A, K] and [B, K].

    Standard error about sqrt(s (1 - s) / K). Rows without any shingle resemble nothing.
    """
    same = left[:, None, :] == right[None, :, :]
    both_empty = (left[:, None, :] == NO_SHINGLE) & (right[None, :, :] == NO_SHINGLE)
    told = SKETCH_BINS - both_empty.sum(axis=2)
    return np.where(told > 0, (same & ~both_empty).sum(axis=2) / np.maximum(told, 1), 0.0)


def fingerprints(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return [N] uint64: equal for rows of equal tokens, and by chance for about one other pair in 2^64."""
    places = np.arange(tokens.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    mixed = _mix(tokens.astype(np.uint64) + _mix(places.astype(np.uint64) + np.uint64(1)))
    with np.errstate(over="ignore"):
        return _mix(_sums(mixed, np.cumsum(lengths) - lengths, lengths) + lengths.astype(np.uint64))


def shingles(tokens: np.ndarray, lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (uint64 hash, row) of every run of `width` tokens within a row; shorter rows have none."""
    count = max(tokens.size - width + 1, 0)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    whole = rows[:count] == rows[width - 1 :] if count else np.zeros(0, bool)
    ids = tokens.astype(np.uint64)
    hashes = np.zeros(count, np.uint64)
    for place in range(width):  # a polynomial in a fixed odd number, modulo 2^64
        hashes = hashes * np.uint64(_MULTIPLIER) + ids[place : place + count] + np.uint64(1)
    return _mix(hashes[whole]), rows[:count][whole]


def _of_rewards(table: pa.Table, failed: np.ndarray) -> dict[str, np.ndarray]:
    rewards = table.column("reward").to_numpy().astype(np.float64)
    unjudged = table.column("reward_error").to_numpy() != ""
    good = (failed == 0) & ~unjudged
    tickets = table.column("ticket").to_numpy()
    groups, group = np.unique(tickets, return_inverse=True)
    lowest, highest = np.full(len(groups), np.inf), np.full(len(groups), -np.inf)
    np.minimum.at(lowest, group[good], rewards[good])
    np.maximum.at(highest, group[good], rewards[good])
    return {
        "reward": rewards,
        "n_nonfinite_rewards": (~unjudged & ~np.isfinite(rewards)).astype(np.int64),
        "reward_failed": unjudged.astype(np.int64),
        "zero_variance": (lowest == highest)[group].astype(np.int64),
    }


def _mix(values: np.ndarray) -> np.ndarray:
    """Spread the entropy of 64-bit numbers over all their bits (finalizer of SplitMix64)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _sums(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return _reduce(np.add, values, starts, lengths, 0)


def _reduce(how: np.ufunc, values: np.ndarray, starts: np.ndarray, lengths: np.ndarray, empty: float) -> np.ndarray:
    """Return [N]: `how` over the values of each row, `empty` for rows without any."""
    result = np.full(len(lengths), empty, values.dtype if np.isfinite(empty) else np.float64)
    filled = lengths > 0
    if filled.any():  # starts of rows that have values, so that reduceat's stretches are exactly the rows
        result[filled] = how.reduceat(values, starts[filled])
    return result


def concatenate(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of all feature tables; those of one stage have the same columns."""
    return pa.concat_tables(list(tables))
