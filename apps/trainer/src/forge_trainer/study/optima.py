"""Finds the lowest loss over learning rates, batches or sizes, and how this optimum changes with size."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

FEWEST = 3
FAR = 10.0
"""The factor beyond the measured range up to which a law is trusted."""


class Optimum(NamedTuple):
    """The lowest point of a parabola through losses over the logarithm of x.

    Attributes:
        x: place of the optimum; the place of the lowest measured loss if the parabola opens downwards.
        loss: loss at x.
        low: lower end of the interval of x.
        high: upper end of the interval of x.
        doubts: reasons to doubt it; empty if there are none.
    """

    x: float
    loss: float
    low: float
    high: float
    doubts: tuple[str, ...] = ()


def optimum(xs: Sequence[float], losses: Sequence[float], samples: int, level: float, seed: int) -> Optimum:
    """Find the lowest point of a parabola in ln x.

    Args:
        xs: values above 0.
        losses: loss at each value.
        samples: number of samples for the interval.
        level: confidence level of the interval.
        seed: seed of the samples.
    """
    x, y = np.log(np.asarray(xs, dtype=np.float64)), np.asarray(losses, dtype=np.float64)
    lowest = int(y.argmin())
    different = np.unique(x)
    doubts: list[str] = []
    if len(different) < FEWEST:
        return Optimum(
            xs[lowest], losses[lowest], xs[lowest], xs[lowest],
            (f"{len(different)} different values; a parabola needs {FEWEST}",),
        )  # fmt: skip
    if x[lowest] in (different[0], different[-1]):
        doubts.append("the lowest loss is at the edge of the grid: widen it")
    place = _lowest(x, y)
    if place is None:
        doubts.append("the parabola opens downwards: there is no lowest point")
        return Optimum(xs[lowest], losses[lowest], xs[lowest], xs[lowest], tuple(doubts))
    at, value = place
    if not different[0] <= at <= different[-1]:
        doubts.append(f"the lowest point {np.exp(at):.3g} is outside of what was tried")
    low, high = _interval(x, y, at, samples, level, seed)
    if len(different) == FEWEST:
        doubts.append("a parabola through three values fits anything: there is no interval")
    return Optimum(float(np.exp(at)), float(value), low, high, tuple(doubts))


def _lowest(x: np.ndarray, y: np.ndarray) -> tuple[float, float] | None:
    """Return the lowest point of a least-squares parabola; None if it opens downwards or is undetermined."""
    middle = x.mean()
    design = np.stack([np.ones_like(x), x - middle, (x - middle) ** 2], 1)
    (c, b, a), _, rank, _ = np.linalg.lstsq(design, y, rcond=None)
    if rank < FEWEST or a <= 0:
        return None
    return middle - b / (2 * a), c - b * b / (4 * a)


def _interval(
    x: np.ndarray, y: np.ndarray, at: float, samples: int, level: float, seed: int
) -> tuple[float, float]:
    """Return the interval of the optimum by a bootstrap over residuals; few values leave too few runs."""
    middle = x.mean()
    design = np.stack([np.ones_like(x), x - middle, (x - middle) ** 2], 1)
    fitted = design @ np.linalg.lstsq(design, y, rcond=None)[0]
    left = len(x) - FEWEST
    if left < 1:
        return float(np.exp(at)), float(np.exp(at))
    residual = (y - fitted) * (len(x) / left) ** 0.5
    drawn = np.random.default_rng(seed).choice(residual, size=(samples, len(x)))
    places = [place[0] for row in drawn if (place := _lowest(x, fitted + row)) is not None]
    if len(places) < samples / 2:
        return float(np.exp(x.min())), float(np.exp(x.max()))
    low, high = np.quantile(np.clip(places, x.min(), x.max()), [(1 - level) / 2, (1 + level) / 2])
    wider = _student(level, left)
    return float(np.exp(at + (low - at) * wider)), float(np.exp(at + (high - at) * wider))


def _student(level: float, free: int) -> float:
    """Return how much wider an interval is with few residuals: quantiles of t over normal quantiles.

    Source: Abramowitz & Stegun 26.7.5, its first term.
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    return 1 + (z * z + 1) / (4 * free)


class Trend(NamedTuple):
    """A power law y = factor * x ** power.

    Attributes:
        factor: factor of the law.
        power: exponent of the law.
        low: lower end of the interval of the power.
        high: upper end of the interval of the power.
        reach: the largest x for which the law is trusted.
        doubts: reasons to doubt it.
    """

    factor: float
    power: float
    low: float
    high: float
    reach: float
    doubts: tuple[str, ...] = ()

    def at(self, x: float) -> float:
        """Return the value at x."""
        return self.factor * x**self.power


def trend(xs: Sequence[float], ys: Sequence[float], samples: int, level: float, seed: int) -> Trend:
    """Fit a power law by least squares of logarithms, with an interval by bootstrap over points."""
    x, y = np.log(np.asarray(xs, dtype=np.float64)), np.log(np.asarray(ys, dtype=np.float64))
    doubts: list[str] = []
    if len(np.unique(x)) < 2:
        return Trend(float(np.exp(y.mean())), 0.0, 0.0, 0.0, max(xs), ("one size only: there is no trend",))
    power, offset = np.polyfit(x, y, 1)
    if len(np.unique(x)) < 4:
        doubts.append(f"{len(np.unique(x))} sizes; believe a trend of four or more")
    rng, powers = np.random.default_rng(seed), list[float]()
    for _ in range(samples):
        drawn = rng.integers(len(x), size=len(x))
        if len(np.unique(x[drawn])) > 1:
            powers.append(np.polyfit(x[drawn], y[drawn], 1)[0])
    low, high = np.quantile(powers, [(1 - level) / 2, (1 + level) / 2])
    return Trend(float(np.exp(offset)), float(power), float(low), float(high), FAR * max(xs), tuple(doubts))
