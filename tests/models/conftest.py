"""Builders shared by the tests of the training step: reference cases, token batches, samples, a tiny model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.samples import Sample
from models.tokens import TokenBatch

CASES = json.loads((Path(__file__).parents[1] / "reference_cases.json").read_text())


@pytest.fixture
def reference() -> Callable[[str], dict[str, Any]]:
    """A numeric case by id: params, inputs, expected."""
    return CASES.__getitem__


@pytest.fixture
def token_batch() -> Callable[..., TokenBatch]:
    """Build a TokenBatch from padded rows [B][T]; what is not given is plausible. `logp` gets a gradient."""

    def build(logp: Any, mask: Any, dtype: torch.dtype = torch.float64, **given: Any) -> TokenBatch:
        shape = torch.tensor(mask).shape
        flat = {name: torch.as_tensor(value).reshape(-1) for name, value in given.items() if np.ndim(value) == 2}
        leaf = torch.tensor(logp, dtype=dtype).reshape(-1).requires_grad_()
        behavior = flat.get("behavior", leaf.detach().clone()).to(dtype)
        return TokenBatch(
            logp=leaf,
            proximal=flat.get("proximal", behavior).to(dtype),
            start=flat.get("start", behavior).to(dtype),
            anchor=flat.get("anchor", behavior).to(dtype),
            reference=flat.get("reference", behavior).to(dtype),
            behavior=behavior,
            advantages=flat.get("advantages", torch.ones(leaf.shape)).to(dtype),
            mask=torch.tensor(mask).reshape(-1).bool(),
            sequence=torch.arange(shape[0]).repeat_interleave(shape[1]),
            num_sequences=shape[0],
            rewards=torch.as_tensor(given.get("rewards", torch.ones(shape[0])), dtype=dtype),
            group=torch.as_tensor(given.get("group", [0] * shape[0])),
            num_groups=given.get("num_groups", 1),
            versions=flat.get("versions", torch.zeros(leaf.shape)).long(),
            version=given.get("version", 0),
            entropy=flat.get("entropy", torch.ones(leaf.shape)).to(dtype),
            guided=torch.as_tensor(given["guided"]).bool() if "guided" in given else None,
        )

    return build


@pytest.fixture
def make_model() -> Callable[..., LlamaForCausalLM]:
    """Build a small Llama with weights large enough that contexts matter."""

    def build(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        settings = {
            "vocab_size": 23,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        }
        model: Any = LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(5)
        return model.to(dtype)

    return build


@pytest.fixture
def make_groups() -> Callable[..., list[list[Sample]]]:
    """Build groups of samples with random tokens, lengths and rewards; some tokens are not the policy's."""

    def build(
        num_groups: int = 4, size: int = 3, seed: int = 0, longest: int = 9, tools: bool = True, version: int = 0
    ) -> list[list[Sample]]:
        rng = np.random.default_rng(seed)
        groups = []
        for ticket in range(num_groups):
            prompt = rng.integers(1, 23, rng.integers(1, 8)).astype(np.int32)
            group = []
            for index in range(size):
                length = int(rng.integers(1, longest + 1))
                acted = rng.random(length) < 0.8 if tools else np.ones(length, bool)
                acted[0] = True
                group.append(
                    Sample(
                        prompt_ids=prompt,
                        response_ids=rng.integers(1, 23, length).astype(np.int32),
                        action_mask=acted,
                        behavior_logprobs=np.where(acted, -rng.random(length) * 3 - 1, np.nan).astype(np.float32),
                        policy_versions=np.where(acted, version, -1).astype(np.int32),
                        reward=float(rng.integers(0, 3)) / 2,
                        ticket=ticket,
                        sample=index,
                    )
                )
            groups.append(group)
        return groups

    return build
