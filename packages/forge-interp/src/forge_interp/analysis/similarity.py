"""How similar are layers: centered kernel alignment, the CCA family, Procrustes; and all pairs in one call?

No measure has units. Letters: n samples, d features, k kept directions, rho canonical correlations; K = X X^T
and L = Y Y^T are the [n, n] Gram matrices. HSIC is a dependence between K and L; CKA = HSIC(K, L) /
sqrt(HSIC(K, K) HSIC(L, L)), 1 for X = Y up to rotation and scale.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from forge_interp.analysis.accumulate import Moments
from forge_interp.analysis.arrays import ROUNDING, Array, as_matrix, check_finite
from forge_interp.errors import InterpError

_RELATIVE_RANK = 1e-10


@dataclass(frozen=True)
class LayerSimilarity:
    """One number for each pair of layers."""

    values: np.ndarray  # [len(rows), len(columns)] float64; NaN where the measure is undefined
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    measure: str  # name of the number, for the title of a plot


def over_pairs(moments: Moments, measure: str, score: Callable[[str, str], float]) -> LayerSimilarity:
    """Apply `score(row, column)` to every pair that `moments` was asked for."""
    values = np.array([[score(row, column) for column in moments.columns] for row in moments.rows])
    return LayerSimilarity(values, tuple(moments.rows), tuple(moments.columns), measure)


def linear_cka(moments: Moments, *, debiased: bool = True) -> LayerSimilarity:
    """Compute the linear CKA of every layer pair: biased in [0, 1], debiased at most 1.

    Biased: |Xc^T Yc|_F^2 / (|Xc^T Xc|_F |Yc^T Yc|_F) with centred columns, which equals the Gram form; it
    tends to 1 for independent data when d is not small beside n. Debiased: each HSIC is the unbiased
    estimator HSIC_1, whose expectation is 0 for independent data; it may be slightly negative and needs
    n >= 4 (biased: 2). Both are NaN for a layer that never varies. The debiased CKA is also NaN where
    HSIC_1(K, K) = 0: all samples are equally far apart (one-hot, for example).

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
    """Compute HSIC_1 from sums over features; a shift of the features does not change it.

    With centred columns the rows of K sum to 0. So without its diagonal K sums to -tr K, and row i to -K_ii.
    """
    n = moments.count
    if n < 4:
        raise InterpError(f"{n} samples were given; expected at least 4 for debiased CKA")
    diagonal = moments.cross_power(first, second)
    traces = moments.power(first) * moments.power(second)
    product = _biased_hsic(moments, first, second) - diagonal
    total = product + traces / ((n - 1) * (n - 2)) - 2 * diagonal / (n - 2)
    return total / (n * (n - 3)) if abs(total) > ROUNDING * (product + diagonal) else 0.0


def canonical_correlations(
    moments: Moments, first: str, second: str, *, keep: float = 1.0, ridge: float = 0.0
) -> np.ndarray:
    """Compute the canonical correlations of two layers, falling: [min(k_x, k_y)] float64 in [0, 1].

    rho_i is the largest correlation between a linear combination of X and one of Y, uncorrelated with the
    combinations before it: the singular values of Wx^T (Xc^T Yc) Wy, W whitening each side. Principal
    components with less than 1e-10 of the variance of the first count as rounding and are left out. The kept
    components of each side explain at least the share `keep` of its variance, in (0, 1]; `ridge` is added to
    each eigenvalue of a covariance, relative to its largest; 0: plain CCA. InterpError: a constant layer.

    Source: Hotelling 1936, Biometrika 28:321.
    """
    left, right = _whiten(moments, first, keep, ridge), _whiten(moments, second, keep, ridge)
    return _correlations(moments, first, second, left, right).cpu().numpy()


def mean_cca(moments: Moments, *, ridge: float = 0.0) -> LayerSimilarity:
    """Compute the mean canonical correlation of every layer pair, over min(rank X, rank Y) directions.

    It does not change under invertible affine maps of either layer. It is 1 by construction once n - 1 <= d:
    use it with n many times d, or give a `ridge` (see `canonical_correlations`).

    Source: Raghu et al. 2017, arXiv:1706.05806 (the mean); Kornblith et al. 2019, arXiv:1905.00414.
    """
    return replace(svcca(moments, keep=1.0, ridge=ridge), measure="mean CCA")


def svcca(moments: Moments, *, keep: float = 0.99, ridge: float = 0.0) -> LayerSimilarity:
    """Compute SVCCA of every layer pair: mean canonical correlation of the leading principal components.

    Each layer is first reduced to the components that explain `keep` of its variance, in (0, 1]. SVCCA does
    not change under rotation and isotropic scaling of either layer. `ridge`: see `canonical_correlations`.

    Source: Raghu et al. 2017, arXiv:1706.05806.
    """
    sides = _whiten_all(moments, keep, ridge)

    def score(row: str, column: str) -> float:
        return _correlations(moments, row, column, sides[row], sides[column]).mean().item()

    return over_pairs(moments, f"SVCCA ({keep:g} of variance)", score)


def procrustes(moments: Moments) -> LayerSimilarity:
    """Compute orthogonal Procrustes of every layer pair, each layer centred and scaled to Frobenius norm 1.

    s = |Xc^T Yc|_* / (|Xc|_F |Yc|_F) is the largest alignment by any rotation (nuclear norm). Rotation and
    isotropic scaling of a layer do not change s; a narrower layer is padded with zeros. s is in [0, 1]; min_Q
    |X - Y Q|_F^2 is 2 - 2 s, and the angle arccos s is a metric. InterpError: a constant layer.

    Source: Ding et al. 2021, arXiv:2108.01661; angle: Williams et al. 2021, arXiv:2110.14739.
    """

    def score(row: str, column: str) -> float:
        size = math.sqrt(moments.power(row)) * math.sqrt(moments.power(column))
        if size == 0:
            raise InterpError(f"{row!r} or {column!r} never varies; expected layers with variance")
        aligned = torch.linalg.svdvals(moments.comoment(row, column)).sum().item() / size
        return min(aligned, 1.0)

    return over_pairs(moments, "Procrustes similarity", score)


def _correlations(moments: Moments, first: str, second: str, left: Tensor, right: Tensor) -> Tensor:
    """Return the [r] canonical correlations of two layers whose whitening maps are `left` and `right`."""
    return torch.linalg.svdvals(left.T @ moments.comoment(first, second) @ right).clamp(max=1.0)


def _whiten_all(moments: Moments, keep: float, ridge: float) -> dict[str, Tensor]:
    return {name: _whiten(moments, name, keep, ridge) for name in {*moments.rows, *moments.columns}}


def _whiten(moments: Moments, name: str, keep: float, ridge: float) -> Tensor:
    """Return the [d, k] map under which the kept principal directions of a layer become orthonormal."""
    if not 0 < keep <= 1 or ridge < 0:
        raise InterpError(f"keep is {keep}, ridge is {ridge}; expected keep in (0, 1] and ridge >= 0")
    if moments.power(name) == 0:
        raise InterpError(f"{name!r} never varies; expected a layer with variance")
    values, vectors = torch.linalg.eigh(moments.comoment(name, name))
    values, vectors = values.flip(0), vectors.flip(1)
    rank = int((values > _RELATIVE_RANK * values[0]).sum())
    share = values[:rank].cumsum(0) / values[:rank].sum()
    num_kept = min(rank, int((share < keep - 1e-12).sum()) + 1)
    return vectors[:, :num_kept] / (values[:num_kept] + ridge * values[0]).sqrt()


MEASURES: Mapping[str, Callable[[Moments], LayerSimilarity]] = {
    "cka": linear_cka,
    "cka_biased": lambda moments: linear_cka(moments, debiased=False),
    "mean_cca": mean_cca,
    "svcca": svcca,
    "procrustes": procrustes,
}


def compare_layers(
    first: Mapping[str, Array],
    second: Mapping[str, Array] | None = None,
    *,
    measure: str = "cka",
) -> LayerSimilarity:
    """Compare every layer of one model with every layer of another (or of itself), from arrays in memory.

    For data that does not fit into memory, or several measures at once, feed `Moments` batch by batch and
    call the measures on it: the result is the same. A layer wider than there are samples is rotated into the
    n dimensions that its samples span, which changes no measure: costs go with min(n, d).

    `first` and `second` (default `first`) are {layer: [n, d]}, rows and columns of the result, with the same
    samples in order. `measure`: "cka" (debiased), "cka_biased", "mean_cca", "svcca", "procrustes".
    """
    if measure not in MEASURES:
        raise InterpError(f"measure is {measure!r}; expected one of {list(MEASURES)}")
    left = {f"0/{name}": array for name, array in first.items()}
    right = left if second is None else {f"1/{name}": array for name, array in second.items()}
    layers: dict[str, Tensor] = {}
    for name, array in {**left, **right}.items():
        x = as_matrix(array, name[2:])
        check_finite(x, name[2:])
        layers[name] = torch.linalg.qr(x.T, mode="r").R.T if x.shape[1] > x.shape[0] else x
    found = MEASURES[measure](Moments.of(layers, between=(left, right)))
    return LayerSimilarity(found.values, tuple(first), tuple(second or first), found.measure)
