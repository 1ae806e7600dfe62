"""What a put, an append and a hand-over of a batch cost, and that none of it grows with the run.

    python tests/benchmarks/bench_log.py [--store URL] [--short 100] [--long 100000] [--repeats 200]

Prints medians in milliseconds and, where two things are compared, the ratio of medians measured in turn, so
that other work on the machine weighs on both alike. Without --store it uses a temporary folder of the
current one, because /tmp is often memory.
"""

import argparse
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402

from data_contracts import trajectory  # noqa: E402
from data_contracts.records import BatchRef, Claim, Raw, encode_record  # noqa: E402
from infra.log import Log  # noqa: E402
from infra.objects import get_batch, put_batch  # noqa: E402
from infra.store import Store, open_store  # noqa: E402


def measure(repeats: int, *contestants: Callable[[int], object]) -> list[float]:
    """Return each contestant's median time in milliseconds; they take turns."""
    times: list[list[float]] = [[] for _ in contestants]
    for n in range(repeats):
        for contestant, its_times in zip(contestants, times, strict=True):
            started = time.perf_counter()
            contestant(n)
            its_times.append((time.perf_counter() - started) * 1e3)
    return [statistics.median(its_times) for its_times in times]


def show(what: str, first: float, second: float, names: tuple[str, str]) -> None:
    """Print two medians and their ratio."""
    print(f"{what:<34} {names[0]:>16} {first:8.3f} ms   {names[1]:>16} {second:8.3f} ms   ratio {second / first:5.2f}")


def make_claim(number: int) -> Claim:
    """Return a claim as a rollout worker writes it."""
    tickets = tuple(range(8 * number, 8 * number + 8))
    return Claim(
        writer="bench", kind="claim", tickets=tickets, attempt=0, version=number, curriculum=number,
        deadline=number + 1, next_ticket=8 * number + 8,
    )  # fmt: skip


def make_batch(num_rows: int, num_tokens: int) -> pa.Table:
    """Return a raw batch of random tokens."""
    random = np.random.default_rng(0)
    fixed = {
        "attempt": 0, "prompt_id": "bench/1", "env": "bench", "seed": 0, "prompt_ids": list(range(64)),
        "action_mask": [True] * num_tokens, "policy_versions": [1] * num_tokens, "used_versions": [1],
        "used_digests": ["d"], "finish_reason": "length", "error": "", "temperature": 1.0, "top_p": 1.0, "top_k": 0,
        "max_new_tokens": num_tokens, "engine": "bench", "dtype": "float32",
        "queued_at": 0.0, "started_at": 0.0, "finished_at": 0.0,
    }  # fmt: skip
    rows = [
        {
            **fixed,
            "ticket": row // 8,
            "sample": row % 8,
            "response_ids": random.zipf(1.3, num_tokens).clip(max=150_000).tolist(),
            "behavior_logprobs": (-random.exponential(size=num_tokens)).astype(np.float32).tolist(),
        }
        for row in range(num_rows)
    ]
    return trajectory.make_table(rows, "raw")


def fill(store: Store, path: str, num_records: int) -> Log[Claim]:
    """Return a log that has records already; written without the care of an append, to save time."""
    body = encode_record(make_claim(0))
    keys = [f"{path}/{n:010d}.json" for n in range(num_records)]
    folder = first = Path(store.url) / path
    if "://" in store.url:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda key: store.put(key, body), keys))
    else:
        folder.mkdir(parents=True)
        for n, key in enumerate(keys):  # links to one file in 10,000: the folder is as long, and filled in seconds
            if n % 10_000 == 0:
                first = Path(store.url) / key
                first.write_bytes(body)
            else:
                os.link(first, Path(store.url) / key)
    return Log(store, path, Claim)


def bench_puts(store: Store, repeats: int) -> None:
    """Compare puts by size, and creating with replacing."""
    bodies = {1_000: os.urandom(1_000), 4_000_000: os.urandom(4_000_000)}

    def create(num_bytes: int) -> Callable[[int], object]:
        return lambda n: store.put_new(f"puts/{num_bytes}-{n}", bodies[num_bytes])

    small, large, replaced = measure(
        repeats, create(1_000), create(4_000_000), lambda _: store.put("beat", bodies[1_000])
    )
    show("create-only, durable put", small, large, ("1 kB", "4 MB"))
    show("put of 1 kB", small, replaced, ("create-only", "replace"))
    small, large = measure(repeats, lambda n: store.get(f"puts/1000-{n}"), lambda n: store.get(f"puts/4000000-{n}"))
    show("get", small, large, ("1 kB", "4 MB"))


def bench_lengths(store: Store, lengths: tuple[int, int], repeats: int) -> None:
    """Compare a short and a long log."""
    logs = [fill(store, f"log/{name}", length) for name, length in zip(("short", "long"), lengths, strict=True)]
    names = (f"{lengths[0]} records", f"{lengths[1]} records")

    pairs = list(zip(logs, lengths, strict=True))

    def compare(what: str, num_repeats: int, use: Callable[[Log[Claim], int, int], object]) -> None:
        contestants = [partial(use, log, length) for log, length in pairs]
        first, second = measure(num_repeats, *contestants)
        show(what, first, second, names)

    compare("append", repeats, lambda log, length, n: log.append(length + n, make_claim(n)))
    compare("read of the newest record", repeats, lambda log, length, _: log.read(length - 1))
    compare("look for a record not yet there", repeats, lambda log, length, _: log.read(length + repeats))
    compare("tail, found from nothing", min(repeats, 20), lambda log, *_: Log(store, log.path, Claim).tail())
    compare("read of 50 records", min(repeats, 20), lambda log, length, _: log.read_from(length - 50, limit=50))


def bench_batches(store: Store, repeats: int) -> None:
    """Compare what a batch costs with and without the store."""
    table = make_batch(64, 512)
    encoded = trajectory.encode(table)
    print(f"batch of 64 x 512 tokens: {table.nbytes / 1e6:.2f} MB in memory, {len(encoded) / 1e6:.2f} MB stored")
    refs: list[BatchRef] = []

    def publish(n: int) -> None:
        refs.append(
            put_batch(store, table.slice(0, 64).replace_schema_metadata({**table.schema.metadata, b"n": b"%d" % n}))
        )

    encode, put = measure(repeats, lambda _: trajectory.encode(table), publish)
    show("publish a batch", encode, put, ("encoding alone", "encode and put"))
    ref = put_batch(store, table)
    decode, got = measure(
        repeats,
        lambda _: trajectory.decode(encoded, name="bench"),
        lambda _: get_batch(store, ref, "raw"),
    )
    show("read a batch", decode, got, ("decoding alone", "get, verify, decode"))


FOLLOWER = """
import sys, time
from data_contracts.records import Raw
from infra.log import Log
from infra.objects import get_batch
from infra.store import open_store
url, num_records = sys.argv[1], int(sys.argv[2])
store = open_store(url)
log, number = Log(store, "log/raw/bench", Raw), 0
pacer = log.pacer()
print("ready", flush=True)
while number < num_records:
    for record in log.read_from(number):
        get_batch(store, record.batch, "raw")
        print((time.monotonic() - record.metrics["appended"]) * 1e3, flush=True)
        number += 1
        pacer.reset()
    pacer.wait()
"""


def bench_hand_over(store: Store, num_records: int) -> None:
    """Measure from the append of a batch's record in one process to its table in another."""
    command = [sys.executable, "-c", FOLLOWER, store.url, str(num_records)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    output = follower.stdout
    if output is None:
        raise RuntimeError("the follower has no output")
    output.readline()
    log, table = Log(store, "log/raw/bench", Raw), make_batch(64, 512)
    ref = put_batch(store, table)
    for number in range(num_records):
        time.sleep(0.05)  # a rollout takes its time, so the follower is no longer at its shortest interval
        log.append(number, Raw(writer="bench", batch=ref, groups=(), metrics={"appended": time.monotonic()}))
    latencies = [float(line) for line in output]
    follower.wait()
    output.close()
    print(
        f"{'append here, table in hand there':<34} {'median':>16} {statistics.median(latencies):8.3f} ms"
        f"   {'longest':>16} {max(latencies):8.3f} ms   (records 50 ms apart, two processes)"
    )


def main() -> None:
    """Run all comparisons against one store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="")
    parser.add_argument("--short", type=int, default=100)
    parser.add_argument("--long", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-store-") as folder:
        store = open_store(arguments.store or folder).at(f"bench-{secrets.token_hex(4)}")
        print(f"store {store.url}")
        bench_puts(store, arguments.repeats)
        bench_lengths(store, (arguments.short, arguments.long), arguments.repeats)
        bench_batches(store, arguments.repeats)
        bench_hand_over(store, 30)


if __name__ == "__main__":
    main()
