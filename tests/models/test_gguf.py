import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from data_contracts.errors import ConfigError
from models.gguf import convert
from models.policy import load_policy

gguf = pytest.importorskip("gguf")

HIDDEN, MLP, HEADS, LAYERS = 32, 64, 2, 1
TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """Write a Llama of 8-bit blocks as a GGUF file; return it with what its blocks expand to."""
    file = tmp_path_factory.mktemp("gguf") / "small.gguf"
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(_bytes_as_text())]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    expanded = {}
    shapes = {"token_embd": (len(tokens), HIDDEN), "blk.0.ffn_up": (MLP, HIDDEN), "blk.0.ffn_gate": (MLP, HIDDEN)}
    shapes |= {
        "blk.0.ffn_down": (HIDDEN, MLP),
        **{f"blk.0.attn_{x}": (HIDDEN, HIDDEN) for x in ("q", "k", "v", "output")},
    }
    for name, shape in shapes.items():
        blocks = gguf.quants.quantize(rng.normal(size=shape).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        expanded[name] = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        expanded[name] = torch.from_numpy(rng.normal(size=HIDDEN).astype(np.float32))
        writer.add_tensor(f"{name}.weight", expanded[name].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file, expanded


def _bytes_as_text():
    """The printable characters that stand for bytes in a byte-level vocabulary, with the one merged pair."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*ByteLevel.alphabet(), "12"]


@pytest.fixture(scope="module")
def folder(quantized, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "model"
    convert(quantized[0], folder)
    return folder


def test_the_folder_has_the_expanded_weights_in_bfloat16(quantized, folder):
    written, expanded = load_file(folder / "model.safetensors"), quantized[1]
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm",
        "model.layers.0.input_layernorm": "blk.0.attn_norm",
        "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
        "model.layers.0.mlp.up_proj": "blk.0.ffn_up", "model.layers.0.mlp.gate_proj": "blk.0.ffn_gate",
        "model.layers.0.mlp.down_proj": "blk.0.ffn_down", "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
        "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
    }  # fmt: skip
    for name, gguf_name in names.items():
        assert torch.equal(written[f"{name}.weight"], expanded[gguf_name].bfloat16()), name
    for name in ("q", "k"):  # GGUF interleaves the two halves that a rotary embedding pairs
        rows = expanded[f"blk.0.attn_{name}"].view(HEADS, HIDDEN // HEADS // 2, 2, HIDDEN).transpose(1, 2)
        own = written[f"model.layers.0.self_attn.{name}_proj.weight"]
        assert torch.equal(own, rows.reshape(HIDDEN, HIDDEN).bfloat16())
    assert set(written) == {f"{n}.weight" for n in [*names, *(f"model.layers.0.self_attn.{x}_proj" for x in "qk")]}


def test_the_folder_is_a_plain_model(folder):
    assert not re.search("quant|gguf", (folder / "config.json").read_text())
    model, _ = load_policy(folder, "bfloat16")
    assert model.config.tie_word_embeddings
    model.save_pretrained(folder.parent / "saved-again")
    ids = torch.tensor([[1, 5, 9]])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert made.shape[1] > 3


def test_the_tokenizer_the_template_and_the_end_token_come_along(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": "12?"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "user:12?\n"
    assert tokenizer.decode(tokenizer.encode("12 é?")) == "12 é?"
    assert len(tokenizer.encode("12")) == 1
    model, _ = load_policy(folder, "bfloat16")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2


def test_a_file_that_is_cut_off_is_refused(quantized, tmp_path):
    body = quantized[0].read_bytes()
    for kept in (len(body) // 50, len(body) // 2, len(body) - 1):
        (tmp_path / "cut.gguf").write_bytes(body[:kept])
        with pytest.raises(ConfigError, match=r"cannot read cut.gguf: expected a GGUF model"):
            convert(tmp_path / "cut.gguf", tmp_path / "made")


@pytest.mark.parametrize("body", [b"", b"GGUF", b"not a model at all" * 100])
def test_a_file_that_is_no_model_is_refused(tmp_path, body):
    (tmp_path / "bad.gguf").write_bytes(body)
    with pytest.raises(ConfigError, match=r"cannot read bad.gguf: expected a GGUF model"):
        convert(tmp_path / "bad.gguf", tmp_path / "made")
    assert not (tmp_path / "made").exists()
