"""How similar are the geometries of two layers, by centered kernel alignment with a linear kernel?

Letters: n samples, d features, K = X X^T and L = Y Y^T the [n, n] Gram matrices. HSIC is a dependence
between K and L; CKA = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)), without units, 1 for X = Y up to rotation
and scale.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forge_interp.analysis.accumulate import Moments
from forge_interp.analysis.arrays import ROUNDING
from forge_interp.errors import InterpError


@dataclass(frozen=True)
class LayerSimilarity:
    """One number for each pair of layers."""

    values: np.ndarray  # [len(rows), len(columns)] float64; NaN where the measure is undefined
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    measure: str  # what the number is, for the title of a plot


def over_pairs(moments: Moments, measure: str, score: Callable[[str, str], float]) -> LayerSimilarity:
    """Apply `score(row, column)` to every pair that `moments` was asked for."""
    values = np.array([[score(row, column) for column in moments.columns] for row in moments.rows])
    return LayerSimilarity(values, tuple(moments.rows), tuple(moments.columns), measure)


def linear_cka(moments: Moments, *, debiased: bool = True) -> LayerSimilarity:
    """Linear CKA of every layer pair: biased in [0, 1], debiased at most 1.

    Biased: |Xc^T Yc|_F^2 / (|Xc^T Xc|_F |Yc^T Yc|_F) with centred columns; exactly the Gram form. It tends
    to 1 for independent data when d is not small beside n. Debiased: each HSIC is the unbiased estimator
    HSIC_1, whose expectation is 0 for independent data; it may be slightly negative and needs n >= 4 (biased:
    2). Both are NaN for a layer that never varies; debiased too where HSIC_1(K, K) = 0: all samples are
    equally far apart (one-hot, say), which tells nothing of their likeness.

    Source: Kornblith et al. 2019, arXiv:1905.00414; HSIC_1: Song et al. 2012, JMLR 13:1393.
    """
    dependence = _unbiased_hsic if debiased else _biased_hsic
    own = {
        name: dependence(moments, name, name) if moments.power(name) > 0 else 0.0
        for name in {*moments.rows, *moments.columns}
    }

    def score(row: str, column: str) -> float:
        if own[row] <= 0 or own[column] <= 0:
            return math.nan
        return dependence(moments, row, column) / math.sqrt(own[row] * own[column])

    return over_pairs(moments, "debiased linear CKA" if debiased else "linear CKA", score)


def _biased_hsic(moments: Moments, first: str, second: str) -> float:
    return moments.comoment(first, second).square().sum().item()


def _unbiased_hsic(moments: Moments, first: str, second: str) -> float:
    """HSIC_1 from sums over features; a shift of the features does not change it.

    With centred columns the rows of K sum to 0, so with the diagonal removed sum(K) = -tr K and row i sums
    to -K_ii.
    """
    n = moments.count
    if n < 4:
        raise InterpError(f"{n} samples were given; expected at least 4 for debiased CKA")
    diagonal = moments.cross_power(first, second)
    traces = moments.power(first) * moments.power(second)
    product = _biased_hsic(moments, first, second) - diagonal
    total = product + traces / ((n - 1) * (n - 2)) - 2 * diagonal / (n - 2)
    return total / (n * (n - 3)) if abs(total) > ROUNDING * (product + diagonal) else 0.0
