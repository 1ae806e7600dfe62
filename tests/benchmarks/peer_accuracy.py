"""Greedy exact match by transformers alone: one measure for a run's versions and for a peer's model."""

from typing import Any

import torch


def accuracy(model: Any, tokenizer: Any, rows: list[dict[str, str]], num_tokens: int = 4) -> float:
    """Return the share of rows whose greedy answer is right; prompts are all of one length."""
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt")
    width = prompts["input_ids"].shape[1]
    with torch.no_grad():
        answers = model.generate(
            input_ids=prompts["input_ids"],
            attention_mask=prompts["attention_mask"],
            do_sample=False,
            max_new_tokens=num_tokens,
        )
    texts = tokenizer.batch_decode(answers[:, width:], skip_special_tokens=True)
    right = [text.replace(" ", "") == row["answer"] for text, row in zip(texts, rows, strict=True)]
    return sum(right) / len(right)
