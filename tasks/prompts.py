"""Prompts to tokens, and responses back to text. Nothing here needs torch.

Text goes in once, when a prompt is encoded. Responses are decoded for rewards and for people; no text of a response
is ever encoded again.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from data_contracts.errors import ConfigError
from tasks.envs.protocol import Prompt
from tasks.envs.registry import Envs

_FILES = ("tokenizer", "special_tokens", "chat_template", "added_tokens", "vocab", "merges")


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model folder; the network is never asked.

    Raises:
        ConfigError: the folder has no tokenizer.json that can be read.
    """
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"model folder {folder} has no tokenizer.json: save its tokenizer in the fast format")
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as cause:
        raise ConfigError(f"tokenizer of model folder {folder} cannot be loaded: {cause}") from cause


def tokenizer_from_files(files: Mapping[str, bytes]) -> PreTrainedTokenizerFast:
    """Load a tokenizer from a model's small files by name; those of other kinds are ignored.

    Raises:
        ConfigError: there is no tokenizer.json that can be read.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for name, body in files.items():
            if name.startswith(_FILES) and Path(name).name == name:
                (Path(scratch) / name).write_bytes(body)
        if "tokenizer.json" not in files:
            raise ConfigError(f"model files have no tokenizer.json, only {sorted(files)}")
        return load_tokenizer(scratch)


def encode_prompt(prompt: Prompt, tokenizer: Any, limit: int) -> list[int]:
    """Return the tokens of a prompt as the engine receives them.

    A chat goes through the tokenizer's chat template, up to where the assistant's answer begins; without a template
    the turns are joined line by line. Plain text is encoded as it is.

    Args:
        prompt: plain text or a chat.
        tokenizer: of the policy.
        limit: most tokens a prompt may have, that is the engine's length less the response's.

    Raises:
        ConfigError: the prompt is empty, too long, or has characters that the tokenizer does not know.
    """
    if isinstance(prompt.content, str):
        text, ids = prompt.content, tokenizer.encode(prompt.content)
    elif tokenizer.chat_template:
        turns = [dict(turn) for turn in prompt.content]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode(text, add_special_tokens=False)  # the template has written them
    else:
        text = "\n".join(turn["content"] for turn in prompt.content) + "\n"
        ids = tokenizer.encode(text)
    if not ids:
        raise ConfigError(f"prompt {prompt.id} is empty: a policy needs at least one token to go on from")
    if len(ids) > limit:
        raise ConfigError(
            f"prompt {prompt.id} has {len(ids)} tokens, expected at most {limit}: "
            "raise the engine's max_length, lower max_new_tokens or choose shorter prompts"
        )
    unknown = tokenizer.unk_token_id
    if unknown is not None and ids.count(unknown) > text.count(tokenizer.unk_token):
        raise ConfigError(f"prompt {prompt.id} has characters that the model's tokenizer does not know: {text[:80]!r}")
    return list(ids)


def with_guidance(prompt: Prompt) -> Prompt:
    """Return the prompt with the env's guidance in its content.

    Raises:
        ConfigError: the env has none to give.
    """
    if prompt.guided is None:
        raise ConfigError(
            f"prompt {prompt.id} has no guidance: set rollout.guided_samples 0, or choose an env that gives some"
        )
    return replace(prompt, content=prompt.guided)


def make_decoder(tokenizer: Any) -> Callable[[Sequence[Sequence[int]]], list[str]]:
    """Return the function that turns many responses into text at once, special tokens left out."""

    def decode(responses: Sequence[Sequence[int]]) -> list[str]:
        # Without responses `batch_decode` takes the empty list for one response.
        return tokenizer.batch_decode(responses, skip_special_tokens=True) if len(responses) else []

    return decode


def make_round_trip(tokenizer: Any) -> Callable[[Sequence[Sequence[int]]], list[bool]]:
    """Return the function that tells of many responses whether the text of each, encoded again, gives other tokens.

    Special tokens are left out on both sides. For measuring alone: nothing that is trained on is encoded again.
    """
    special = set(tokenizer.all_special_ids)
    decode = make_decoder(tokenizer)

    def differs(responses: Sequence[Sequence[int]]) -> list[bool]:
        texts = decode(responses)
        again = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return [
            [token for token in ids if token not in special] != [token for token in new if token not in special]
            for ids, new in zip(responses, again, strict=True)
        ]

    return differs


def plain_examples(
    envs: Envs, tokenizer: Any, *, num_held_out: int, limit: int
) -> tuple[Callable[[int], tuple[list[int], list[int]]], list[tuple[list[int], list[int]]]]:
    """Return supervised examples: a function from prompt number to training example, and held-out examples.

    An example is the tokens of a prompt and those of its gold response with the end-of-sequence token. Held-out
    prompts are never among the training ones.

    Args:
        envs: the run's envs.
        tokenizer: of the policy.
        num_held_out: held-out examples of each env, at most.
        limit: most tokens a prompt may have.

    Raises:
        ConfigError: a prompt does not fit, or a gold response has characters that the tokenizer does not know.
    """

    def encode(prompt: Prompt) -> tuple[list[int], list[int]]:
        gold = envs.env_of(prompt.id).gold_response(prompt)
        answer = tokenizer.encode(gold, add_special_tokens=False)
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in answer:
            raise ConfigError(
                f"gold answer {gold!r} of prompt {prompt.id} has characters that the tokenizer does not know"
            )
        return encode_prompt(prompt, tokenizer, limit), [*answer, tokenizer.eos_token_id]

    return lambda number: encode(envs.prompt_for(number)), [encode(p) for p in envs.eval_prompts(num_held_out)]
