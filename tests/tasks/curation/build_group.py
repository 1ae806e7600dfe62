"""Groups of scored rows for tests of curation."""

from collections.abc import Mapping, Sequence

import numpy as np

from data_contracts.records import BatchRef, GroupRef
from data_contracts.trajectory import check, make_table
from tasks.curation.group import Group, Rows

BATCH = BatchRef(key="batch/0.arrow", num_bytes=1, sha256="0" * 64, num_rows=8)


def row(ticket: int, sample: int, tokens: Sequence[int], **changes: object) -> dict[str, object]:
    """Return a good scored row with these response tokens; `changes` replace columns."""
    count = len(tokens)
    return {
        "ticket": ticket, "attempt": 0, "sample": sample, "prompt_id": f"addition/{ticket}", "env": "addition",
        "seed": 0, "prompt_ids": [1, 2], "response_ids": list(tokens), "action_mask": [True] * count,
        "behavior_logprobs": np.full(count, -0.5, np.float32), "policy_versions": np.zeros(count, np.int32),
        "used_versions": [0] if count else [], "used_digests": ["float32:0"] if count else [],
        "finish_reason": "stop", "error": "", "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 4096,
        "engine": "torch", "dtype": "float32", "queued_at": 0.0, "started_at": 0.0, "finished_at": 0.0,
        "response_text": "", "reward": float(sample % 2), "reward_names": ["correct"],
        "reward_values": [float(sample % 2)], "verifier": "v@1", "reward_error": "",
    } | changes  # fmt: skip


def group_of(responses: Sequence[Sequence[int]], changes: Mapping[int, Mapping[str, object]] | None = None) -> Group:
    """Return the group of ticket 0 with these responses; `changes` replace columns of single rows."""
    rows = [row(0, i, tokens, **(changes or {}).get(i, {})) for i, tokens in enumerate(responses)]
    table = check(make_table(rows, "scored"), "scored")
    return Group.of_ref(GroupRef(ticket=0, attempt=0, first_row=0, num_rows=len(rows)), Rows(table))


def different(num_rows: int, num_tokens: int = 40, seed: int = 0) -> list[list[int]]:
    """Return responses that have nothing in common."""
    return np.random.default_rng(seed).integers(0, 50_000, (num_rows, num_tokens)).tolist()
