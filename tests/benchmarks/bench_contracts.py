"""How long the checks on data take: `python tests/benchmarks/bench_contracts.py`.

Processor seconds of one core for the structural gate and the whole chain of curation on 10,000 trajectories of 500
tokens (limit: 2 s), and for the features that expectations look at.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from data_contracts import features, trajectory
from data_contracts.config import CurateConfig, RunConfig
from data_contracts.records import BatchRef, GroupRef, Scored
from infra.store import open_store
from tasks.curate import judge_batch
from tasks.curation.given import Judge

LIMIT_S = 2.0
RULES = (
    {"type": "length", "max_tokens": 4000},
    {"type": "truncation"},
    {"type": "repetition"},
    {"type": "duplicates"},
    {"type": "duplicates", "similarity": 0.8},
    {"type": "contrast", "keep": 0.75},
)


def build_batch(num_rows: int, num_tokens: int, num_samples: int = 8) -> tuple[pa.Table, Scored]:
    """Return a scored batch of random responses, and the record that names it."""
    rng = np.random.default_rng(0)

    def lists(values: pa.Array, length: int) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array(np.arange(num_rows + 1) * length, pa.int32()), values)

    numbers, total = np.arange(num_rows), num_rows * num_tokens
    constants = {
        "attempt": 0, "env": "math", "finish_reason": "stop", "error": "", "temperature": 1.0, "top_p": 1.0,
        "top_k": 0, "max_new_tokens": 4096, "engine": "torch", "dtype": "float32", "queued_at": 0.0,
        "started_at": 0.0, "finished_at": 0.0, "response_text": "", "verifier": "v@1", "reward_error": "",
    }  # fmt: skip
    columns: dict[str, Any] = {
        name: [value] * num_rows for name, value in (constants | trajectory.SINCE_VERSION_2).items()
    } | {
        "ticket": numbers // num_samples,
        "sample": numbers % num_samples,
        "prompt_id": [f"math/{number // num_samples}" for number in numbers],
        "seed": numbers,
        "prompt_ids": lists(pa.array(rng.integers(0, 32_000, num_rows * 50, dtype=np.int32)), 50),
        "response_ids": lists(pa.array(rng.integers(0, 32_000, total, dtype=np.int32)), num_tokens),
        "action_mask": lists(pa.array(np.ones(total, bool)), num_tokens),
        "behavior_logprobs": lists(pa.array(-rng.random(total, dtype=np.float32)), num_tokens),
        "policy_versions": lists(pa.array(np.full(total, 3, np.int32)), num_tokens),
        "used_versions": lists(pa.array(np.full(num_rows, 3, np.int32)), 1),
        "used_digests": lists(pa.array(["digest"] * num_rows), 1),
        "reward": rng.random(num_rows),
        "reward_names": lists(pa.array(["correct"] * num_rows), 1),
        "reward_values": lists(pa.array(rng.random(num_rows), pa.float32()), 1),
    }
    schema = trajectory.SCHEMAS["scored"]
    arrays = [v if isinstance(v := columns[f.name], pa.Array) else pa.array(v, f.type) for f in schema]
    table = pa.table([array.cast(f.type) for array, f in zip(arrays, schema, strict=True)], schema=schema)
    groups = [
        GroupRef(ticket=first // num_samples, attempt=0, first_row=first, num_rows=num_samples)
        for first in range(0, num_rows, num_samples)
    ]
    batch = BatchRef(key="batch/0.arrow", num_bytes=1, sha256="0" * 64, num_rows=num_rows)
    return table, Scored(writer="bench", rollout="bench", batch=batch, groups=tuple(groups))


def make_judge(config: CurateConfig) -> Judge:
    """Return what judges groups by these rules alone."""
    return Judge(open_store("memory://bench"), RunConfig(samples_per_group=8, curate=config), lambda _: None)


def measure(function: Callable[[], Any], repeats: int = 3) -> float:
    """Return the smallest of some measurements, in processor seconds."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return min(times)


def main() -> None:
    """Print the times, and whether the limit is held."""
    table, record = build_batch(10_000, 500)
    config = CurateConfig.model_validate({"rules": RULES})
    gate_s = measure(lambda: trajectory.check(table, "scored", vocab_size=32_000, newest_version=3))
    both_s = measure(lambda: judge_batch(table, record, make_judge(config)))
    plain_s = measure(lambda: judge_batch(table, record, make_judge(CurateConfig())))
    features_s = measure(lambda: features.derive(table, "scored"))
    print(f"10,000 trajectories of 500 tokens, processor seconds of one core (numpy {np.__version__})")
    print(f"structural gate                       {gate_s:6.3f} s")
    print(f"gate and curation without rules       {plain_s:6.3f} s")
    print(f"gate and curation with {len(RULES)} rules        {both_s:6.3f} s   limit {LIMIT_S} s")
    print(f"features for expectations             {features_s:6.3f} s")
    if both_s > LIMIT_S:
        raise SystemExit(f"gate and curation took {both_s:.2f} s, the limit is {LIMIT_S} s")


if __name__ == "__main__":
    main()
