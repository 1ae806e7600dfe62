import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_contracts.config import TinyModel
from data_contracts.errors import ConfigError
from models.tiny import build_model, build_tokenizer


def test_every_character_is_a_token_and_comes_back():
    characters = TinyModel().characters
    tokenizer = build_tokenizer(characters)
    assert tokenizer.encode(characters) == list(range(3, 3 + len(characters)))
    assert tokenizer.decode(tokenizer.encode(" 1 + 2 =? ")) == " 1 + 2 =? "
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_special_tokens_in_text_are_one_token_and_left_out_of_text():
    tokenizer = build_tokenizer("12")
    assert tokenizer.encode("1</s>2") == [3, 2, 4]
    assert tokenizer.decode([3, 4, 2], skip_special_tokens=True) == "12"


def test_line_ends_can_be_characters():
    tokenizer = build_tokenizer("1\n")
    assert tokenizer.encode("1\n1") == [3, 4, 3]


@pytest.mark.parametrize(("characters", "message"), [("112", r"each character once, got \['1'\]"), ("", "got none")])
def test_characters_must_differ(characters, message):
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(characters)


def test_the_model_has_the_size_of_the_config():
    model = build_model(TinyModel(), seed=0)
    assert sum(p.numel() for p in model.parameters()) == 642_304
    assert model.config.vocab_size == 19
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_seed_alone_decides_the_weights_and_no_random_state_moves():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = build_model(TinyModel(hidden_size=16), seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    same, other = (build_model(TinyModel(hidden_size=16), seed=seed).state_dict() for seed in (1, 2))
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.state_dict().items())
    assert not torch.equal(same["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_heads_must_divide_the_width():
    with pytest.raises(ConfigError, match="model.hidden_size 20 is no multiple of twice num_heads 4"):
        build_model(TinyModel(hidden_size=20), seed=0)


def test_it_is_an_ordinary_folder(tmp_path):
    config = TinyModel(hidden_size=16, intermediate_size=32, num_layers=1)
    model, tokenizer = build_model(config, seed=0), build_tokenizer(config.characters)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, ids = AutoModelForCausalLM.from_pretrained(tmp_path), torch.tensor([[3, 4, 5]])
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.encode("17+25=") == tokenizer.encode("17+25=")
    assert again.decode([4, 10]) == "17"
    assert loaded.generation_config.eos_token_id == again.eos_token_id == 2
