"""The engine's side of weights and digests, on modules laid out as vLLM lays them out (vLLM itself: tests/flows)."""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import linear

from data_contracts.errors import ContractError
from models.delta import delta_to_bytes, make_delta
from models.digest import DigestSums, negative_zeros, weights_digest
from models.policy import weights_to_bytes
from models.vllm_extension import WeightsExtension, engine_digest, pack_tied, read_back

HIDDEN, INNER, VOCAB, PADDED = 8, 12, 5, 16


def plain_weights(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights as Rollflow publishes them: one tied embedding, query, key, value, gate and up on their own."""
    torch.manual_seed(seed)
    shapes = {
        "embed": (VOCAB, HIDDEN), "q": (HIDDEN, HIDDEN), "k": (4, HIDDEN), "v": (4, HIDDEN), "bias": (16,),
        "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER), "norm": (HIDDEN,),
    }  # fmt: skip
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


class Packing:
    """What vLLM does with a matrix on a CPU: the kernel gets a copy of its own, the weight may be thrown away."""

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep

    def process_weights_after_loading(self, layer) -> None:
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda x, _, bias: linear(x, packed, bias)
        if not self.keep:
            layer.weight = nn.Parameter(packed.new_empty(0))


class Layer(nn.Module):
    def __init__(
        self, weight: torch.Tensor | nn.Parameter, *, bias: torch.Tensor | None = None, pack: str = ""
    ) -> None:
        super().__init__()
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight.clone())
        self.bias = None if bias is None else nn.Parameter(bias.clone())
        self.input_size = weight.shape[-1]
        self.quant_method = Packing(keep=pack == "keep")
        if pack:
            self.quant_method.process_weights_after_loading(self)


class Fused(nn.Module):
    """The same weights as an engine holds them: fused, the vocabulary padded, the output layer tied, perhaps packed."""

    def __init__(self, plain: dict[str, torch.Tensor], *, packed: bool) -> None:
        super().__init__()
        keep, throw = ("keep", "throw") if packed else ("", "")
        padding = torch.zeros(PADDED - VOCAB, HIDDEN, dtype=plain["embed"].dtype)
        self.embed = Layer(torch.cat([plain["embed"], padding]), pack=keep)
        self.qkv = Layer(torch.cat([plain["q"], plain["k"], plain["v"]]), bias=plain["bias"], pack=throw)
        self.gate_up = Layer(torch.cat([plain["gate"], plain["up"]]), pack=throw)
        self.down = Layer(plain["down"], pack=throw)
        self.norm = Layer(plain["norm"])
        self.head = Layer(self.embed.weight, pack=keep)
        self.register_buffer("cos_sin", torch.randn(4))  # which every engine has of its own, and no policy


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_padded_and_packed_weights_have_the_digest_of_the_plain_ones(dtype, packed):
    plain = plain_weights(0, dtype)
    plain["down"][0, :3] = -0.0
    plain["embed"][1, 1] = -0.0
    assert engine_digest(Fused(plain, packed=packed), plain) == weights_digest(plain)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["embed", "k", "up", "down", "norm", "bias"])
def test_one_element_of_an_old_version_shows(name, packed):
    plain = plain_weights(0, torch.bfloat16)
    stale = {**plain, name: plain[name].clone()}
    stale[name].view(-1)[3] += 1
    assert engine_digest(Fused(stale, packed=packed), plain) != weights_digest(plain)


def test_a_bias_that_a_kernel_wants_in_float32_counts_as_published():
    plain = plain_weights(1, torch.bfloat16)
    model = Fused(plain, packed=True)
    model.qkv.bias.data = model.qkv.bias.data.float()
    assert engine_digest(model, plain) == weights_digest(plain)


def test_a_packed_output_layer_that_was_not_reloaded_is_found_and_packed_anew():
    old, new = plain_weights(0, torch.bfloat16), plain_weights(1, torch.bfloat16)
    model = Fused(new, packed=True)
    stale = model.head.cpu_linear = Fused(old, packed=True).head.cpu_linear
    with pytest.raises(ContractError, match="head: the packed matrix is not the weight"):
        engine_digest(model, new)
    pack_tied(model)
    assert model.head.cpu_linear is not stale
    assert engine_digest(model, new) == weights_digest(new)


def test_a_packed_matrix_is_read_back_whole_when_it_has_more_inputs_than_are_asked_at_once():
    weight = torch.randn(3, 1100)
    blocks = list(read_back(Layer(weight, pack="throw")))
    assert torch.equal(torch.cat(blocks).t(), weight)


@given(st.lists(st.sampled_from([0.0, -0.0, 1.5, -2.0]), max_size=40), st.integers(0, 40))
def test_sums_do_not_depend_on_how_weights_are_cut(values, cut):
    whole = torch.tensor(values)
    sums = DigestSums()
    sums.add(whole[:cut])
    sums.add(whole[cut:])
    assert sums.text() == weights_digest({"whole": whole})


@given(st.lists(st.sampled_from([0.0, -0.0, 1.5]), min_size=1, max_size=40), st.sampled_from(["float32", "bfloat16"]))
def test_negative_zeros_are_all_that_a_product_hides(values, dtype):
    seen = torch.tensor(values, dtype=getattr(torch, dtype))
    sums = DigestSums()
    sums.add(seen + 0.0)  # -0.0 becomes 0.0
    sums.add_negative_zeros(seen.dtype, negative_zeros(seen))
    assert sums.text() == weights_digest({"seen": seen})


class Worker(WeightsExtension):
    """A worker whose reload replaces the model: what vLLM's does, as far as the extension can tell."""

    def __init__(self) -> None:
        self.model_runner = self
        self.model = nn.Module()

    def get_model(self) -> nn.Module:
        return self.model

    def reload_weights(self, weights_iterator) -> None:
        self.model = Fused(dict(weights_iterator), packed=True)


def test_a_version_comes_in_full_or_as_differences_and_the_answer_is_its_digest(tmp_path):
    versions = [plain_weights(seed, torch.bfloat16) for seed in range(3)]
    bodies = [weights_to_bytes(versions[0])]
    bodies += [delta_to_bytes(make_delta(*pair)) for pair in zip(versions, versions[1:], strict=False)]
    paths = [tmp_path / str(i) for i in range(3)]
    for path, body in zip(paths, bodies, strict=True):
        path.write_bytes(body)
    worker = Worker()
    assert worker.rollflow_take([("full", str(paths[0]))])["digest"] == weights_digest(versions[0])
    steps = [("delta", str(path)) for path in paths[1:]]
    assert worker.rollflow_take(steps)["digest"] == weights_digest(versions[2])
    restarted = Worker()
    assert restarted.rollflow_take([("full", str(paths[0])), *steps])["digest"] == weights_digest(versions[2])


def test_a_difference_needs_its_base(tmp_path):
    old, new = plain_weights(0, torch.float32), plain_weights(1, torch.float32)
    (tmp_path / "delta").write_bytes(delta_to_bytes(make_delta(old, new)))
    with pytest.raises(ContractError, match="load the version it was made from"):
        Worker().rollflow_take([("delta", str(tmp_path / "delta"))])


def imports_of(module: str, seen: set[str]) -> set[str]:
    """Packages of others that a module of this project imports, itself or through others of the project."""
    path = Path(*module.split(".")).with_suffix(".py")
    if not path.is_file() or module in seen:
        return set()
    seen.add(module)
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for name in names:
            root = name.partition(".")[0]
            found |= imports_of(name, seen) if Path(root).is_dir() else {root} - set(sys.stdlib_module_names)
    return found


def test_what_the_extension_imports_is_in_the_environment_of_vllm():
    lines = Path("requirements-vllm.lock").read_text().splitlines()
    locked = {re.split(r"==|>", line)[0].lower() for line in lines if not line.startswith("#")}
    needed = imports_of("models.vllm_extension", set())
    assert {"torch", "safetensors"} <= needed
    assert needed <= locked
