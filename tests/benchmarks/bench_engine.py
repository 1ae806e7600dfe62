"""How fast the engine generates, beside padded `generate` of the transformers library on the same model and lengths.

    python tests/benchmarks/bench_engine.py [--threads 1] [--rows 256] [--repeats 3] [--large]

Three tables: the default run's step (32 prompts x 8 samples x 4 tokens), response lengths with a long tail
(log-normal, mean about 53, at most 256, the same for both), and with --large a model of 135 M random weights with
long prompts in bfloat16. Useful tokens are those that a response keeps; what padding computes beside them does
not count. Seconds of the processor and on the clock: on a shared machine only the former can be compared.
"""

import argparse
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.stopping_criteria import StoppingCriteria

from models.engine import Engine, Request

PROMPT_TOKENS = 7
LONGEST = 256


def make_model(dtype: torch.dtype = torch.float32, **changes: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 20,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
    }
    config = LlamaConfig(**(sizes | changes), tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return LlamaForCausalLM(config).to(dtype).eval()


class ForcedLengths(StoppingCriteria):
    """Ends row i after wanted[i] tokens."""

    def __init__(self, prompt_tokens: int, wanted: torch.Tensor) -> None:
        self.prompt_tokens, self.wanted = prompt_tokens, wanted

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        return (input_ids.shape[1] - self.prompt_tokens) >= self.wanted


Seconds = tuple[float, float]
"""(processor, clock)."""


def now() -> Seconds:
    return time.process_time(), time.perf_counter()


def since(start: Seconds) -> Seconds:
    processor, clock = now()
    return processor - start[0], clock - start[1]


def padded(model: LlamaForCausalLM, prompts: torch.Tensor, wanted: np.ndarray) -> Seconds:
    """Return the time of one padded generate."""
    start = now()
    model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=int(wanted.max()),
        do_sample=True,
        pad_token_id=0,
        suppress_tokens=[2],
        stopping_criteria=[ForcedLengths(prompts.shape[1], torch.from_numpy(wanted))],
    )
    return since(start)


def through(engine: Engine, prompts: torch.Tensor, wanted: np.ndarray) -> Seconds:
    """Return the time of the same work through an engine."""
    before, start = engine.num_tokens, now()
    for key, (prompt, num) in enumerate(zip(prompts.tolist(), wanted.tolist(), strict=True)):
        engine.submit(Request(key=key, prompt_ids=prompt, seed=key, max_new_tokens=num))
    while engine.num_in_flight or engine.num_queued:
        engine.step()
    seconds = since(start)
    if engine.num_tokens - before != wanted.sum():
        raise RuntimeError(f"engine sampled {engine.num_tokens - before} tokens, expected {wanted.sum()}")
    return seconds


def report(name: str, runs: list[Seconds], num_tokens: int) -> None:
    processor, clock = min(run[0] for run in runs), min(run[1] for run in runs)
    print(
        f"{name:38s} {processor:7.3f} s processor  {clock:7.3f} s clock  "
        f"{num_tokens / processor:7.0f} and {num_tokens / clock:7.0f} useful tokens/s",
        flush=True,
    )


def short_answers(repeats: int) -> None:
    prompts = torch.randint(3, 13, (32, 6)).repeat_interleave(8, dim=0)
    wanted = np.full(256, 4)
    print("32 prompts x 8 samples x 4 tokens")
    report("  padded generate", [padded(make_model(), prompts, wanted) for _ in range(repeats)], 1024)
    for deterministic in (False, True):
        one_thread = torch.get_num_threads() == 1
        if deterministic and not one_thread:
            continue
        engine = Engine(make_model(), version=0, slots=256, max_length=16, deterministic=deterministic)
        seconds = [through(engine, prompts, wanted) for _ in range(2 * repeats)]
        report(f"  engine, 256 slots{', deterministic' if deterministic else ''}", seconds, 1024)


def long_tail(rows: int, repeats: int) -> None:
    wanted = np.clip(np.random.default_rng(0).lognormal(3.6, 0.9, rows), 4, LONGEST).astype(int)
    prompts = torch.randint(3, 13, (rows, PROMPT_TOKENS))
    num_tokens = int(wanted.sum())
    print(f"{rows} responses, lengths mean {wanted.mean():.1f}, max {wanted.max()}")
    engines = {
        slots: Engine(make_model(), version=0, slots=slots, max_length=PROMPT_TOKENS + LONGEST)
        for slots in (rows, rows // 2, rows // 4)
    }
    model, theirs = make_model(), []
    ours: dict[int, list[Seconds]] = {slots: [] for slots in engines}
    for _ in range(repeats):  # interleaved, so that both meet the same disturbances
        theirs.append(padded(model, prompts, wanted))
        for slots, engine in engines.items():
            ours[slots].append(through(engine, prompts, wanted))
    report("  padded generate", theirs, num_tokens)
    for slots, seconds in ours.items():
        report(f"  engine, {slots} slots ({min(theirs)[0] / min(seconds)[0]:.1f}x)", seconds, num_tokens)


def large(repeats: int) -> None:
    sizes = {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    prompts = torch.randint(3, 49152, (8, 200)).repeat_interleave(4, dim=0)
    wanted = np.full(32, 32)
    print("135 M parameters, 8 prompts of 200 tokens x 4 samples x 32 tokens, bfloat16")
    model = make_model(torch.bfloat16, **sizes)
    report("  padded generate", [padded(model, prompts, wanted) for _ in range(repeats)], 1024)
    engine = Engine(make_model(torch.bfloat16, **sizes), version=0, slots=32, max_length=256)
    report("  engine, 32 slots", [through(engine, prompts, wanted) for _ in range(repeats)], 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="also the 135 M model; minutes")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    short_answers(arguments.repeats)
    long_tail(arguments.rows, arguments.repeats)
    if arguments.large:
        large(1)


if __name__ == "__main__":
    main()
