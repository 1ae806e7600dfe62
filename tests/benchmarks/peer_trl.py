"""TRL's GRPOTrainer on two-digit sums; prints seconds per step. Runs in an environment that has TRL.

python peer_trl.py MODEL_FOLDER STEPS
"""

import random
import statistics
import sys
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

GROUPS, SAMPLES = 32, 8


class Stopwatch(TrainerCallback):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append(time.perf_counter())


def exact(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Reward 1 for the right sum."""
    return [float(text.replace(" ", "") == gold) for text, gold in zip(completions, answer, strict=True)]


def main(folder: str, steps: int) -> None:
    """Train and print the median time of a step."""
    torch.set_num_threads(2)
    draw = random.Random(0)
    sums = [(draw.randint(0, 99), draw.randint(0, 99)) for _ in range(GROUPS * (steps + 2))]
    rows = [{"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"} for a, b in sums]
    batch = GROUPS * SAMPLES
    config = GRPOConfig(
        output_dir="peer_trl_out", per_device_train_batch_size=batch, generation_batch_size=batch,
        num_generations=SAMPLES, max_completion_length=4, max_steps=steps, learning_rate=3e-4,
        lr_scheduler_type="constant", beta=0.0, epsilon=0.2, temperature=1.0, max_grad_norm=1.0, report_to=[],
        save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True, seed=0,
    )  # fmt: skip
    watch = Stopwatch()
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=exact,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        callbacks=[watch],
    ).train()
    print(statistics.median([b - a for a, b in zip(watch.ends, watch.ends[1:], strict=False)][2:]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
