import subprocess
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data_contracts.config import AdditionEnv, TinyModel
from data_contracts.errors import ConfigError
from models.tiny import build_tokenizer
from tasks.envs.protocol import Prompt
from tasks.envs.registry import build_envs
from tasks.prompts import (
    encode_prompt,
    load_tokenizer,
    make_decoder,
    make_round_trip,
    plain_examples,
    tokenizer_from_files,
)

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tiny():
    return build_tokenizer(TinyModel().characters)


@pytest.fixture(scope="module")
def chat():
    """A byte-level tokenizer with a chat template, in which every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE)
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    return fast


def ask(content, prompt_id="env/0"):
    return Prompt(prompt_id, content, "")


def test_plain_text_is_encoded_as_it_is(tiny):
    ids = encode_prompt(ask("17+25="), tiny, 60)
    assert ids == [4, 10, 13, 5, 8, 16]
    assert make_decoder(tiny)([ids]) == ["17+25="]


def test_a_chat_goes_through_the_template_up_to_the_answer(chat):
    turns = (
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "3+3?"},
    )
    ids = encode_prompt(ask(turns), chat, 500)
    start, end = chat.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert chat.decode(ids) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (ids.count(start), ids.count(end)) == (4, 3)


def test_a_chat_without_a_template_becomes_lines(tiny):
    tokenizer = build_tokenizer("0123456789+=\n")
    ids = encode_prompt(ask(({"role": "user", "content": "1+1="}, {"role": "user", "content": "2+2="})), tokenizer, 60)
    assert make_decoder(tokenizer)([ids]) == ["1+1=\n2+2=\n"]


def test_a_long_prompt_is_refused_with_numbers(tiny):
    assert len(encode_prompt(ask("1" * 60), tiny, 60)) == 60
    with pytest.raises(
        ConfigError, match="prompt env/0 has 61 tokens, expected at most 60: raise the engine's max_length"
    ):
        encode_prompt(ask("1" * 61), tiny, 60)


def test_characters_the_tokenizer_does_not_know_are_refused(tiny):
    with pytest.raises(ConfigError, match="prompt env/0 has characters that the model's tokenizer does not know: '1a'"):
        encode_prompt(ask("1a"), tiny, 60)


def test_an_empty_prompt_is_refused(tiny):
    with pytest.raises(ConfigError, match="prompt env/0 is empty"):
        encode_prompt(ask(""), tiny, 60)


def test_responses_are_decoded_without_special_tokens(tiny):
    assert make_decoder(tiny)([[3, 7, 5, 2], [0, 18, 3], []]) == ["042", " 0", ""]


def test_a_saved_tokenizer_encodes_the_same_in_every_form(tiny, chat, tmp_path):
    for name, tokenizer, prompt in (
        ("tiny", tiny, ask("17+25=")),
        ("chat", chat, ask(({"role": "user", "content": "é?"},))),
    ):
        folder = tmp_path / name
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_text("{}")
        expected = encode_prompt(prompt, tokenizer, 100)
        files = {p.name: p.read_bytes() for p in folder.iterdir()}
        assert encode_prompt(prompt, load_tokenizer(folder), 100) == expected
        assert encode_prompt(prompt, tokenizer_from_files(files), 100) == expected
        assert encode_prompt(prompt, AutoTokenizer.from_pretrained(folder), 100) == expected


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"model files have no tokenizer.json, only \['config.json'\]"):
        tokenizer_from_files({"config.json": b"{}"})
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_supervised_examples_end_with_the_end_token_and_hold_out_the_held_out(tiny):
    envs = build_envs([AdditionEnv()], seed=0)
    example, held_out = plain_examples(envs, tiny, num_held_out=512, limit=60)
    decode = make_decoder(tiny)
    prompt, answer = example(0)
    left, right = decode([prompt])[0].rstrip("=").split("+")
    assert decode([answer]) == [f"{int(left) + int(right):03d}"]
    assert answer[-1] == tiny.eos_token_id
    trained = {tuple(example(n)[0]) for n in range(1000)}
    assert len(held_out) == 512
    assert not trained & {tuple(p) for p, _ in held_out}


def test_answers_the_tokenizer_does_not_know_are_refused():
    envs = build_envs([AdditionEnv(max_operand=1)], seed=0)
    with pytest.raises(ConfigError, match="has characters"):
        plain_examples(envs, build_tokenizer("+=1"), num_held_out=4, limit=60)


def test_encoding_prompts_needs_no_torch(tmp_path):
    code = (
        "import sys, tempfile\n"
        "from tasks.prompts import encode_prompt, load_tokenizer, make_decoder\n"
        "from tasks.envs.protocol import Prompt\n"
        "tokenizer = load_tokenizer(sys.argv[1])\n"
        "ids = encode_prompt(Prompt('e/0', ({'role': 'user', 'content': '17'},), ''), tokenizer, 90)\n"
        "make_decoder(tokenizer)([ids])\n"
        "assert 'torch' not in sys.modules"
    )
    build_tokenizer("0123456789\n").save_pretrained(tmp_path)
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)


def test_a_response_that_its_own_text_would_not_give_is_noticed():
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "<eos>": 3}, [("a", "b")]))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False)
    differs = make_round_trip(fast)
    assert differs([[0, 3], [2], [0, 1, 3], []]) == [False, False, True, False]
