"""Supervised learning of a tiny policy, up to the point where reinforcement learning has something to do.

From random weights no answer is ever right and every reward is zero. From perfect ones there is nothing to learn.
The warm start stops at the first check at which the policy is right often enough.

Dimensions: B examples of a step, T tokens of the longest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from data_contracts.config import TinyModel
from data_contracts.errors import ConfigError

CHECK_EVERY = 10
IGNORED = -100

Example = tuple[list[int], list[int]]
"""Tokens of a prompt, and of its answer with the end-of-sequence token."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """What the warm start came to."""

    steps: int
    """Optimizer steps taken."""
    accuracy: float
    """Held-out prompts whose greedy answer is exactly right, as a fraction, at the last check."""
    loss: float
    """Mean cross-entropy of the last step's answer tokens, in nats; NaN when no step was taken."""


def warm_start(
    model: torch.nn.Module,
    example: Callable[[int], Example],
    held_out: Sequence[Example],
    config: TinyModel,
    *,
    on_check: Callable[[WarmStart], None] = lambda _: None,
) -> WarmStart:
    """Train `model` in place on examples 0, 1, 2, ... until it is right often enough, or `warm_start_max_steps`.

    Only answer tokens are in the loss. Deterministic on one thread: the examples come in order, nothing is drawn.

    Args:
        model: maps `input_ids` (B, T) to an output with `logits` (B, T, V).
        example: a training example by number.
        held_out: examples to check on; never among the training ones.
        config: batch size, learning rate, when to stop.
        on_check: called after every check, every 10 steps.

    Raises:
        ConfigError: there is nothing to check on, or an example is too long for the model.
    """
    if not held_out:
        raise ConfigError("warm start: expected held-out examples, got none: give the env some prompts to hold out")
    for prompt, answer in held_out:
        _check_length(prompt, answer, config.max_positions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.warm_start_lr)
    result = WarmStart(0, greedy_accuracy(model, held_out), float("nan"))
    on_check(result)
    while result.accuracy < config.warm_start_accuracy and result.steps < config.warm_start_max_steps:
        model.train()
        loss = result.loss
        last = min(result.steps + CHECK_EVERY, config.warm_start_max_steps)
        for step in range(result.steps, last):
            first = step * config.warm_start_batch
            batch = [example(number) for number in range(first, first + config.warm_start_batch)]
            loss = _step(model, optimizer, batch, config.max_positions)
        result = WarmStart(last, greedy_accuracy(model, held_out), loss)
        on_check(result)
    model.eval()
    return result


@torch.no_grad()
def greedy_accuracy(model: torch.nn.Module, examples: Sequence[Example]) -> float:
    """Return the fraction of examples whose most likely tokens, one after the other, are exactly the answer.

    A greedy answer is right exactly when every answer token is the most likely one after the right tokens before
    it, so one pass over prompt and answer decides all examples at once.
    """
    model.eval()
    ids, is_answer = pad_examples(examples)
    predicted = model(input_ids=ids).logits[:, :-1].argmax(-1)
    wrong = (predicted != ids[:, 1:]) & is_answer[:, 1:]
    return 1.0 - wrong.any(1).float().mean().item()


def pad_examples(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Return tokens (B, T) int64 and which of them are answers (B, T) bool; padded with 0 on the right, unseen."""
    length = max(len(prompt) + len(answer) for prompt, answer in examples)
    ids = torch.zeros(len(examples), length, dtype=torch.long)
    is_answer = torch.zeros(len(examples), length, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(examples):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        is_answer[row, len(prompt) : end] = True
    return ids, is_answer


def _step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[Example], max_positions: int
) -> float:
    for prompt, answer in batch:
        _check_length(prompt, answer, max_positions)
    ids, is_answer = pad_examples(batch)
    logits = model(input_ids=ids[:, :-1]).logits
    labels = torch.where(is_answer[:, 1:], ids[:, 1:], IGNORED)
    loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def _check_length(prompt: list[int], answer: list[int], max_positions: int) -> None:
    if not prompt or len(prompt) + len(answer) > max_positions:
        raise ConfigError(
            f"warm start: expected 1 to {max_positions} tokens of prompt and answer, got {len(prompt)} and "
            f"{len(answer)}: raise model.max_positions or choose shorter prompts"
        )
