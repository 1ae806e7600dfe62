"""TRL's GRPOTrainer on the prompts of a run; prints JSON. Runs in an environment that has TRL.

python peer_trl.py FOLDER STEPS EVERY

FOLDER holds model/ (weights and tokenizer), train.json and held_out.json (lists of {"prompt", "answer"}). Every EVERY
steps the clock is stopped and greedy answers to the held-out prompts are counted.
"""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from peer_accuracy import accuracy
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

GROUPS, SAMPLES = 32, 8


class Stopwatch(TrainerCallback):
    """Notes how long each step took, and how well the model does at intervals that do not count."""

    def __init__(self, tokenizer: object, held_out: list[dict[str, str]], every: int) -> None:
        self.tokenizer, self.held_out, self.every = tokenizer, held_out, every
        self.steps: list[float] = []
        self.accuracy: dict[int, float] = {}
        self.began = time.perf_counter()

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, _: object, state: object, __: object, model: torch.nn.Module, **___: object) -> None:
        self.steps.append(time.perf_counter() - self.began)
        if state.global_step % self.every == 0:
            model.eval()
            self.accuracy[state.global_step] = accuracy(model, self.tokenizer, self.held_out)
            model.train()
        self.began = time.perf_counter()


def exact(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Reward 1 for the right sum."""
    return [float(text.replace(" ", "") == gold) for text, gold in zip(completions, answer, strict=True)]


def main(folder: Path, steps: int, every: int) -> None:
    """Train; print the seconds of each step and the accuracy by step."""
    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    watch = Stopwatch(tokenizer, json.loads((folder / "held_out.json").read_text()), every)
    batch = GROUPS * SAMPLES
    config = GRPOConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=batch, generation_batch_size=batch,
        num_generations=SAMPLES, max_completion_length=4, max_steps=steps, learning_rate=3e-4,
        lr_scheduler_type="constant", beta=0.0, epsilon=0.2, temperature=1.0, max_grad_norm=1.0, report_to=[],
        save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True, seed=0,
    )  # fmt: skip
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        reward_funcs=exact,
        args=config,
        train_dataset=Dataset.from_list(json.loads((folder / "train.json").read_text())),
        processing_class=tokenizer,
        callbacks=[watch],
    ).train()
    print(json.dumps({"steps": watch.steps, "accuracy": watch.accuracy}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
