"""A difference gives back the very bits, or says that it cannot."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.errors import ContractError, DigestMismatch
from models.delta import Change, Delta, apply_delta, delta_from_bytes, delta_to_bytes, make_delta
from models.digest import bits_of, weights_digest
from models.policy import metadata_from_bytes, weights_from_bytes, weights_to_bytes

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
def test_it_counts_what_changed_and_names_nothing_else(versions):
    base, new = versions
    differs = {n: int((bits_of(base[n]) != bits_of(new[n])).sum()) for n in base}
    delta = delta_from_bytes(delta_to_bytes(make_delta(base, new)))
    assert {name: len(change.places) for name, change in delta.changes.items()} == {
        name: num for name, num in differs.items() if num
    }
    assert delta.num_changed == sum(differs.values())


@pytest.mark.parametrize("num_changed", [1, 10, 400, 9_000, 100_000])
def test_gaps_of_every_width_come_back(num_changed):
    generator = torch.Generator().manual_seed(num_changed)
    base = {"a": torch.randn(300_000, generator=generator).bfloat16()}
    new = {"a": base["a"].clone()}
    bits_of(new["a"])[torch.randperm(300_000, generator=generator)[:num_changed]] ^= 1
    delta = delta_from_bytes(delta_to_bytes(make_delta(base, new)))
    assert same_bits(apply_delta(base, delta), new)


def neighbours(base, share):
    """Move a share of the elements to the next number up or down, as a small step of training does."""
    generator = torch.Generator().manual_seed(0)
    new = base.clone()
    hit = torch.rand(base.shape, generator=generator) < share
    up = torch.rand(base.shape, generator=generator) < 0.5
    bits_of(new)[(hit & up).view(-1)] += 1
    bits_of(new)[(hit & ~up).view(-1)] -= 1
    return new


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.05, 0.2, 0.5, 0.9])
def test_its_size_comes_near_what_the_changed_places_and_directions_say(share):
    base = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    new = neighbours(base, share)
    delta = make_delta({"a": base}, {"a": new})
    assert abs(delta.num_changed / 1e6 - share) < 0.01
    places = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    least = (places + share) * 1e6 / 8
    size = len(delta_to_bytes(delta))
    assert least < size < 1.12 * least + 1000
    assert same_bits(apply_delta({"a": base}, delta_from_bytes(delta_to_bytes(delta))), {"a": new})


def test_a_far_change_and_no_change_cost_next_to_nothing():
    base = {"a": torch.zeros(5_000_000, dtype=torch.uint8)}
    new = {"a": base["a"].clone()}
    new["a"][-1] = 7
    delta = delta_from_bytes(delta_to_bytes(make_delta(base, new)))
    assert len(delta_to_bytes(delta)) < 1000
    assert same_bits(apply_delta(base, delta), new)
    assert make_delta(base, base).changes == {}


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

    def altered(name, places, steps):
        return Delta({name: Change(100, places, steps)}, good.base_digest, good.digest)

    steps = good.changes["a"].steps
    with pytest.raises(DigestMismatch, match="result has digest"):
        apply_delta(base, altered("a", good.changes["a"].places, steps + np.uint32(1)))
    with pytest.raises(ContractError, match="entries of weight a"):
        apply_delta(base, altered("a", np.array([200]), steps))
    with pytest.raises(ContractError, match="entries of weight a"):
        apply_delta(base, altered("a", np.array([3]), steps.astype(np.uint16)))
    with pytest.raises(ContractError, match="weight z is not in the base"):
        apply_delta(base, altered("z", np.array([0]), steps))


def test_torn_planes_are_refused():
    base = {"a": torch.arange(100.0)}
    body = delta_to_bytes(make_delta(base, {"a": base["a"] + 1}))
    planes, metadata = weights_from_bytes(body), metadata_from_bytes(body)
    torn = {**planes, "size4.0": planes["size4.0"][:-3]}
    with pytest.raises(ContractError, match=r"plane size4\.0 is missing or torn"):
        delta_from_bytes(weights_to_bytes(torn, metadata))
    del torn["size4.0"]
    with pytest.raises(ContractError, match=r"plane size4\.0 is missing or torn"):
        delta_from_bytes(weights_to_bytes(torn, metadata))


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
