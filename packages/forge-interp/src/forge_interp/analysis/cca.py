"""How well can a linear map carry one layer onto another: the CCA family and Procrustes?

Letters: n samples, d features, k kept directions, rho canonical correlations. No measure has units.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from forge_interp.analysis.accumulate import Moments
from forge_interp.analysis.cka import LayerSimilarity, over_pairs
from forge_interp.errors import InterpError

_RELATIVE_RANK = 1e-10


def canonical_correlations(
    moments: Moments, first: str, second: str, *, keep: float = 1.0, ridge: float = 0.0
) -> np.ndarray:
    """Canonical correlations of two layers, falling: [min(k_x, k_y)] float64 in [0, 1].

    rho_i is the largest correlation between a linear combination of X and one of Y, uncorrelated with the
    combinations before it: the singular values of Wx^T (Xc^T Yc) Wy, W whitening each side. Principal
    components with less than 1e-10 of the variance of the first are taken for rounding and left out. The kept
    ones of each side explain at least the share `keep` of its variance, in (0, 1]; `ridge` is added to each
    eigenvalue of a covariance, relative to its largest; 0 is plain CCA. InterpError: a layer never varies.

    Source: Hotelling 1936, Biometrika 28:321.
    """
    left, right = _whiten(moments, first, keep, ridge), _whiten(moments, second, keep, ridge)
    return _align(moments, first, second, left, right)[1].cpu().numpy()


def mean_cca(moments: Moments, *, ridge: float = 0.0) -> LayerSimilarity:
    """Mean canonical correlation of every layer pair, over min(rank X, rank Y) directions.

    Does not change under invertible affine maps of either layer. It is 1 by construction once n - 1 <= d:
    use it with n many times d, or give a `ridge` (see `canonical_correlations`).

    Source: Raghu et al. 2017, arXiv:1706.05806 (the mean as a similarity); Kornblith et al. 2019,
    arXiv:1905.00414.
    """
    return replace(svcca(moments, keep=1.0, ridge=ridge), measure="mean CCA")


def svcca(moments: Moments, *, keep: float = 0.99, ridge: float = 0.0) -> LayerSimilarity:
    """SVCCA of every layer pair: mean canonical correlation of the leading principal components.

    Each layer is first reduced to the components that explain `keep` of its variance, in (0, 1]. Does not
    change under rotation and isotropic scaling of either layer. For `ridge` see `canonical_correlations`.

    Source: Raghu et al. 2017, arXiv:1706.05806.
    """
    sides = _whiten_all(moments, keep, ridge)

    def score(row: str, column: str) -> float:
        return _align(moments, row, column, sides[row], sides[column])[1].mean().item()

    return over_pairs(moments, f"SVCCA ({keep:g} of variance)", score)


def pwcca(
    moments: Moments,
    *,
    keep: float = 1.0,
    ridge: float = 0.0,
    rotations: Mapping[str, Tensor] | None = None,
) -> LayerSimilarity:
    """Projection-weighted CCA of every layer pair: sum_i a_i rho_i / sum_i a_i, a_i = sum_j |<h_i, x_j>|.

    h_i is the i-th canonical variate of the row layer X and x_j its j-th centred feature: directions that
    carry much of X weigh more. So it is not symmetric, and changes under a rotation of X but under no
    invertible affine map of Y. For `keep` and `ridge` see `canonical_correlations`; `rotations` are of layers
    that were rotated before, [d, k]: their features are those times its transpose.

    Source: Morcos et al. 2018, arXiv:1806.05759.
    """
    sides = _whiten_all(moments, keep, ridge)

    def score(row: str, column: str) -> float:
        left, rho = _align(moments, row, column, sides[row], sides[column])
        variates = left.T @ sides[row].T @ moments.comoment(row, row)
        features = variates @ rotations[row].T if rotations and row in rotations else variates
        weights = features.abs().sum(1)
        return (weights @ rho / weights.sum()).item()

    return over_pairs(moments, "PWCCA", score)


def procrustes(moments: Moments) -> LayerSimilarity:
    """Orthogonal Procrustes of every layer pair, each layer centred and scaled to Frobenius norm 1.

    s = |Xc^T Yc|_* / (|Xc|_F |Yc|_F), the largest alignment by any rotation (nuclear norm). Does not change
    under rotation and isotropic scaling of either layer; layers of different width count as padded with
    zeros. s is in [0, 1]; min_Q |X - Y Q|_F^2 is 2 - 2 s, and arccos s, an angle, is a metric. InterpError
    for a layer that never varies.

    Source: Ding et al. 2021, arXiv:2108.01661; angle: Williams et al. 2021, arXiv:2110.14739.
    """

    def score(row: str, column: str) -> float:
        size = math.sqrt(moments.power(row)) * math.sqrt(moments.power(column))
        if size == 0:
            raise InterpError(f"{row!r} or {column!r} never varies; expected layers with variance")
        aligned = torch.linalg.svdvals(moments.comoment(row, column)).sum().item() / size
        return min(aligned, 1.0)

    return over_pairs(moments, "Procrustes similarity", score)


def _align(moments: Moments, first: str, second: str, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """[k_x, r] directions of whitened X and their [r] canonical correlations."""
    u, rho, _ = torch.linalg.svd(left.T @ moments.comoment(first, second) @ right, full_matrices=False)
    return u, rho.clamp(max=1.0)


def _whiten_all(moments: Moments, keep: float, ridge: float) -> dict[str, Tensor]:
    return {name: _whiten(moments, name, keep, ridge) for name in {*moments.rows, *moments.columns}}


def _whiten(moments: Moments, name: str, keep: float, ridge: float) -> Tensor:
    """[d, k] map under which the kept principal directions of a layer become orthonormal."""
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
