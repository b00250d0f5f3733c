"""Which sample comes when: a pure function of the seed and one integer, in constant memory.

A global index g lies in a block of `MIX_BLOCK` samples. Every block holds a fixed number of samples of each source, in
an order that depends on the block; the cursor of a source at g so follows from g alone. Each pass over a source (an
epoch) is a permutation of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from forge_data.error import DataError

MIX_BLOCK = 4096
"""Weights are kept exactly within every block of so many samples, rounded to multiples of its inverse."""

ROUNDS = 6

U64 = np.uint64


def key(*parts: object) -> int:
    """64 bits that depend on all parts."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def permute(index: np.ndarray, size: int, seed: int) -> np.ndarray:
    """A keyed permutation of 0..size-1, evaluated at `index`.

    Args:
        index: int64, each in [0, size).
        size: how many there are; up to 2**62.
        seed: 64 bits; another seed is another permutation.

    Returns:
        int64, like `index`.

    Source: a balanced Feistel network with cycle walking (Black & Rogaway 2002, "Ciphers with arbitrary finite
    domains"), the round function being a multiply-xorshift mix.
    """
    if size <= 1:
        return np.zeros_like(index)
    half = U64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = U64((1 << int(half)) - 1)
    keys = [U64(key(seed, r)) for r in range(ROUNDS)]
    value = index.astype(U64)
    outside = np.ones(value.shape, dtype=bool)
    while outside.any():
        value[outside] = _feistel(value[outside], half, mask, keys)
        outside = value >= U64(size)
    return value.astype(np.int64)


def _feistel(value: np.ndarray, half: np.uint64, mask: np.uint64, keys: Sequence[np.uint64]) -> np.ndarray:
    left, right = value >> half, value & mask
    for round_key in keys:
        left, right = right, left ^ (_mix(right, round_key) & mask)
    return (left << half) | right


def _mix(value: np.ndarray, round_key: np.uint64) -> np.ndarray:
    """The finalizer of splitmix64 (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        value = (value + round_key) * U64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> U64(30))) * U64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> U64(27))) * U64(0x94D049BB133111EB)
    return value ^ (value >> U64(31))


class Order:
    """The endless order of samples over weighted sources.

    Args:
        seed: of the run.
        sizes: samples in each source.
        weights: share of each source, in any unit.

    Raises:
        DataError: a source is empty, or its share is below 1 / MIX_BLOCK.
    """

    def __init__(self, seed: int, sizes: Sequence[int], weights: Sequence[float]) -> None:
        self.seed = seed
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.quotas = _quotas(weights)
        for source, (size, quota) in enumerate(zip(sizes, self.quotas, strict=True)):
            if size < 1:
                raise DataError(
                    f"source {source} has no sample; it needs more tokens than one sequence is long"
                )
            if quota < 1:
                raise DataError(
                    f"the weight of source {source} is below 1/{MIX_BLOCK} of all; raise it or drop it"
                )
        self._starts = np.concatenate([[0], np.cumsum(self.quotas)])

    def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the samples with these global indices are.

        Args:
            index: [n] int64, from 0.

        Returns:
            Two [n] int64: the source, and the sample within it.
        """
        block, slot = np.divmod(index, MIX_BLOCK)
        if len(self.quotas) > 1:
            for b in np.unique(block):
                here = block == b
                slot[here] = permute(slot[here], MIX_BLOCK, key(self.seed, "block", b))
        source = np.searchsorted(self._starts, slot, side="right") - 1
        cursor = block * self.quotas[source] + slot - self._starts[source]
        epoch, sample = np.divmod(cursor, self.sizes[source])
        for s, e in {(int(s), int(e)) for s, e in zip(source, epoch, strict=True)}:
            here = (source == s) & (epoch == e)
            sample[here] = permute(sample[here], int(self.sizes[s]), key(self.seed, "epoch", s, e))
        return source, sample


def _quotas(weights: Sequence[float]) -> np.ndarray:
    """Whole samples of each source in a block: largest remainders get what rounding down leaves."""
    exact = np.asarray(weights, dtype=np.float64) / np.sum(weights) * MIX_BLOCK
    quotas = np.floor(exact).astype(np.int64)
    left = MIX_BLOCK - int(quotas.sum())
    quotas[np.argsort(quotas - exact, kind="stable")[:left]] += 1
    return quotas
