"""The start role: makes version 0. A tiny model is warm-started by supervision, a local one is imported.

Not here: any reinforcement learning. The warm start stops early on purpose; what follows is to be seen to help.
"""

import time
from pathlib import Path

import torch

from data_contracts.config import LocalModel, TinyModel
from data_contracts.drawing import first_state
from data_contracts.records import Commit
from data_contracts.reuse import Drawing
from infra.crash import point
from infra.log import Log
from infra.objects import put_object
from models.policy import copy_weights, load_policy, model_files, policy_files
from models.tiny import build_model, build_tokenizer
from models.warm_start import WarmStart, warm_start
from tasks.envs.registry import build_envs
from tasks.prompts import plain_examples
from tasks.role import Role
from tasks.weights import Weights, publish_full

HELD_OUT = 256
"""Held-out prompts of each env that decide when the warm start stops."""


def run(role: Role) -> None:
    """Write commit 0 unless it exists."""
    log = Log(role.store, "log/commit", Commit)
    if log.read(0) is not None:
        return
    files, weights, metrics = make_policy(role)
    point("start.made")
    reference = publish_full(role.store, 0, role.writer, weights, files=files)
    point("start.published")
    curriculum = first_state(Drawing.of(role.config))
    commit = Commit(
        writer=role.writer,
        version=0,
        status="initial",
        consumed=(),
        weights=reference,
        checkpoint_version=0,
        curriculum=None
        if curriculum is None
        else put_object(role.store, "curriculum", ".json", curriculum.model_dump_json().encode()),
        num_trained=0,
        num_tokens=0,
        metrics=metrics,
    )
    log.append(0, commit)  # whoever else began this run has made the same start; either is version 0


def make_policy(role: Role) -> tuple[dict[str, bytes], Weights, dict[str, float]]:
    """Return (small files by name, weights in the published format, metrics of the warm start)."""
    model = role.config.model
    if isinstance(model, LocalModel):
        role.progressed(f"importing {model.path}")
        policy = load_policy(Path(model.path), model.dtype)
        return model_files(Path(model.path)), copy_weights(policy.model, model.dtype), {}
    return warm_start_tiny(role, model)


def warm_start_tiny(role: Role, config: TinyModel) -> tuple[dict[str, bytes], Weights, dict[str, float]]:
    """Build the tiny policy and train it on gold answers until it is right about one time in three."""
    torch.set_num_threads(role.config.train.threads)
    envs = build_envs(role.config.envs, role.config.seed)
    tokenizer = build_tokenizer(config.characters)
    model = build_model(config, seed=role.config.seed)

    def show(result: WarmStart) -> None:
        role.check()
        role.progressed(f"warm start step {result.steps}: accuracy {result.accuracy:.2f}")

    started = time.monotonic()
    limit = config.max_positions - role.config.rollout.sampling.max_new_tokens
    example, held_out = plain_examples(envs, tokenizer, num_held_out=HELD_OUT, limit=limit)
    result = warm_start(model, example, held_out, config, on_check=show)
    metrics = {
        "warm_start/steps": float(result.steps),
        "warm_start/accuracy": result.accuracy,
        "warm_start/seconds": time.monotonic() - started,
    }
    return policy_files(model, tokenizer), copy_weights(model), metrics
