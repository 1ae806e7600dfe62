"""A difference gives back the very bits, or says that it cannot."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.errors import ContractError, DigestMismatch
from models.delta import Delta, apply_delta, delta_from_bytes, delta_to_bytes, make_delta
from models.digest import bits_of, weights_digest
from models.policy import weights_to_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]


def same_bits(a, b):
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and torch.equal(bits_of(a[n]), bits_of(b[n])) for n in a
    )


@st.composite
def two_versions(draw):
    """Two weight dicts that differ in any number of elements, special values included."""
    base, new = {}, {}
    for index in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.sampled_from([(), (1,), (7,), (300,), (3, 500), (0, 4)]))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
        old = (torch.randn(shape, generator=generator) * 2).to(dtype)
        fresh = old.clone()
        share = draw(st.sampled_from([0.0, 0.003, 0.1, 1.0]))
        hit = torch.rand(shape, generator=generator) < share
        if dtype.is_floating_point:
            special = draw(st.sampled_from([0.0, -0.0, math.nan, math.inf, 1.25]))
            fresh[hit] = torch.tensor(special, dtype=dtype)
        else:
            fresh[hit] = (fresh[hit].long() + 1).to(dtype)
        base[f"w{index}"], new[f"w{index}"] = old, fresh
    return base, new


@settings(max_examples=150, deadline=None)
@given(two_versions())
def test_applying_gives_the_same_bits(versions):
    base, new = versions
    before = {name: tensor.clone() for name, tensor in base.items()}
    delta = delta_from_bytes(delta_to_bytes(make_delta(base, new)))
    assert same_bits(apply_delta(base, delta), new)
    assert same_bits(base, before)


@settings(max_examples=60, deadline=None)
@given(two_versions())
def test_it_never_exceeds_the_changed_tensors(versions):
    base, new = versions
    changed = [n for n in base if not torch.equal(bits_of(base[n]), bits_of(new[n]))]
    assert make_delta(base, new).num_bytes <= sum(new[n].numel() * new[n].element_size() for n in changed)


@pytest.mark.parametrize("num_changed", [1, 10, 400, 9_000, 100_000])
def test_gaps_of_every_width_come_back(num_changed):
    generator = torch.Generator().manual_seed(num_changed)
    base = {"a": torch.randn(300_000, generator=generator).bfloat16()}
    new = {"a": base["a"].clone()}
    bits_of(new["a"])[torch.randperm(300_000, generator=generator)[:num_changed]] ^= 1
    delta = delta_from_bytes(delta_to_bytes(make_delta(base, new)))
    assert same_bits(apply_delta(base, delta), new)


def test_one_per_cent_changed_costs_about_three_bytes_a_change():
    generator = torch.Generator().manual_seed(0)
    base = {"a": torch.randn(1000, 1000, generator=generator).bfloat16()}
    new = {"a": base["a"].clone()}
    bits_of(new["a"])[torch.randperm(1_000_000, generator=generator)[:10_000]] ^= 1
    delta = make_delta(base, new)
    assert delta.tensors["a@gaps"].dtype == torch.uint8
    assert 30_000 <= delta.num_bytes <= 33_500  # 2 million bytes in full


def test_a_far_change_is_reached_over_unchanged_places():
    base = {"a": torch.zeros(5_000_000, dtype=torch.uint8)}
    new = {"a": base["a"].clone()}
    new["a"][-1] = 7
    delta = make_delta(base, new)
    assert delta.num_bytes < 10
    assert same_bits(apply_delta(base, delta), new)


def test_dense_changes_are_stored_whole_and_equal_weights_not_at_all():
    base = {"a": torch.randn(100), "b": torch.randn(100)}
    delta = make_delta(base, {"a": base["a"] + 1, "b": base["b"].clone()})
    assert list(delta.tensors) == ["a"]
    assert make_delta(base, base).tensors == {}


def test_a_wrong_base_is_refused():
    base = {"a": torch.arange(100.0)}
    new = {"a": base["a"].clone()}
    new["a"][3] = -1
    other = {"a": base["a"].clone()}
    other["a"][50] += 1
    delta = make_delta(base, new)
    with pytest.raises(DigestMismatch, match="base weights have digest"):
        apply_delta(other, delta)
    with pytest.raises(DigestMismatch, match="result has digest"):
        apply_delta(other, delta, base_digest=weights_digest(base))


def test_altered_entries_are_refused():
    base = {"a": torch.arange(100.0)}
    new = {"a": base["a"].clone()}
    new["a"][3] = -1
    good = make_delta(base, new)
    altered = Delta({**good.tensors, "a@new": torch.tensor([-2.0])}, good.base_digest, good.digest)
    with pytest.raises(DigestMismatch, match="result has digest"):
        apply_delta(base, altered)
    outside = Delta({**good.tensors, "a@gaps": torch.tensor([200], dtype=torch.int32)}, good.base_digest, good.digest)
    with pytest.raises(ContractError, match="entries of weight a"):
        apply_delta(base, outside)
    unknown = Delta({"z": torch.zeros(1)}, good.base_digest, good.digest)
    with pytest.raises(ContractError, match="weight z is not in the base"):
        apply_delta(base, unknown)


def test_weights_that_cannot_be_compared_are_refused():
    base = {"a": torch.zeros(3)}
    with pytest.raises(ContractError, match="one side only"):
        make_delta(base, {"b": torch.zeros(3)})
    with pytest.raises(ContractError, match="weight a is torch.float32"):
        make_delta(base, {"a": torch.zeros(3).bfloat16()})


def test_other_bytes_are_refused():
    with pytest.raises(ContractError, match="expected format"):
        delta_from_bytes(weights_to_bytes({"a": torch.zeros(3)}))
    with pytest.raises(ContractError, match="header"):
        delta_from_bytes(b"not safetensors")
