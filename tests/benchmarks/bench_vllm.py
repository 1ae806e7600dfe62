"""Tokens per second through Rollflow beside bare vLLM: one server, the same prompts, seeds and limits.

    python -m tests.benchmarks.bench_vllm [--model models_local/smollm2] [--groups 32] [--tokens 64] [--repeats 3]

Through Rollflow is the whole rollout role: tickets claimed in the store, prompts made and encoded, responses written
as checked batches with their records. Bare is the shortest program that posts the same requests to the same server
and reads the answers. The two take turns, so that a busy machine slows both; the ratio is of the sums over all turns.
The processor time of this process is told as well: what Rollflow needs of it, vLLM cannot have.
"""

import argparse
import http.client
import json
import secrets
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_contracts.config import RunConfig
from data_contracts.config import VllmEngine as VllmConfig
from data_contracts.errors import ConfigError
from data_contracts.records import Raw
from infra.log import Log
from infra.objects import get_batch
from infra.runs import create_run
from infra.vllm_client import Sampling, request_body
from infra.vllm_command import server_command, server_environment, vllm_python
from infra.vllm_server import SupervisedServer
from models.policy import build_policy, end_ids
from tasks.ledger import Ledger
from tasks.model_files import read_model_files
from tasks.role import Role
from tasks.rollout import Worker
from tasks.start import run as make_version_0

MAX_LENGTH = 384


@dataclass(frozen=True)
class Turn:
    """One measurement."""

    tokens: int
    seconds: float
    processor_s: float


def make_config(folder: str, options: argparse.Namespace, url: str) -> RunConfig:
    """Return the configuration of a run that may claim all of its groups at once."""
    return RunConfig.model_validate(
        {
            "name": "bench",
            "steps": 1,
            "groups_per_step": options.groups,
            "samples_per_group": 8,
            "store": folder,
            "model": {"type": "local", "path": options.model, "dtype": "bfloat16"},
            "envs": [{"type": "reasoning_gym", "dataset": "chain_sum", "few_shot": 0}],
            "rollout": {
                "engine": {"type": "vllm", "slots": options.slots, "max_length": MAX_LENGTH, "url": url},
                "sampling": {"max_new_tokens": options.tokens},
                "threads": options.threads,
                "claim_block": 8,
                "groups_per_batch": 4,
            },
        }
    )


def through_rollflow(folder: str, options: argparse.Namespace, url: str) -> tuple[Turn, list[dict]]:
    """Play the rollout role until all groups are written; return also the requests that ask the same of a server."""
    run = create_run(make_config(folder, options, url))
    with Role("rollout", run.store, run.config) as role:
        make_version_0(role)
        worker = Worker(role, Ledger(role.store, run.config))
        start, used = time.monotonic(), time.process_time()
        worker.turn()
        while not worker.is_idle:
            worker.turn()
        seconds, used = time.monotonic() - start, time.process_time() - used
        worker.close()
        return Turn(role.tokens, seconds, used), requests_of(role)


def requests_of(role: Role) -> list[dict]:
    """Return a request to the server for every group that a role has written."""
    sampling = role.config.rollout.sampling
    ends = end_ids(build_policy(read_model_files(role.store), "bfloat16", device="meta"))
    bodies = []
    for record in Log(role.store, f"log/raw/{role.writer}", Raw).read_from(0):
        table = get_batch(role.store, record.batch, "raw")
        for group in record.groups:
            row = table.slice(group.first_row, 1).to_pylist()[0]
            wanted = Sampling(row["seed"], sampling.max_new_tokens, sampling.temperature, stop_ids=ends)
            bodies.append(
                request_body(row["prompt_ids"], role.config.samples_per_group, wanted, "") | {"stream": False}
            )
    return bodies


def bare(url: str, bodies: Sequence[dict]) -> Turn:
    """Post all requests at once and read the answers."""
    tokens: list[int] = []
    salt = secrets.token_hex(8)  # nothing computed for an earlier turn is used again

    def post(body: dict) -> None:
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        connection.request(
            "POST",
            "/inference/v1/generate",
            json.dumps(body | {"cache_salt": salt}),
            {"Content-Type": "application/json"},
        )
        for choice in json.loads(connection.getresponse().read())["choices"]:
            tokens.append(len(choice["token_ids"]))
        connection.close()

    start, used = time.monotonic(), time.process_time()
    threads = [threading.Thread(target=post, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Turn(sum(tokens), time.monotonic() - start, time.process_time() - used)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models_local/smollm2")
    for name, default in (("groups", 32), ("tokens", 64), ("slots", 64), ("repeats", 3), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--url", help="a server that runs already, started as README says")
    options = parser.parse_args()
    if options.url:
        with tempfile.TemporaryDirectory() as folder:
            measure(folder, options, options.url)
        return
    engine = VllmConfig(slots=options.slots, max_length=MAX_LENGTH)
    try:
        python = vllm_python(engine.environment)
    except ConfigError as cause:
        print(f"skipped: {cause}")
        return
    if not Path(options.model, "config.json").is_file():
        print(f"skipped: there is no model in {options.model}: rollflow fetch-model smollm2")
        return
    with tempfile.TemporaryDirectory() as folder:
        server = SupervisedServer(
            lambda port: server_command(python, Path(options.model).absolute(), port, engine, "bfloat16"),
            server_environment(engine, options.threads),
            log=Path(folder) / "server.log",
        )
        server.start()
        try:
            measure(folder, options, server.url)
        finally:
            server.stop()


def measure(folder: str, options: argparse.Namespace, url: str) -> None:
    """Let the two take turns, the first of each for warmth, and print what came of it."""
    ours: list[Turn] = []
    theirs: list[Turn] = []
    for _ in range(options.repeats + 1):
        turn, bodies = through_rollflow(folder, options, url)
        ours.append(turn)
        theirs.append(bare(url, bodies))
        print(f"  through Rollflow {describe(ours[-1:])}   bare {describe(theirs[-1:])}", flush=True)
    print(f"through Rollflow {describe(ours[1:])}")
    print(f"bare vLLM        {describe(theirs[1:])}")
    print(f"ratio {rate(ours[1:]) / rate(theirs[1:]):.3f}")


def rate(turns: Sequence[Turn]) -> float:
    """Return tokens per second over all turns."""
    return sum(turn.tokens for turn in turns) / sum(turn.seconds for turn in turns)


def describe(turns: Sequence[Turn]) -> str:
    """Return the figures of some turns."""
    tokens, used = sum(turn.tokens for turn in turns), sum(turn.processor_s for turn in turns)
    return f"{rate(turns):7.1f} tokens/s ({tokens} tokens, {used:.2f} s of this process)"


if __name__ == "__main__":
    main()
