"""The exact difference between two versions of the weights, as small as the changes are.

After one step of reinforcement learning most published (bfloat16) weights keep their bits, so a version is
published as what changed since the one before. Compared and stored are bit patterns, never values: applying a
difference gives the very same bits, which the digest proves.

For each changed tensor the difference holds the new bits at the changed places and the gaps between these
places, in the narrowest format that is smallest in total: a gap too wide for the format is bridged by places
that are stored although they did not change. A tensor that would not get smaller is stored whole. Tensors
without changes do not appear.

    <name>        the whole tensor, or
    <name>@gaps   uint8, uint16 or int32 [n]: distance to the previous place, first from place -1, less one
    <name>@new    [n] new elements

As bytes it is one safetensors file whose metadata names the digests of both ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from data_contracts.errors import ContractError, DigestMismatch
from models.digest import bits_of, weights_digest
from models.policy import metadata_from_bytes, weights_from_bytes, weights_to_bytes

_FORMAT = "delta/1"
_GAPS, _NEW = "@gaps", "@new"
_GAP_FORMATS = ((torch.uint8, 1, 1 << 8), (torch.uint16, 2, 1 << 16), (torch.int32, 4, 1 << 31))


@dataclass(frozen=True)
class Delta:
    """What turns one set of weights into another."""

    tensors: dict[str, Tensor]
    """As the module's text describes."""
    base_digest: str
    """Weights it applies to."""
    digest: str
    """Weights it gives."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


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
    tensors: dict[str, Tensor] = {}
    for name, tensor in new.items():
        old = base[name]
        if (old.dtype, old.shape) != (tensor.dtype, tensor.shape):
            raise ContractError(
                f"delta: weight {name} is {old.dtype} {tuple(old.shape)} in the base, "
                f"{tensor.dtype} {tuple(tensor.shape)} in the new version: publish this version in full"
            )
        tensors.update(_changes(name, old, tensor))
    return Delta(tensors, base_digest or weights_digest(base), digest or weights_digest(new))


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
    for name, tensor in delta.tensors.items():
        if name.endswith(_GAPS):
            continue
        target = name.removesuffix(_NEW)
        if target not in base:
            raise ContractError(f"delta: weight {target} is not in the base: load weights of the same architecture")
        if name.endswith(_NEW):
            result[target] = _overwrite(target, base[target], delta.tensors[target + _GAPS], tensor)
        else:
            result[target] = tensor
    found = weights_digest(result)
    if found != delta.digest:
        raise DigestMismatch(f"delta: result has digest {found}, expected {delta.digest}: ask for this version in full")
    return result


def delta_to_bytes(delta: Delta) -> bytes:
    """Return the difference as one safetensors file; equal input gives equal bytes."""
    metadata = {"format": _FORMAT, "base_digest": delta.base_digest, "digest": delta.digest}
    return weights_to_bytes(delta.tensors, metadata)


def delta_from_bytes(body: bytes) -> Delta:
    """Parse what `delta_to_bytes` wrote.

    Raises:
        ContractError: the bytes are no difference of this format.
    """
    metadata = metadata_from_bytes(body)
    if metadata.get("format") != _FORMAT:
        raise ContractError(f"delta: expected format {_FORMAT}, got {metadata.get('format')}: these are other weights")
    return Delta(weights_from_bytes(body), metadata["base_digest"], metadata["digest"])


def _changes(name: str, old: Tensor, new: Tensor) -> dict[str, Tensor]:
    """Return the entries of one tensor."""
    bits = bits_of(new)
    places = torch.nonzero(bits_of(old) != bits).view(-1)
    if not len(places):
        return {}
    dtype, limit, size = _cheapest(_gaps(places), bits.element_size())
    if size >= bits.numel() * bits.element_size():
        return {name: new.detach().contiguous()}
    places = _bridged(places, limit)
    return {name + _GAPS: _gaps(places).to(dtype), name + _NEW: bits[places].view(new.dtype)}


def _gaps(places: Tensor) -> Tensor:
    """Return how many places lie between each place and the one before it, from place -1 on."""
    return places.diff(prepend=places.new_tensor([-1])) - 1


def _cheapest(gaps: Tensor, element_size: int) -> tuple[torch.dtype, int, int]:
    """Return (format, number of gaps it can tell apart, bytes of the entries, bridges included) of the smallest."""
    sizes = [
        (dtype, limit, (len(gaps) + int((gaps // limit).sum())) * (gap_size + element_size))
        for dtype, gap_size, limit in _GAP_FORMATS
    ]
    return min(sizes, key=lambda entry: entry[2])


def _bridged(places: Tensor, limit: int) -> Tensor:
    """Return ascending places with others between them, so that every gap is below `limit`."""
    num_bridges = _gaps(places) // limit
    if not bool(num_bridges.any()):
        return places
    owner = torch.repeat_interleave(num_bridges)  # bridge to index of the place it leads to
    count = torch.arange(len(owner), device=places.device) - (num_bridges.cumsum(0) - num_bridges)[owner]
    return torch.cat([places, places[owner] - (count + 1) * limit]).sort().values


def _overwrite(name: str, old: Tensor, gaps: Tensor, new: Tensor) -> Tensor:
    """Return a copy of `old` with `new` elements at the places that the gaps give."""
    places = (gaps.to(torch.int64) + 1).cumsum(0) - 1
    if len(gaps) != len(new) or new.dtype != old.dtype or int(places[-1]) >= old.numel():
        raise ContractError(
            f"delta: entries of weight {name} do not fit {old.dtype} {tuple(old.shape)}: ask for this version in full"
        )
    result = old.detach().clone(memory_format=torch.contiguous_format)
    bits_of(result)[places.to(old.device)] = bits_of(new).to(old.device)
    return result
