"""The exact difference between two versions of the weights, as small as the changes are.

After one step of reinforcement learning most published (bfloat16) weights keep their bits, and most of those that
move go to the next number up or down. So a version is published as what changed since the one before. Compared and
stored are bit patterns, never values: applying a difference gives the very same bits, which the digest proves.

For each changed tensor the difference holds the places that changed and, for each, its step: new bits less old bits,
modulo two to the width. Tensors without changes do not appear.

As bytes it is one safetensors file whose metadata names the digests of both ends. Numbers of all tensors, one after
the other, are cut into planes (all lowest bytes, all second bytes, ...) and each plane is compressed by zstd: high
bytes, nearly all of them zero, cost next to nothing. What is left is about the entropy of the places, and a bit a
direction.

    table             JSON: for every tensor (name, elements, changes, bytes of an element, bytes of a gap)
    gap<width>.<k>    byte k of the distances to the previous place, less one; the first one's from place -1
    bitmap            places of tensors of which so many changed that a bit for each element is less; gaps have 0 bytes
    down              a bit for each step, set where it is negative
    size<width>.<k>   byte k of the steps' absolute values, less one
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from data_contracts.errors import ContractError, DigestMismatch
from models.digest import bits_of, weights_digest
from models.policy import metadata_from_bytes, weights_from_bytes, weights_to_bytes

_FORMAT = "delta/2"
_CODEC = "zstd"
_LEVEL = 1
_TABLE, _BITMAP, _DOWN = "table", "bitmap", "down"
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_DENSE = 0.3
"""Share of changed elements from which gaps take more than a bit for each element."""


@dataclass(frozen=True)
class Change:
    """What changed in one tensor."""

    num_elements: int
    """Of the tensor."""
    places: np.ndarray
    """int64 [n], ascending."""
    steps: np.ndarray
    """Unsigned, as wide as an element, [n]: new bits less old bits, modulo 2**width; none is 0."""


@dataclass(frozen=True)
class Delta:
    """What turns one set of weights into another."""

    changes: dict[str, Change]
    """By name; unchanged tensors are left out."""
    base_digest: str
    """Weights it applies to."""
    digest: str
    """Weights it gives."""

    @property
    def num_changed(self) -> int:
        """Elements whose bits changed, over all tensors."""
        return sum(len(change.places) for change in self.changes.values())


def make_delta(
    base: Mapping[str, Tensor], new: Mapping[str, Tensor], *, base_digest: str | None = None, digest: str | None = None
) -> Delta:
    """Return the difference from `base` to `new`.

    Args:
        base: weights by name.
        new: weights of the same names, shapes and dtypes.
        base_digest: digest of `base`, if known; computed otherwise.
        digest: digest of `new`, if known; computed otherwise.

    Raises:
        ContractError: names, shapes or dtypes differ.
    """
    if base.keys() != new.keys():
        odd = sorted(base.keys() ^ new.keys())
        raise ContractError(f"delta: weights {odd[:3]} ({len(odd)}) are on one side only: publish this version in full")
    changes: dict[str, Change] = {}
    for name, tensor in new.items():
        old = base[name]
        if (old.dtype, old.shape) != (tensor.dtype, tensor.shape):
            raise ContractError(
                f"delta: weight {name} is {old.dtype} {tuple(old.shape)} in the base, "
                f"{tensor.dtype} {tuple(tensor.shape)} in the new version: publish this version in full"
            )
        if change := _change(bits_of(old), bits_of(tensor)):
            changes[name] = change
    return Delta(changes, base_digest or weights_digest(base), digest or weights_digest(new))


def apply_delta(base: Mapping[str, Tensor], delta: Delta, *, base_digest: str | None = None) -> dict[str, Tensor]:
    """Return the new weights; unchanged tensors are those of `base`, changed ones are copies.

    Args:
        base: weights by name.
        delta: what `make_delta` returned.
        base_digest: digest of `base`, if it was computed before; the result is verified in any case.

    Raises:
        DigestMismatch: `base` is not what the difference was made from, or the result is not what it promises.
        ContractError: the difference names a weight that `base` lacks, or a place outside of it.
    """
    found = base_digest or weights_digest(base)
    if found != delta.base_digest:
        raise DigestMismatch(
            f"delta: base weights have digest {found}, expected {delta.base_digest}: load the version it was made from"
        )
    result = dict(base)
    for name, change in delta.changes.items():
        if name not in base:
            raise ContractError(f"delta: weight {name} is not in the base: load weights of the same architecture")
        result[name] = _moved(name, base[name], change)
    found = weights_digest(result)
    if found != delta.digest:
        raise DigestMismatch(f"delta: result has digest {found}, expected {delta.digest}: ask for this version in full")
    return result


def delta_to_bytes(delta: Delta) -> bytes:
    """Return the difference as one safetensors file; equal input gives equal bytes."""
    table: list[tuple[str, int, int, int, int]] = []
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    for name, change in sorted(delta.changes.items()):
        gaps = np.diff(change.places, prepend=-1) - 1
        gap_width = _width_of(int(gaps.max())) if len(gaps) < _DENSE * change.num_elements else 0
        table.append((name, change.num_elements, len(gaps), change.steps.itemsize, gap_width))
        if gap_width:
            _cut(parts, "gap", gaps.astype(_UNSIGNED[gap_width]))
        else:
            bitmap = np.zeros(change.num_elements, bool)
            bitmap[change.places] = True
            parts[_BITMAP].append(np.packbits(bitmap))
        is_down = change.steps.view(_SIGNED[change.steps.itemsize]) < 0
        parts[_DOWN].append(np.packbits(is_down))
        one = change.steps.dtype.type(1)
        _cut(parts, "size", np.where(is_down, ~change.steps, change.steps - one))
    parts[_TABLE] = [np.frombuffer(json.dumps(table).encode(), np.uint8)]
    planes = {name: np.concatenate(arrays) for name, arrays in sorted(parts.items())}
    metadata = {"format": _FORMAT, "base_digest": delta.base_digest, "digest": delta.digest}
    sizes = json.dumps({name: len(plane) for name, plane in planes.items()})
    return weights_to_bytes({name: _compress(plane) for name, plane in planes.items()}, metadata | {"sizes": sizes})


def delta_from_bytes(body: bytes) -> Delta:
    """Parse what `delta_to_bytes` wrote.

    Raises:
        ContractError: the bytes are no difference of this format.
    """
    metadata = metadata_from_bytes(body)
    if metadata.get("format") != _FORMAT:
        raise ContractError(f"delta: expected format {_FORMAT}, got {metadata.get('format')}: these are other weights")
    compressed = weights_from_bytes(body)
    planes = _Planes({name: _expand(compressed, name, size) for name, size in json.loads(metadata["sizes"]).items()})
    changes = {}
    for name, num_elements, num, width, gap_width in json.loads(planes.all(_TABLE)):
        if gap_width:
            places = (planes.numbers("gap", gap_width, num).astype(np.int64) + 1).cumsum() - 1
        else:
            places = np.flatnonzero(planes.bits(_BITMAP, num_elements))
        is_down, sizes = planes.bits(_DOWN, num), planes.numbers("size", width, num)
        changes[name] = Change(num_elements, places, np.where(is_down, ~sizes, sizes + sizes.dtype.type(1)))
    return Delta(changes, metadata["base_digest"], metadata["digest"])


def _change(old: Tensor, new: Tensor) -> Change | None:
    """Return what changed between flat integer tensors; None when nothing did."""
    places = torch.nonzero(old != new).view(-1)
    if not len(places):
        return None
    return Change(new.numel(), places.cpu().numpy(), _unsigned(new[places]) - _unsigned(old[places]))


def _moved(name: str, old: Tensor, change: Change) -> Tensor:
    """Return a copy of `old` with its elements moved."""
    places, steps = change.places, change.steps
    fits = len(places) == len(steps) > 0 and places[-1] < old.numel() and steps.itemsize == old.element_size()
    if not fits:
        raise ContractError(
            f"delta: entries of weight {name} do not fit {old.dtype} {tuple(old.shape)}: ask for this version in full"
        )
    result = old.detach().cpu().clone(memory_format=torch.contiguous_format)
    _unsigned(bits_of(result))[places] += steps
    return result.to(old.device)


def _unsigned(bits: Tensor) -> np.ndarray:
    """Return a flat integer tensor as unsigned numbers, whose arithmetic wraps around; a view when on the CPU."""
    return bits.cpu().numpy().view(_UNSIGNED[bits.element_size()])


def _width_of(largest: int) -> int:
    return next(width for width in _UNSIGNED if largest < 1 << (8 * width))


def _cut(parts: dict[str, list[np.ndarray]], kind: str, numbers: np.ndarray) -> None:
    """Append the bytes of `numbers` to the planes of their kind and width, lowest bytes first."""
    width = numbers.itemsize
    columns = np.ascontiguousarray(numbers.astype(numbers.dtype.newbyteorder("<"))).view(np.uint8).reshape(-1, width)
    for k in range(width):
        parts[f"{kind}{width}.{k}"].append(columns[:, k])


class _Planes:
    """Gives back the numbers of one tensor after the other."""

    def __init__(self, planes: Mapping[str, np.ndarray]) -> None:
        self._planes = planes
        self._at: dict[str, int] = defaultdict(int)

    def all(self, name: str) -> bytes:
        """Return a plane as it is."""
        return self._planes[name].tobytes()

    def numbers(self, kind: str, width: int, num: int) -> np.ndarray:
        """Return the next `num` numbers of a kind and width."""
        columns = np.empty((num, width), np.uint8)
        for k in range(width):
            columns[:, k] = self._next(f"{kind}{width}.{k}", num)
        return columns.view(np.dtype(_UNSIGNED[width]).newbyteorder("<")).reshape(-1).astype(_UNSIGNED[width])

    def bits(self, name: str, num: int) -> np.ndarray:
        """Return the next `num` bits, which end with a whole byte."""
        return np.unpackbits(self._next(name, -(-num // 8)), count=num).astype(bool)

    def _next(self, name: str, num_bytes: int) -> np.ndarray:
        start, plane = self._at[name], self._planes.get(name, np.empty(0, np.uint8))
        self._at[name] += num_bytes
        if self._at[name] > len(plane):
            raise ContractError(f"delta: plane {name} is too short: ask for this version in full")
        return plane[start : start + num_bytes]


def _compress(plane: np.ndarray) -> Tensor:
    body = pa.Codec(_CODEC, compression_level=_LEVEL).compress(plane, asbytes=True)
    return torch.from_numpy(np.frombuffer(body, np.uint8).copy())


def _expand(planes: Mapping[str, Tensor], name: str, size: int) -> np.ndarray:
    try:
        body = pa.Codec(_CODEC).decompress(planes[name].numpy(), decompressed_size=size, asbytes=True)
    except (KeyError, OSError) as cause:
        raise ContractError(f"delta: plane {name} is missing or torn: ask for this version in full") from cause
    return np.frombuffer(body, np.uint8)
