"""What loss and diagnostics add to a step's forward and backward. Not a test: python tests/benchmarks/bench_loss.py

Short: 32 prompts of 6 tokens, 8 samples of 4 tokens each. Long: log-normal lengths of at most 256 tokens. Best of
several steps, in CPU seconds of the process on one thread; the share is loss and diagnostics by all the rest.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import models.trainer as module
from data_contracts.algorithm import AlgorithmConfig
from data_contracts.config import TrainConfig
from models.trainer import Trainer
from tests.benchmarks.bench_trainer import make_groups, make_model

REPEATS = 6


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        result = function(*args, **kwargs)
        spent.append(time.process_time() - began)
        return result

    return call


def step_seconds(preset: str, groups: list) -> tuple[float, float, float]:
    """Return CPU seconds of the quickest step: all of it, its loss, its diagnostics."""
    spent: dict[str, list[float]] = {"loss": [], "measure": []}
    trainer = Trainer(make_model(), AlgorithmConfig.model_validate(preset), TrainConfig(), total_steps=REPEATS)
    trainer._objective.loss = timed(trainer._objective.loss, spent["loss"])
    measure, module.measure = module.measure, timed(module.measure, spent["measure"])
    found = []
    for version in range(REPEATS):
        for parts in spent.values():
            parts.clear()
        began = time.process_time()
        trainer.step(groups, version=version, max_staleness=None)
        found.append((time.process_time() - began, sum(spent["loss"]), sum(spent["measure"])))
    module.measure = measure
    return min(found)


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    long = [np.minimum(np.exp(rng.normal(3.5, 1, 8)).astype(int) + 1, 256).tolist() for _ in range(32)]
    for name, lengths in (("short", [[4] * 8] * 32), ("long", long)):
        groups = make_groups(rng, lengths, 6)
        for preset in ("grpo", "gspo", "m2po", "vcpo", "drpo"):
            total, loss, measure = step_seconds(preset, groups)
            share = (loss + measure) / (total - loss - measure)
            print(
                f"{name:6} {preset:6} step {1e3 * total:7.1f} ms, loss {1e3 * loss:5.2f}, diagnostics "
                f"{1e3 * measure:5.2f}: {100 * share:.1f} % of the rest"
            )


if __name__ == "__main__":
    main()
