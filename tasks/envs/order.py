"""Seeded orders of whole numbers, computed and never stored.

A permutation of n numbers by a keyed Feistel network with cycle walking: any element in a few microseconds,
at any n, the same in every process and Python version.
"""

import hashlib

_ROUNDS = 4


def permute(index: int, size: int, key: str) -> int:
    """Return where `index` lies in the permutation of range(size) that `key` names.

    Args:
        index: from 0, below `size`.
        size: how many numbers are permuted.
        key: any text; another key gives an unrelated order.

    Raises:
        IndexError: `index` is outside.
    """
    if not 0 <= index < size:
        raise IndexError(f"index {index} is outside 0 to {size - 1}")
    half_bits = (max(size - 1, 1).bit_length() + 1) // 2
    number = index
    while True:  # a walk along one cycle of the larger power of four; at most 4 steps on average
        number = _feistel(number, half_bits, key)
        if number < size:
            return number


def uniform(number: int, key: str) -> float:
    """Return a number in [0, 1) that `number` and `key` decide."""
    return _hash(number, key) / 2.0**64


def _feistel(number: int, half_bits: int, key: str) -> int:
    mask = (1 << half_bits) - 1
    left, right = number >> half_bits, number & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (_hash(right, f"{key}/{turn}") & mask)
    return left << half_bits | right


def _hash(number: int, key: str) -> int:
    """Return 64 bits."""
    return int.from_bytes(hashlib.blake2b(f"{key}:{number}".encode(), digest_size=8).digest(), "big")
