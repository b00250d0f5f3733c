"""Which sample comes when: a pure function of the seed and one integer, in constant memory.

A global index g lies in a block of `MIX_BLOCK` samples. How many samples of each source a block holds is
fixed, their order within it depends on the block; the cursor of a source at g so follows from g alone. Each
pass over a source (an epoch) is a permutation of its own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

from forge_data.error import DataError

MIX_BLOCK = 4096
"""Weights hold within every block of so many samples."""

VERSION = 2
"""Part of every fingerprint; another number when the same seed would give another order."""

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

    Source: a balanced Feistel network with cycle walking (Black & Rogaway 2002, "Ciphers with arbitrary
    finite domains"), the round function being a multiply-xorshift mix.
    """
    if size <= 1:
        return np.zeros_like(index)
    half = U64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = U64((1 << int(half)) - 1)
    keys = _round_keys(seed)
    value = _feistel(index.ravel().astype(U64), half, mask, keys)
    outside = np.flatnonzero(value >= U64(size))
    while len(outside):
        value[outside] = moved = _feistel(value[outside], half, mask, keys)
        outside = outside[moved >= U64(size)]
    return value.astype(np.int64).reshape(index.shape)


@lru_cache(maxsize=1024)
def _round_keys(seed: int) -> list[np.uint64]:
    return [U64(key(seed, r)) for r in range(ROUNDS)]


def _feistel(value: np.ndarray, half: np.uint64, mask: np.uint64, keys: Sequence[np.uint64]) -> np.ndarray:
    left, right = value >> half, value & mask
    for round_key in keys:
        mixed = _mix(right, round_key)
        mixed &= mask
        mixed ^= left
        left, right = right, mixed
    return (left << half) | right


def _mix(value: np.ndarray, round_key: np.uint64) -> np.ndarray:
    """The finalizer of splitmix64 (Steele et al. 2014)."""
    value = value + round_key
    value *= U64(0x9E3779B97F4A7C15)
    value ^= value >> U64(30)
    value *= U64(0xBF58476D1CE4E5B9)
    value ^= value >> U64(27)
    value *= U64(0x94D049BB133111EB)
    value ^= value >> U64(31)
    return value


class Order:
    """The endless order of samples over weighted sources.

    The first k blocks hold `floor(k * c[s+1]) - floor(k * c[s])` samples of source s, c being the exact
    running sum of shares times MIX_BLOCK: at every block boundary its count is within one sample of its
    share, however far the run goes, and in between within one block. The cursor of a source is computed from
    g, never stored.

    Args:
        seed: of the run.
        sizes: samples in each source.
        weights: share of each source, in any unit.

    Raises:
        DataError: a source is empty, or its share is below 1 / MIX_BLOCK.
    """

    def __init__(self, seed: int, sizes: Sequence[int], weights: Sequence[float]) -> None:
        self.seed = seed
        self.sizes = [int(size) for size in sizes]
        exact = [Fraction(str(weight)) for weight in weights]
        for source, (size, weight) in enumerate(zip(self.sizes, exact, strict=True)):
            if size < 1:
                raise DataError(
                    f"source {source} has no sample; it needs more tokens than one sequence is long"
                )
            if weight * MIX_BLOCK < sum(exact):
                raise DataError(
                    f"source {source} has weight {float(weight):g}, {float(weight / sum(exact)):.2g} of all; "
                    f"at least 1/{MIX_BLOCK} of all is needed: raise it or drop the source"
                )
        self._edges = [sum(exact[:n], Fraction(0)) / sum(exact) * MIX_BLOCK for n in range(len(exact) + 1)]

    def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the samples with these global indices are.

        Args:
            index: [n] int64, from 0.

        Returns:
            Two [n] int64: the source, and the sample within it.
        """
        source, cursor = np.zeros_like(index), index.copy()
        if len(self.sizes) > 1:
            block, slot = np.divmod(index, MIX_BLOCK)
            for b in np.unique(block):
                here = block == b
                source[here], cursor[here] = self._mix(int(b), slot[here])
        sample = np.empty_like(index)
        for s, size in enumerate(self.sizes):
            of_source = np.flatnonzero(source == s)
            epoch, inside = np.divmod(cursor[of_source], size)
            for e in np.unique(epoch):
                here = epoch == e
                sample[of_source[here]] = permute(inside[here], size, key(self.seed, "epoch", s, int(e)))
        return source, sample

    def epochs(self, num_samples: int) -> list[float]:
        """How often each source will have been read after so many samples."""
        full = num_samples // MIX_BLOCK
        used = np.diff([math.floor(full * edge) for edge in self._edges])
        source, _ = self.locate(np.arange(full * MIX_BLOCK, num_samples, dtype=np.int64))
        used = used + np.bincount(source, minlength=len(self.sizes))
        return [float(n) / size for n, size in zip(used, self.sizes, strict=True)]

    def _mix(self, block: int, slot: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source and cursor of slots of a block. Each source is read in the order of its cursors.

        So no sample of an epoch is served before all of the epoch before were.
        """
        before = np.asarray([math.floor(block * edge) for edge in self._edges])
        after = np.asarray([math.floor((block + 1) * edge) for edge in self._edges])
        starts = after - before
        everyone = permute(np.arange(MIX_BLOCK), MIX_BLOCK, key(self.seed, "block", block))
        source = np.searchsorted(starts, everyone, side="right") - 1
        place = np.empty_like(everyone)
        place[np.argsort(source, kind="stable")] = np.arange(MIX_BLOCK)
        cursor = np.diff(before)[source] + place - starts[source]
        return source[slot], cursor[slot]
