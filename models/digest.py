"""A digest over the bits of a model's weights that does not depend on how they are laid out.

The trainer publishes it with a version, the engine computes it over what it holds after loading, and the two
must agree, although an engine may have fused tensors (query, key and value in one), padded them with zeros
or renamed them. So no name, shape or order enters: only the multiset of nonzero bit patterns, by dtype.

Every element's bits, read as an unsigned integer x of the element's width (8, 16, 32 or 64 bits), enter two
sums modulo 2**64:

    sum of x     and     sum of mix(x)

    mix(x):  y = x * 0x9E3779B97F4A7C15;  y ^= y >> 32;  y *= 0xD6E8FEB86659FD93
             (products modulo 2**64; the shift is arithmetic: y is read as signed)

The text is `<dtype>:<32 hexadecimal digits>`, joined by "+" in order of dtype when there are several. mix(0) is
0, so padding with +0.0 changes nothing (-0.0 has a bit set and counts). The plain sum alone would miss changes
that cancel, such as one element a step up and another a step down; the mixed one breaks that linearity.

What it detects: any one changed element, and any number of changed elements except by a coincidence of two
64-bit sums; another dtype; a tensor missing, doubled or stale. What it does not detect: the same elements in
another place (a permutation, a transposed or swapped tensor of equal dtype), zeros added or removed, and
deliberate forgery: it is no cryptographic hash. Bytes on their way are guarded by SHA-256 elsewhere.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 16  # 512 KiB as int64: the working set stays in the core's own cache
_FIRST_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
_SECOND_ODD = 0xD6E8FEB86659FD93 - (1 << 64)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 1 << 64


def weights_digest(named_tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of the weights, as the module's text defines it.

    A tensor that appears under several names (tied weights: same memory, dtype and shape) counts once, so a
    state dict and the deduplicated weights give the same digest. About 0.3 s for 135 M elements on one core.

    Args:
        named_tensors: weights by name; names and order do not matter.

    Returns:
        `<dtype>:<32 hexadecimal digits>`, several joined by "+".
    """
    sums = DigestSums()
    seen: set[tuple] = set()
    for tensor in named_tensors.values():
        identity = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if identity not in seen:
            seen.add(identity)
            sums.add(tensor)
    return sums.text()


class DigestSums:
    """The sums of a digest, tensor by tensor, for weights that are not all in memory at once."""

    def __init__(self) -> None:
        self._sums: dict[str, list[int]] = {}

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's elements; that it is not counted twice is for the caller to see to."""
        if tensor.numel():
            self._count(tensor.dtype, *_sums(bits_of(tensor)))

    def add_negative_zeros(self, dtype: torch.dtype, number: int) -> None:
        """Count `number` elements that are -0.0."""
        if number:
            plain, mixed = _sums(bits_of(torch.tensor([-0.0], dtype=dtype)))
            self._count(dtype, number * plain, number * mixed)

    def text(self) -> str:
        """Return the digest of what has been counted."""
        return "+".join(
            f"{dtype}:" + "".join(f"{value:016x}" for value in self._sums[dtype]) for dtype in sorted(self._sums)
        )

    def _count(self, dtype: torch.dtype, plain: int, mixed: int) -> None:
        total = self._sums.setdefault(str(dtype).removeprefix("torch."), [0, 0])
        total[0] = (total[0] + plain) % _MODULUS
        total[1] = (total[1] + mixed) % _MODULUS


def negative_zeros(tensor: Tensor) -> int:
    """Return how many elements of a floating-point tensor are -0.0."""
    return int((bits_of(tensor) == bits_of(torch.tensor([-0.0], dtype=tensor.dtype, device=tensor.device))).sum())


def bits_of(tensor: Tensor) -> Tensor:
    """Return the elements' bit patterns as a flat integer tensor; a view when `tensor` is contiguous."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def _sums(bits: Tensor) -> tuple[int, int]:
    """Return the plain and the mixed sum modulo 2**64 over a flat integer tensor."""
    mask = (1 << (8 * bits.element_size())) - 1
    plain, mixed = torch.zeros(2, dtype=torch.int64, device=bits.device)
    buffers = torch.empty(2, min(_CHUNK_ELEMENTS, bits.numel()), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK_ELEMENTS):
        x, y = buffers[:, : chunk.numel()]
        x.copy_(chunk)
        if mask < _MODULUS - 1:
            x &= mask  # undoes the sign extension of a narrow integer
        plain += x.sum()
        torch.mul(x, _FIRST_ODD, out=y)
        torch.bitwise_right_shift(y, 32, out=x)
        y ^= x
        y *= _SECOND_ODD
        mixed += y.sum()
    return int(plain) % _MODULUS, int(mixed) % _MODULUS
