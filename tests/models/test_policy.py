"""A policy survives every form it is moved in, and says plainly what is wrong when it does not."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data_contracts.errors import ConfigError, ContractError
from models.digest import weights_digest
from models.policy import (
    Policy,
    build_policy,
    copy_weights,
    end_ids,
    load_policy,
    load_weights,
    metadata_from_bytes,
    model_files,
    named_weights,
    policy_files,
    save_policy,
    torch_dtype,
    weights_from_bytes,
    weights_to_bytes,
)

IDS = torch.tensor([[1, 5, 7, 3, 9]])


def make_tokenizer():
    words = Tokenizer(WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, **{chr(97 + i): 3 + i for i in range(20)}}, "<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def make_model(*, tied=True, seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=23,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def logits_of(model):
    return model(IDS).logits


def test_a_folder_gives_back_the_same_model_and_tokenizer(tmp_path):
    model, tokenizer = make_model(), make_tokenizer()
    save_policy(model, tokenizer, tmp_path)
    loaded = load_policy(tmp_path, "float32")
    assert torch.equal(logits_of(loaded.model), logits_of(model))
    assert loaded.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert weights_digest(named_weights(loaded.model)) == weights_digest(named_weights(model))


def test_loading_casts_to_the_dtype_asked_for(tmp_path):
    save_policy(make_model(), make_tokenizer(), tmp_path)
    assert load_policy(tmp_path, "bfloat16").model.dtype == torch.bfloat16
    assert torch_dtype(torch.float32) is torch.float32
    for wrong in ("float33", "int64"):
        with pytest.raises(ConfigError, match=f"dtype '{wrong}'"):
            torch_dtype(wrong)


def test_what_a_folder_lacks_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        load_policy(tmp_path / "nowhere", "float32")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_policy(tmp_path, "float32")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        model_files(tmp_path)
    save_policy(make_model(), make_tokenizer(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"no \.safetensors weights"):
        load_policy(tmp_path, "float32")


def test_what_cannot_be_read_is_named(tmp_path):
    save_policy(make_model(), make_tokenizer(), tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:100])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_policy(tmp_path, "float32")
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer of model folder"):
        load_policy(tmp_path, "float32")


def test_a_policy_is_built_from_bytes_alone(tmp_path):
    model, tokenizer = make_model(), make_tokenizer()
    save_policy(model, tokenizer, tmp_path)
    files = model_files(tmp_path)
    assert "config.json" in files
    assert not any(name.endswith(".safetensors") for name in files)
    body = weights_to_bytes(named_weights(model))
    built = build_policy(files, "float32", weights_from_bytes(body))
    assert torch.equal(logits_of(built.model), logits_of(model))
    assert built.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert built.model.generation_config.eos_token_id == 2


def test_files_of_a_model_in_memory_are_those_of_its_folder(tmp_path):
    model, tokenizer = make_model(), make_tokenizer()
    save_policy(model, tokenizer, tmp_path)
    in_memory, in_folder = policy_files(model, tokenizer), model_files(tmp_path)
    assert in_memory.keys() == in_folder.keys()
    assert json.loads(in_memory["config.json"]).items() >= {"vocab_size": 23, "hidden_size": 32}.items()


def test_without_weights_the_global_generator_decides():
    files = policy_files(make_model(), make_tokenizer())
    built = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        built.append(weights_digest(named_weights(build_policy(files, "float32").model)))
    assert built[0] == built[1] != built[2]


def test_model_files_that_cannot_be_used_are_refused():
    files = policy_files(make_model(), make_tokenizer())
    with pytest.raises(ConfigError, match=r"have no config\.json"):
        build_policy({}, "float32")
    with pytest.raises(ConfigError, match="not a plain file name"):
        build_policy({**files, "../x": b""}, "float32")
    with pytest.raises(ConfigError, match=r"config\.json of the model cannot be read"):
        build_policy({**files, "config.json": b"{"}, "float32")
    with pytest.raises(ConfigError, match="tokenizer of model folder"):
        build_policy({"config.json": files["config.json"]}, "float32")


def test_tied_weights_stand_once():
    tied, untied = make_model(), make_model(tied=False)
    assert "lm_head.weight" not in named_weights(tied)
    assert named_weights(untied).keys() - named_weights(tied).keys() == {"lm_head.weight"}
    assert sum(t.numel() for t in named_weights(tied).values()) == sum(p.numel() for p in tied.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_loaded_in_place(tied):
    source, target = make_model(tied=tied, seed=1), make_model(tied=tied, seed=2)
    memory = {name: tensor.data_ptr() for name, tensor in named_weights(target).items()}
    load_weights(target, copy_weights(source))
    assert torch.equal(logits_of(target), logits_of(source))
    assert memory == {name: tensor.data_ptr() for name, tensor in named_weights(target).items()}


def test_a_full_state_dict_loads_too():
    source, target = make_model(seed=1), make_model(seed=2)
    load_weights(target, source.state_dict())
    assert torch.equal(logits_of(target), logits_of(source))


def test_another_architecture_moves_as_bytes():
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=23, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    source, target = GPTNeoXForCausalLM(config).eval(), GPTNeoXForCausalLM(config).eval()
    load_weights(target, weights_from_bytes(weights_to_bytes(named_weights(source))))
    assert torch.equal(logits_of(target), logits_of(source))


def test_weights_that_do_not_fit_change_nothing():
    model = make_model()
    before = weights_digest(named_weights(model))
    good = copy_weights(make_model(seed=5))
    name = "model.norm.weight"
    wrong = {
        "missing .*model.norm.weight": {k: v for k, v in good.items() if k != name},
        "unknown .*other": {**good, "other": torch.zeros(1)},
        r"model.norm.weight: expected shape \(32,\), got \(31,\)": {**good, name: torch.zeros(31)},
        "model.norm.weight: expected torch.float32, got torch.bfloat16": {**good, name: good[name].bfloat16()},
    }
    for message, weights in wrong.items():
        with pytest.raises(ContractError, match=message):
            load_weights(model, weights)
        assert weights_digest(named_weights(model)) == before


def test_casting_on_load_rounds_to_the_models_format():
    source, target = make_model(seed=1), make_model(seed=2).bfloat16()
    load_weights(target, named_weights(source), cast=True)
    assert weights_digest(named_weights(target)) == weights_digest(copy_weights(source, "bfloat16"))


def test_copies_do_not_follow_the_model():
    model = make_model()
    copied = copy_weights(model)
    digest = weights_digest(copied)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    assert weights_digest(copied) == digest != weights_digest(named_weights(model))


def test_bytes_carry_metadata_and_any_float_format():
    weights = {"a": torch.randn(3, 2).t(), "b": torch.randn(4).bfloat16(), "c": torch.zeros(0, 3)}
    body = weights_to_bytes(weights, {"version": "7", "digest": "x:1"})
    back = weights_from_bytes(body)
    assert metadata_from_bytes(body) == {"version": "7", "digest": "x:1"}
    assert metadata_from_bytes(weights_to_bytes(weights)) == {}
    assert all(torch.equal(back[n], weights[n]) and back[n].dtype == weights[n].dtype for n in weights)


def test_equal_weights_are_equal_bytes():
    # The format's own table of texts is written in an order that differs from call to call.
    texts = {str(number): "x" * number for number in range(12)}
    weights = {"b": torch.ones(3), "a": torch.zeros(2)}
    assert len({weights_to_bytes(weights, texts) for _ in range(20)}) == 1
    assert weights_to_bytes(weights, texts) == weights_to_bytes(dict(reversed(weights.items())), texts)


@pytest.mark.parametrize("body", [b"", b"short", b"\x05\x00\x00\x00\x00\x00\x00\x00nopes"])
def test_other_bytes_are_refused(body):
    with pytest.raises(ContractError, match="no safetensors file"):
        weights_from_bytes(body)
    with pytest.raises(ContractError, match="no safetensors header"):
        metadata_from_bytes(body)


def test_end_ids_join_tokenizer_and_generation_config():
    policy = Policy(make_model(), make_tokenizer())
    assert end_ids(policy) == (2,)
    policy.model.generation_config.eos_token_id = [9, 2, 7]
    assert end_ids(policy) == (2, 7, 9)
    policy.model.generation_config.eos_token_id = None
    assert end_ids(policy) == (2,)
