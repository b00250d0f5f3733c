"""Which sample comes when: a pure function of the seed and one integer, in constant memory.

A global index g lies in a block of `MIX_BLOCK` samples. The number of samples of each source in a block is
fixed, their order in it depends on the block; so the cursor of a source at g follows from g alone. Each
pass over a source (an epoch) is a permutation of its own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from forge_data.error import DataError
from forge_data.order.skips import Skips

MIX_BLOCK = 4096
"""Weights hold within every block of so many samples."""

VERSION = 2
"""Part of every fingerprint; another number when the same seed would give another order."""

ROUNDS = 6

U64 = np.uint64


def key(*parts: object) -> int:
    """Hash all parts to 64 bits; names of files may hold bytes that are no UTF-8."""
    text = "/".join(map(str, parts)).encode(errors="surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def permute(index: np.ndarray, size: int, seed: int | np.ndarray) -> np.ndarray:
    """Evaluate a keyed permutation of 0..size-1 at `index`.

    Args:
        index: int64, each in [0, size).
        size: number of elements; up to 2**62.
        seed: 64 bits, or one for each index; another seed is another permutation.

    Returns:
        int64, like `index`.

    Source: a balanced Feistel network with cycle walking (Black & Rogaway 2002, "Ciphers with arbitrary
    finite domains"), the round function being a multiply-xorshift mix.
    """
    if size <= 1 or not index.size:
        return np.zeros_like(index)
    half = U64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = U64((1 << int(half)) - 1)
    keys = _round_keys(seed) if isinstance(seed, int) else _keys_of_each(seed.ravel())
    value = _feistel(index.ravel().astype(U64), half, mask, keys)
    outside = np.flatnonzero(value >= U64(size))
    while len(outside):
        left = keys if isinstance(seed, int) else keys[:, outside]
        value[outside] = moved = _feistel(value[outside], half, mask, left)
        outside = outside[moved >= U64(size)]
    return value.astype(np.int64).reshape(index.shape)


@lru_cache(maxsize=1024)
def _round_keys(seed: int) -> np.ndarray:
    """[ROUNDS] uint64."""
    return np.asarray([key(seed, r) for r in range(ROUNDS)], dtype=U64)


def _keys_of_each(seeds: np.ndarray) -> np.ndarray:
    """[n] uint64 -> [ROUNDS, n] uint64."""
    different, which = np.unique(seeds, return_inverse=True)
    return np.stack([_round_keys(int(seed)) for seed in different], 1)[:, which]


def _feistel(value: np.ndarray, half: np.uint64, mask: np.uint64, keys: np.ndarray) -> np.ndarray:
    left, right = value >> half, value & mask
    for round_key in keys:
        mixed = _mix(right, round_key)
        mixed &= mask
        mixed ^= left
        left, right = right, mixed
    return (left << half) | right


def _mix(value: np.ndarray, round_key: np.uint64 | np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele et al. 2014)."""
    value = value + round_key
    value *= U64(0x9E3779B97F4A7C15)
    value ^= value >> U64(30)
    value *= U64(0xBF58476D1CE4E5B9)
    value ^= value >> U64(27)
    value *= U64(0x94D049BB133111EB)
    value ^= value >> U64(31)
    return value


class Mixture:
    """Weighted sources, mixed endlessly.

    The first k blocks hold `floor(k * c[s+1]) - floor(k * c[s])` samples of source s, c being the exact
    running sum of shares times MIX_BLOCK: at every block boundary its count is within one sample of its
    share, however far the run goes, and in between within one block.

    Args:
        seed: seed of the order within blocks.
        weights: share of each source, in any unit; 0 leaves a source out.

    Raises:
        DataError: a share is below 1 / MIX_BLOCK.
    """

    def __init__(self, seed: int, weights: Sequence[Fraction]) -> None:
        self.seed = seed
        self.weights = list(weights)
        for source, weight in enumerate(weights):
            share = float(weight / sum(weights))
            if 0 < weight * MIX_BLOCK < sum(weights):
                raise DataError(
                    f"source {source} has weight {float(weight):g}, {share:.2g} of all; "
                    f"at least 1/{MIX_BLOCK} of all is needed: raise it or drop the source"
                )
        shares = [weight / sum(weights) * MIX_BLOCK for weight in weights]
        self._edges = [sum(shares[:n], Fraction(0)) for n in range(len(shares) + 1)]
        used = [source for source, weight in enumerate(weights) if weight]
        self._only = used[0] if len(used) == 1 else None

    def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of the draws `index`, [n] int64 from 0, and its cursor: two [n] int64."""
        if self._only is not None:
            return np.full_like(index, self._only), index.copy()
        source, cursor = np.zeros_like(index), index.copy()
        block, slot = np.divmod(index, MIX_BLOCK)
        for b in np.unique(block):
            here = block == b
            source[here], cursor[here] = (part[slot[here]] for part in self._block(int(b)))
        return source, cursor

    def counts(self, draws: int) -> np.ndarray:
        """Return [sources] int64: the count of each source among the first `draws`."""
        full = draws // MIX_BLOCK
        source, _ = self.locate(np.arange(full * MIX_BLOCK, draws, dtype=np.int64))
        return self._before(full) + np.bincount(source, minlength=len(self.weights))

    def draws_until(self, source: int, count: int) -> int:
        """Return the number of draws before the one that takes sample `count` (from 0) of a source."""
        low, high = 0, 1
        while self._before(high)[source] <= count:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._before(middle)[source] <= count else (low, middle)
        drawn, cursor = self.locate(np.arange(low * MIX_BLOCK, (low + 1) * MIX_BLOCK, dtype=np.int64))
        return low * MIX_BLOCK + int(np.flatnonzero((drawn == source) & (cursor == count))[0])

    def _before(self, block: int) -> np.ndarray:
        return np.diff([math.floor(block * edge) for edge in self._edges])

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return source and cursor of all draws of a block. Each source is read in the order of its cursors.

        So no sample of an epoch is read before all samples of the epoch before.
        """
        before = np.asarray([math.floor(block * edge) for edge in self._edges])
        after = np.asarray([math.floor((block + 1) * edge) for edge in self._edges])
        starts = after - before
        everyone = permute(np.arange(MIX_BLOCK), MIX_BLOCK, key(self.seed, "block", block))
        source = np.searchsorted(starts, everyone, side="right") - 1
        place = np.empty_like(everyone)
        place[np.argsort(source, kind="stable")] = np.arange(MIX_BLOCK)
        return source, np.diff(before)[source] + place - starts[source]


@dataclass(frozen=True)
class Segment:
    """Samples that are drawn from one mixture.

    Attributes:
        start: the global index of the first.
        phase: the number of its phase.
        mixture: the mixture they are drawn from.
        cursors: the number of earlier samples of each source.
        exhausted: the sources that have reached their cap.
    """

    start: int
    phase: int
    mixture: Mixture
    cursors: np.ndarray
    exhausted: frozenset[int]


class Order:
    """The order of samples over weighted sources, whose weights may change at given samples.

    The cursor of a source is computed from g, never stored. It continues where weights change, so that no
    sample is left out or repeated there. A source with a cap drops out of the mixture exactly where it
    reaches it; the weights of the others stay in proportion.

    Args:
        seed: seed of the run.
        sizes: number of samples of each source.
        weights: share of each source, in any unit.
        phases: pairs of a sample, rising from above 0, and the weights from there on.
        caps: number of samples of each source that may be read in all; None for any number.
        skips: the samples that are left out; the indices of `phases` and of `segments` count them.

    Attributes:
        segments: the stretches with one mixture each.
        end: number of samples, skipped ones counted, if all sources have a cap; else None.
        skips: see above.

    Raises:
        DataError: a source is empty, or its share is below 1 / MIX_BLOCK.
    """

    def __init__(
        self,
        seed: int,
        sizes: Sequence[int],
        weights: Sequence[float],
        phases: Sequence[tuple[int, Sequence[float]]] = (),
        caps: Sequence[int | None] | None = None,
        skips: Skips | None = None,
    ) -> None:
        self.seed = seed
        self.skips = skips or Skips()
        self.sizes = [int(size) for size in sizes]
        for source, size in enumerate(self.sizes):
            if size < 1:
                raise DataError(
                    f"source {source} has no sample; it needs more tokens than one sequence is long"
                )
        self._caps = list(caps or [None] * len(self.sizes))
        self.end: int | None = None
        self.segments: list[Segment] = []
        plan = [(0, weights), *phases]
        ends = [start for start, _ in phases]
        for number, ((start, values), stop) in enumerate(zip(plan, [*ends, None], strict=True)):
            self._add_phase(number, start, stop, [Fraction(str(value)) for value in values])
        self._starts = np.asarray([segment.start for segment in self.segments])

    def _add_phase(self, phase: int, start: int, stop: int | None, weights: Sequence[Fraction]) -> None:
        """Add the segments of a phase: a new one each time a source reaches its cap."""
        cursors, gone = np.zeros(len(self.sizes), dtype=np.int64), frozenset[int]()
        if self.segments:
            last = self.segments[-1]
            cursors, gone = last.cursors + last.mixture.counts(start - last.start), last.exhausted
        while self.end is None:
            left = [Fraction(0) if s in gone else weight for s, weight in enumerate(weights)]
            if not any(left):
                self.end = start
                return
            name = (self.seed, phase, len(self.segments)) if self.segments else (self.seed,)
            mixture = Mixture(self.seed if len(name) == 1 else key("segment", *name), left)
            self.segments.append(Segment(start, phase, mixture, cursors, gone))
            out = [
                (start + mixture.draws_until(s, cap - int(cursors[s])), s)
                for s, cap in enumerate(self._caps)
                if cap is not None and left[s]
            ]
            if not out or (stop is not None and min(out)[0] >= stop):
                return
            following, source = min(out)
            cursors, gone = cursors + mixture.counts(following - start), gone | {source}
            if following == start:
                self.segments.pop()
            start = following

    def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where the samples with these indices are.

        Args:
            index: [n] int64, from 0, in the order of the run: skipped samples are not counted.

        Returns:
            Two [n] int64: the source, and the sample within it.

        Raises:
            DataError: the sources have no such sample any more.
        """
        return self.locate_ordinals(self.skips.ordinals(index))

    def locate_ordinals(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Do the same as `locate` for global indices [n] int64 that count skipped samples."""
        if self.end is not None and len(index) and int(index.max()) >= self.end:
            raise DataError(
                f"sources have been read as often as max_epochs allows after {self.end} sequences; "
                "raise max_epochs, add text, or train less"
            )
        source, cursor = np.empty_like(index), np.empty_like(index)
        within = np.searchsorted(self._starts, index, side="right") - 1
        for number in np.unique(within):
            here, segment = np.flatnonzero(within == number), self.segments[number]
            source[here], counted = segment.mixture.locate(index[here] - segment.start)
            cursor[here] = counted + segment.cursors[source[here]]
        sample = np.empty_like(index)
        for s, size in enumerate(self.sizes):
            of_source = np.flatnonzero(source == s)
            epoch, inside = np.divmod(cursor[of_source], size)
            passes, which = np.unique(epoch, return_inverse=True)
            seeds = [key(self.seed, "epoch", s, int(e)) for e in passes]
            seed = seeds[0] if len(seeds) == 1 else np.asarray(seeds, dtype=U64)[which]
            sample[of_source] = permute(inside, size, seed)
        return source, sample

    @property
    def num_samples(self) -> int | None:
        """Return the number of samples, without skipped ones; None for any number."""
        return None if self.end is None else self.skips.place(self.end)

    def counts(self, num_samples: int) -> np.ndarray:
        """Return [sources] int64: the count of each source among the first `num_samples` of the run."""
        if not num_samples:
            return np.zeros(len(self.sizes), dtype=np.int64)
        end = self.skips.ordinal(num_samples - 1) + 1
        left_out = [self._counts(b) - self._counts(a) for a, b in self.skips.intervals if b <= end]
        return self._counts(end) - sum(left_out)

    def _counts(self, ordinal: int) -> np.ndarray:
        """Return the count of each source before a global index, skipped samples counted."""
        segment = [one for one in self.segments if one.start <= ordinal][-1]
        return segment.cursors + segment.mixture.counts(ordinal - segment.start)

    def epochs(self, num_samples: int) -> list[float]:
        """Return the number of passes over each source after `num_samples` samples."""
        return [float(n) / size for n, size in zip(self.counts(num_samples), self.sizes, strict=True)]
