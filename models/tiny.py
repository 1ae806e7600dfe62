"""A policy small enough to learn on a CPU in minutes: a Llama with one token for each character."""

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data_contracts.config import TinyModel
from data_contracts.errors import ConfigError

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SPECIAL = (PAD, BOS, EOS)


def build_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """Return an ordinary Hugging Face tokenizer with ids 0 pad, 1 bos, 2 eos, then the characters in order.

    Any other character becomes pad: encode prompts with `tasks.prompts`, which refuses them.

    Raises:
        ConfigError: a character stands twice, or there is none.
    """
    doubled = sorted({c for c in characters if characters.count(c) > 1})
    if doubled or not characters:
        raise ConfigError(f"model.characters {characters!r}: expected each character once, got {doubled or 'none'}")
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_model(config: TinyModel, *, seed: int) -> LlamaForCausalLM:
    """Return the model with random weights in float32; the same for the same seed, global random state untouched."""
    if config.hidden_size % (2 * config.num_heads):
        raise ConfigError(
            f"model.hidden_size {config.hidden_size} is no multiple of twice num_heads {config.num_heads}: "
            "every head needs an even width"
        )
    shape = LlamaConfig(
        vocab_size=len(SPECIAL) + len(config.characters),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(shape)
