"""The digest sees every changed bit and no layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.digest import bits_of, weights_digest

MODULUS = 1 << 64


def by_hand(tensors):
    """The definition in the module's text, one element at a time in Python's integers."""
    sums = {}
    for tensor in tensors:
        width = 8 * tensor.element_size()
        plain, mixed = sums.setdefault(str(tensor.dtype).removeprefix("torch."), [0, 0])
        for bits in bits_of(tensor).tolist():
            x = bits % (1 << width)
            y = x * 0x9E3779B97F4A7C15 % MODULUS
            signed = y - MODULUS if y >= MODULUS // 2 else y
            y = (signed ^ (signed >> 32)) * 0xD6E8FEB86659FD93 % MODULUS
            plain, mixed = (plain + x) % MODULUS, (mixed + y) % MODULUS
        sums[str(tensor.dtype).removeprefix("torch.")] = [plain, mixed]
    return "+".join(f"{dtype}:{a:016x}{b:016x}" for dtype, (a, b) in sorted(sums.items()))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
def test_it_follows_its_definition(dtype):
    torch.manual_seed(0)
    tensor = (torch.randn(7, 31) * 3).to(dtype)
    assert weights_digest({"a": tensor}) == by_hand([tensor])


def test_dtypes_are_summed_apart_and_joined_in_order():
    torch.manual_seed(0)
    tensors = [torch.randn(5), torch.randn(5).bfloat16(), torch.arange(3)]
    digest = weights_digest(dict(enumerate(tensors)))
    assert digest == by_hand(tensors)
    assert [part.split(":")[0] for part in digest.split("+")] == ["bfloat16", "float32", "int64"]


def test_sums_cross_chunk_boundaries():
    torch.manual_seed(0)
    whole = torch.randn(3 * 65536 + 5)
    parts = {f"{i}": part for i, part in enumerate(whole.split(1009))}
    assert weights_digest({"a": whole}) == weights_digest(parts)


def test_layout_does_not_matter():
    torch.manual_seed(0)
    q, k, v = torch.randn(8, 4), torch.randn(2, 4), torch.randn(2, 4)
    apart = {"q": q, "k": k, "v": v}
    padded_and_fused = torch.nn.functional.pad(torch.cat([v, q, k]), (0, 3, 0, 5))
    assert weights_digest(apart) == weights_digest({"qkv": padded_and_fused})
    assert weights_digest(apart) == weights_digest({"x": v.t(), "y": k, "z": q[:, [2, 0, 1, 3]]})


def test_tied_weights_count_once_and_copies_twice():
    tensor = torch.randn(4, 4)
    once = weights_digest({"a": tensor})
    assert weights_digest({"a": tensor, "b": tensor}) == once
    assert weights_digest({"a": tensor, "b": tensor.clone()}) != once


def test_dtype_is_part_of_it():
    values = torch.tensor([1.0, 2.0])
    digests = {weights_digest({"a": values.to(dtype)}) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    assert len(digests) == 3


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.data(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_flipping_any_bits_changes_it(num, data, dtype):
    tensor = torch.randn(num, generator=torch.Generator().manual_seed(num)).to(dtype)
    changed = tensor.clone()
    width = 8 * tensor.element_size()
    places = data.draw(st.lists(st.integers(0, num - 1), min_size=1, max_size=5, unique=True))
    for place in places:
        bits = bits_of(changed)
        flipped = bits[place] ^ (1 << data.draw(st.integers(0, width - 2)))
        bits[place] = flipped
    same_multiset = sorted(bits_of(tensor).tolist()) == sorted(bits_of(changed).tolist())
    assert (weights_digest({"a": tensor}) == weights_digest({"a": changed})) == same_multiset


def test_changes_that_cancel_in_a_plain_sum_are_seen():
    bits = torch.tensor([1000, 2000, 3000, 4000], dtype=torch.int32)
    stepped = bits + torch.tensor([1, -1, -1, 1], dtype=torch.int32)  # the plain sum stays
    shifted = torch.tensor([1001, 1999, 3000, 4000], dtype=torch.int32)
    digests = {weights_digest({"a": x.view(torch.float32)}) for x in (bits, stepped, shifted)}
    assert len(digests) == 3


def test_negative_zero_is_seen_and_positive_zero_is_not():
    base = torch.tensor([1.5])
    assert weights_digest({"a": base, "b": torch.zeros(3)}) == weights_digest({"a": base})
    assert weights_digest({"a": base, "b": -torch.zeros(3)}) != weights_digest({"a": base})
