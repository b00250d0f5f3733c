"""Fits the loss as a function of parameters N and tokens D: L = E + A / N^alpha + B / D^beta.

As in Hoffmann et al. 2022 (arXiv:2203.15556, approach 3), the fit minimizes the sum of Huber losses of log L,
delta 1e-3, from many starts; it converges fully (Besiroglu et al. 2024, arXiv:2404.10102, found that the
published fit had stopped too early). P runs, S starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

DELTA = 1e-3
STEPS = 300
GAIN = 1e-6
"""A start has converged when eight steps in a row reduce its loss by less than this fraction."""

STARTS = np.array(
    [*product((0.0, 5.0, 10.0, 15.0), (0.0, 5.0, 10.0, 15.0), (-1.0, 0.0, 1.0), (0.2, 0.6), (0.2, 0.6))]
)
"""[S, 5]: ln A, ln B, ln E, alpha, beta."""
FEWEST = 5
"""The number of parameters of the fit."""


class Scaling(NamedTuple):
    """A fitted law.

    Attributes:
        e: irreducible loss.
        a: coefficient of the size.
        b: coefficient of the tokens.
        alpha: exponent of the size.
        beta: exponent of the tokens.
    """

    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the predicted loss."""
        return self.e + self.a / parameters**self.alpha + self.b / tokens**self.beta

    @property
    def size_exponent(self) -> float:
        """The exponent of the best size in compute: N ~ C ** exponent (Hoffmann et al. 2022 eq. 4)."""
        return self.beta / (self.alpha + self.beta)


def _predicted(theta: np.ndarray, n: np.ndarray, d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return log L [S, P] and its derivatives [S, P, 5] by ln A, ln B, ln E, alpha, beta."""
    a, b, e, alpha, beta = (theta[:, k, None] for k in range(5))
    terms = np.stack([a - alpha * n, b - beta * d, np.broadcast_to(e, (len(theta), len(n)))], -1)
    high = terms.max(-1, keepdims=True)
    log_l = high[..., 0] + np.log(np.exp(terms - high).sum(-1))
    share = np.exp(terms - log_l[..., None])
    return log_l, np.concatenate([share, -share[..., :1] * n[:, None], -share[..., 1:2] * d[:, None]], -1)


def _huber(residual: np.ndarray) -> np.ndarray:
    size = np.abs(residual)
    return np.where(size <= DELTA, 0.5 * residual**2, DELTA * (size - 0.5 * DELTA))


def _descend(
    theta: np.ndarray, n: np.ndarray, d: np.ndarray, y: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """Run Levenberg-Marquardt with Huber weights from all starts at once.

    Args:
        theta: [S, 5].
        n: [P] ln N.
        d: [P] ln D.
        y: [P] ln L.
        counts: [S, P] weight of each run.

    Returns:
        [S, 6]: the parameters and the final loss of each start.
    """
    damping = np.full(len(theta), 1e-2)
    predicted, slope = _predicted(theta, n, d)
    value = (counts * _huber(predicted - y)).sum(-1)
    active = np.arange(len(theta))
    final = np.empty((len(theta), 6))
    still = np.zeros(len(theta), dtype=int)
    for _ in range(STEPS):
        residual = predicted - y
        weight = counts * np.minimum(1.0, DELTA / np.maximum(np.abs(residual), 1e-300))
        hessian = np.einsum("sp,spi,spj->sij", weight, slope, slope)
        gradient = np.einsum("sp,spi,sp->si", weight, slope, residual)
        diagonal = np.einsum("sii->si", hessian)
        damped = hessian + np.eye(5) * (damping[:, None] * (diagonal + 1e-9))[:, None, :]
        step = np.linalg.solve(damped, gradient[..., None])[..., 0]
        tried = theta - np.clip(step, -2.0, 2.0)
        at, turned = _predicted(tried, n, d)
        reached = (counts * _huber(at - y)).sum(-1)
        better = reached < value
        still = np.where(value - reached > GAIN * value, 0, still + 1)
        theta = np.where(better[:, None], tried, theta)
        predicted = np.where(better[:, None], at, predicted)
        slope = np.where(better[:, None, None], turned, slope)
        value = np.where(better, reached, value)
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-12, 1e12)
        if (ready := still >= 8).any():
            final[active[ready]] = np.concatenate([theta[ready], value[ready, None]], 1)
            kept = ~ready
            active, theta, predicted, slope = active[kept], theta[kept], predicted[kept], slope[kept]
            value, damping, still, counts = value[kept], damping[kept], still[kept], counts[kept]
            if not len(active):
                return final
    final[active] = np.concatenate([theta, value[:, None]], 1)
    return final


def _law(theta: np.ndarray) -> Scaling:
    return Scaling(*(float(x) for x in (*np.exp(theta[[2, 0, 1]]), *theta[3:5])))


def fit(parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float]) -> Scaling:
    """Fit the law from all starts; return the best fit.

    Raises:
        ValueError: there are fewer runs than parameters of the law, or numbers that are not above 0.
    """
    n, d, y = _logs(parameters, tokens, losses)
    found = _descend(STARTS, n, d, y, np.ones((len(STARTS), len(n))))
    return _law(found[found[:, 5].argmin()])


def bootstrap(
    parameters: Sequence[float],
    tokens: Sequence[float],
    losses: Sequence[float],
    samples: int,
    seed: int,
    best: Scaling | None = None,
) -> list[Scaling]:
    """Fit laws to samples of the runs, drawn with replacement, from the best fit and starts near it."""
    n, d, y = _logs(parameters, tokens, losses)
    best = best or fit(parameters, tokens, losses)
    middle = np.array([np.log(best.a), np.log(best.b), np.log(best.e), best.alpha, best.beta])
    beside = np.array([[0, 0, 0, 0, 0], [2, -2, 0.1, 0.15, -0.1], [-2, 2, -0.1, -0.1, 0.15]])
    drawn = np.random.default_rng(seed).integers(len(n), size=(samples, len(n)))
    counts = np.stack([np.bincount(row, minlength=len(n)) for row in drawn]).astype(float)
    each = len(beside)
    found = _descend(np.tile(middle + beside, (samples, 1)), n, d, y, np.repeat(counts, each, 0))
    found = found.reshape(samples, each, 6)
    return [_law(rows[rows[:, 5].argmin()]) for rows in found]


def _logs(*columns: Sequence[float]) -> tuple[np.ndarray, ...]:
    if len(columns[0]) <= FEWEST:
        raise ValueError(f"{len(columns[0])} runs for a law of {FEWEST} parameters; expected more")
    if any(value <= 0 for column in columns for value in column):
        raise ValueError("sizes, tokens and losses must be above 0")
    return tuple(np.log(np.asarray(column, dtype=np.float64)) for column in columns)


def interval(values: Sequence[float], level: float, runs: int, free: int = FEWEST) -> tuple[float, float]:
    """Return the middle `level` of bootstrap values, widened if runs are few compared to the parameters.

    Args:
        values: values of the samples.
        level: confidence level, such as 0.9.
        runs: number of fitted runs.
        free: parameters of the fit; samples underestimate the spread by a factor of sqrt(1 - free / runs).
    """
    low, middle, high = np.quantile(values, [(1 - level) / 2, 0.5, (1 + level) / 2])
    wider = (runs / max(1, runs - free)) ** 0.5
    return float(middle + (low - middle) * wider), float(middle + (high - middle) * wider)
