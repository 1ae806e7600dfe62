"""Speed of a training step on the CPU, packed beside padded. Not a test: python tests/benchmarks/bench_trainer.py

Short: 32 prompts of 6 tokens, 8 samples of 4 tokens each. Long tail: 256 prompts of 7 tokens, log-normal response
lengths of at most 256 tokens. The padded way runs the plain model on right-padded rows of prompt and response,
64 at a time, logits for every position, the same loss and the same optimizer. Best of several runs of each, in
CPU seconds of the process, so that other work on the machine disturbs little.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data_contracts.algorithm import AlgorithmConfig
from data_contracts.config import TrainConfig
from models.samples import Sample
from models.trainer import Trainer


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=19,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def make_groups(rng: np.random.Generator, lengths: Sequence[Sequence[int]], prompt_length: int) -> list[list[Sample]]:
    groups = []
    for ticket, group in enumerate(lengths):
        prompt = rng.integers(3, 13, prompt_length)
        groups.append(
            [
                Sample(
                    prompt,
                    rng.integers(3, 13, n),
                    np.ones(n, bool),
                    np.full(n, -2.9, np.float32),
                    np.zeros(n, np.int64),
                    reward=float(rng.integers(2)),
                    ticket=ticket,
                    sample=i,
                )
                for i, n in enumerate(group)
            ]
        )
    return groups


class Padded:
    """The plain way: pad, compute logits everywhere, clip the ratio against the behavior policy."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step(self, groups: list[list[Sample]]) -> None:
        samples = [s for group in groups for s in group]
        total = sum(len(s.response_ids) for s in samples)
        self.optimizer.zero_grad()
        for start in range(0, len(samples), 64):
            self._microbatch(samples[start : start + 64], total)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def _microbatch(self, samples: list[Sample], total: int) -> None:
        longest = max(len(s.response_ids) for s in samples)
        prompt = len(samples[0].prompt_ids)
        ids = torch.zeros(len(samples), prompt + longest, dtype=torch.int64)
        behavior, mask = torch.zeros(len(samples), longest), torch.zeros(len(samples), longest, dtype=torch.bool)
        for row, s in enumerate(samples):
            n = len(s.response_ids)
            ids[row, : prompt + n] = torch.from_numpy(np.concatenate([s.prompt_ids, s.response_ids]))
            behavior[row, :n], mask[row, :n] = torch.from_numpy(s.behavior_logprobs), True
        advantage = torch.tensor([s.reward - 0.5 for s in samples])[:, None]
        logits = self.model(input_ids=ids, use_cache=False).logits[:, prompt - 1 : -1].float()
        logp = logits.log_softmax(-1).gather(2, ids[:, prompt:, None])[..., 0]
        ratio = torch.where(mask, logp - behavior, 0).exp()
        token = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
        (torch.where(mask, token, 0).sum() / total).backward()


def best_of(runs: int, run: Callable[[], object]) -> float:
    times = []
    for _ in range(runs):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return min(times)


def compare(name: str, groups: list[list[Sample]], runs: int) -> None:
    trainer = Trainer(make_model(), AlgorithmConfig(), TrainConfig(), total_steps=1000)
    padded = Padded(make_model())
    tokens = sum(len(s.response_ids) for group in groups for s in group)
    result = trainer.step(groups, version=0, max_staleness=None)
    plain = best_of(runs, lambda: padded.step(groups))
    packed = best_of(runs, lambda: trainer.step(groups, version=0, max_staleness=None))
    rows, full = result.metrics["train/packed_tokens"], result.metrics["train/padded_tokens"]
    print(
        f"{name:<30} padded {plain:6.3f} s {tokens / plain:7.0f} tok/s   packed {packed:6.3f} s "
        f"{tokens / packed:7.0f} tok/s   x{plain / packed:.2f}   "
        f"({tokens} response tokens, {rows:.0f} rows of {full:.0f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rng = np.random.default_rng(0)
    print(f"{args.threads} thread(s)")
    compare("short, 8 samples a prompt", make_groups(rng, [[4] * 8] * 32, 6), args.runs)
    lengths = np.clip(rng.lognormal(3.6, 0.9, 256), 4, 256).astype(int)
    compare("long tail, 1 sample a prompt", make_groups(rng, [[int(n)] for n in lengths], 7), args.runs)
    compare("long tail, 8 samples a prompt", make_groups(rng, lengths.reshape(32, 8).tolist(), 64), args.runs)


if __name__ == "__main__":
    main()
