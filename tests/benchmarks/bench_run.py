"""What orchestration, records and tracking cost: whole runs beside a bare generate-and-train loop.

Both do the same work with the same engine and trainer on one thread each, at max_staleness 0, where nothing
overlaps: what a run takes longer is the cost of roles, records and tracking. Printed are seconds per step, the median
between commits, and the share that is not generation or training.

    python -m tests.benchmarks.bench_run [--steps 20]
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time

import numpy as np
import torch

from data_contracts.config import RunConfig
from data_contracts.records import Commit
from infra.log import Log
from infra.runs import Run, create_run, load_run
from models.engine import Engine
from models.policy import build_policy, copy_weights
from models.requests import Finished, Request
from models.samples import Sample
from models.trainer import Trainer
from tasks.engine import make_engine
from tasks.envs.registry import build_envs
from tasks.model_files import read_model_files
from tasks.prompts import encode_prompt, make_decoder
from tasks.weights import PolicyReader
from tests.harness import Processes

WIDER = {"hidden_size": 256, "intermediate_size": 768, "num_layers": 5}

SKIPPED = 3
"""First steps, in which processes still warm up."""

LONG = {"max_positions": 128}

SIZES: dict[str, tuple[int, int, dict[str, int]]] = {
    "128 responses of 4 tokens": (16, 4, {}),
    "1024 responses of 4 tokens": (128, 4, {}),
    "256 responses of 4 tokens, 7 times the weights": (32, 4, WIDER),
    "128 responses of up to 64 tokens": (16, 64, LONG),
}
"""Groups a step, tokens a response, and the model."""


def make(folder: str, steps: int, staleness: int, groups: int = 16, tokens: int = 4, **model: int) -> Run:
    """Return a run that begins from random weights."""
    config = RunConfig.model_validate(
        {
            "name": "bench",
            "steps": steps,
            "store": folder,
            "groups_per_step": groups,
            "model": {"type": "tiny", "warm_start_max_steps": 0, **model},
            "staleness": {"max_staleness": staleness},
            "rollout": {
                "engine": {"type": "torch", "slots": 256, "max_length": 12 + tokens},
                "sampling": {"max_new_tokens": tokens},
            },
            "evaluate": {"every": 10_000, "num_prompts": 1},
            "tracking": {"enabled": False},
        }
    )
    return load_run(create_run(config).store.url)


def seconds_per_step(run: Run) -> float:
    """Return the median time between commits."""
    times = [commit.at for commit in Log(run.store, "log/commit", Commit).read_from(0)][1 + SKIPPED :]
    return statistics.median(np.diff(times))


def play(run: Run, roles: tuple[str, ...]) -> float:
    """Run the roles to the end; return seconds per step."""
    processes = Processes()
    processes.join(processes.start_all(run, roles), limit_s=600)
    return seconds_per_step(run)


class Bare:
    """The loop that anybody would write: generate, score, train, on the same parts."""

    def __init__(self, run: Run) -> None:
        config = run.config
        weights, _ = PolicyReader(run.store).weights(0)
        files = read_model_files(run.store)
        self.config = config
        self.envs = build_envs(config.envs, config.seed)
        sampler = build_policy(files, "float32", weights)
        learner = build_policy(files, "float32", weights)
        self.tokenizer = sampler.tokenizer
        self.decode = make_decoder(sampler.tokenizer)
        self.engine: Engine = make_engine(config, sampler, deterministic=True)
        self.trainer = Trainer(learner.model, config.algorithm, config.train, total_steps=config.steps)

    def step(self, version: int) -> None:
        """Make one step."""
        self.engine.load_weights(copy_weights(self.trainer.model), version)
        per_step, per_group = self.config.groups_per_step, self.config.samples_per_group
        limit = self.config.rollout.sampling.max_new_tokens
        prompts = [self.envs.prompt_for(version * per_step + i) for i in range(per_step)]
        for i, prompt in enumerate(prompts):
            ids = encode_prompt(prompt, self.tokenizer, 12)
            for sample in range(per_group):
                self.engine.submit(Request((i, sample), ids, seed=i * per_group + sample, max_new_tokens=limit))
        finished: dict[tuple[int, int], Finished] = {}
        while len(finished) < per_step * per_group:
            finished |= {result.key: result for result in self.engine.step()}  # pyright: ignore[reportAssignmentType]
        texts = self.decode([finished[key].response_ids.tolist() for key in sorted(finished)])
        samples = [
            self.sample(prompts[key[0]], finished[key], text) for key, text in zip(sorted(finished), texts, strict=True)
        ]
        groups = [samples[i * per_group : (i + 1) * per_group] for i in range(per_step)]
        self.trainer.step(groups, version=version, max_staleness=0)

    def sample(self, prompt, result: Finished, text: str) -> Sample:
        reward = self.envs.env_of(prompt.id).score(prompt, text, []).reward
        mask = np.ones(len(result.response_ids), bool)
        ids = np.array(result.request.prompt_ids)
        return Sample(ids, result.response_ids, mask, result.logprobs, result.versions, reward=reward)

    def seconds_per_step(self, steps: int) -> float:
        """Return the median over `steps` steps."""
        taken = []
        for version in range(steps):
            began = time.perf_counter()
            self.step(version)
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[SKIPPED:])


def compare(name: str, steps: int, folder: str, groups: int, tokens: int, **model: int) -> None:
    """Print the cost of a synchronous run beside the bare loop."""
    run = make(folder, steps, 0, groups, tokens, **model)
    whole = play(run, ("start", "train", "rollout", "reward", "curate"))
    bare = Bare(run).seconds_per_step(steps)
    share = 100 * (whole - bare) / whole
    print(f"{name}: bare loop {bare:.3f} s/step, run {whole:.3f} s/step: {share:.1f} % is not generation or training")


def main() -> None:
    """Print all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # as the roles do
    with tempfile.TemporaryDirectory() as folder:
        for name, (groups, tokens, model) in SIZES.items():
            compare(name, arguments.steps, folder, groups, tokens, **model)


if __name__ == "__main__":
    sys.exit(main())
