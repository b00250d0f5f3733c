"""How dissimilar are the responses to each pair of conditions (stimuli, tokens, sentences)?

An RDM (representational dissimilarity matrix) is kept as a vector of its P = n (n - 1) / 2 entries above the
diagonal, row by row, as `scipy.spatial.distance.squareform` orders them. Letters: n conditions, d channels
(features, voxels, neurons), m measurements (rows), P pairs.
"""

import numpy as np
import torch

from forge_interp.analysis.arrays import ROUNDING, Array, as_matrix, check_finite
from forge_interp.errors import InterpError

METRICS = ("correlation", "cosine", "euclidean", "mahalanobis")


def compute_rdm(
    responses: Array, *, metric: str = "correlation", precision: np.ndarray | None = None
) -> np.ndarray:
    """Dissimilarities of all pairs of rows, [P] float64.

    correlation: 1 - Pearson r over channels. cosine: 1 - cosine. euclidean: squared distance / d.
    mahalanobis: (a - b)^T precision (a - b) / d. The first two have no units; the others have those of the
    responses squared (none once whitened by the noise precision).

    `responses` are [n, d], n >= 3, one row per condition; `precision` the [d, d] inverse noise covariance,
    for mahalanobis only, see `noise_precision`. InterpError for a row without variance.

    Source: Kriegeskorte et al. 2008, Front. Syst. Neurosci. 2:4; definitions as in rsatoolbox 0.3.
    """
    x = _responses(responses, "responses")
    if metric not in METRICS or (metric == "mahalanobis") != (precision is not None):
        given = "a precision" if precision is not None else "no precision"
        raise InterpError(
            f"metric is {metric!r} with {given}; expected one of {METRICS}; only the last needs one"
        )
    if metric in ("correlation", "cosine"):
        sizes = np.linalg.norm(x, axis=1)
        x = x - x.mean(1, keepdims=True) if metric == "correlation" else x
        norms = np.linalg.norm(x, axis=1)
        if (flat := np.flatnonzero(norms <= ROUNDING * sizes)).size:
            raise InterpError(f"row {flat[0]} has no variance over channels; drop it or use 'euclidean'")
        x = x / norms[:, None]
        return np.clip(_upper(1 - x @ x.T), 0, 2)
    distances = _distances(x, x, precision)
    return distances if precision is not None else np.maximum(distances, 0)


def crossnobis(
    responses: Array, conditions: np.ndarray, folds: np.ndarray, *, precision: np.ndarray | None = None
) -> np.ndarray:
    """Cross-validated squared Mahalanobis distance of all pairs of conditions, [P] float64.

    mean over folds f of (a_f - b_f)^T precision (a_-f - b_-f) / d, where a_f is the mean response to
    condition a in fold f and a_-f the mean over the measurements outside f. Noise that is independent
    between folds adds nothing on average, so it is 0 (and may be negative) for two conditions that do not
    differ. In units of the responses squared (none if whitened).

    `responses` are [m, d]; `conditions` [m] labels, which the RDM orders as `np.unique` does; `folds` [m]
    labels of independent measurements, e.g. runs: at least two, each with every condition; `precision` [d, d]
    the inverse noise covariance, default the identity.

    Source: Walther et al. 2016, NeuroImage 137:188; Diedrichsen et al. 2020, arXiv:2007.02789.
    """
    x = _responses(responses, "responses")
    conditions, folds = np.asarray(conditions), np.asarray(folds)
    if conditions.shape != (x.shape[0],) or folds.shape != (x.shape[0],):
        raise InterpError(
            f"{x.shape[0]} rows with labels {conditions.shape} and folds {folds.shape}; expected one per row"
        )
    names, fold_names = np.unique(conditions), np.unique(folds)
    if len(fold_names) < 2:
        raise InterpError(f"folds are {fold_names.tolist()}; expected at least two independent ones")
    parts = []
    for fold in fold_names:
        inside = folds == fold
        test, train = (_condition_means(x, conditions, names, part, fold) for part in (inside, ~inside))
        parts.append(_distances(train, test, precision))
    return np.mean(parts, axis=0)


def noise_precision(residuals: Array, *, dof: int | None = None) -> np.ndarray:
    """Inverse of the noise covariance, its off-diagonal shrunk toward 0 by the optimal amount: [d, d].

    `residuals` are [m, d], m >= 3, measurements with the condition means removed; `dof` degrees of freedom: m
    minus the means removed; default m - 1. It scales the covariance and leaves the shrinkage as it is.

    Source: Schaefer and Strimmer 2005, Stat. Appl. Genet. Mol. Biol. 4:32, target D; the shrinkage of
        rsatoolbox 0.3 differs by a share of about 1 / m.
    """
    x = _responses(residuals, "residuals")
    sizes, x = np.abs(x).max(0), x - x.mean(0)
    m = x.shape[0]
    if dof is not None and dof < 1:
        raise InterpError(f"dof is {dof}; expected at least 1")
    scale = np.sqrt((x**2).sum(0) / (m - 1))
    if (flat := np.flatnonzero(scale <= ROUNDING * sizes)).size:
        raise InterpError(f"channel {flat[0]} never varies; expected noise in each: drop it")
    z = x / scale
    correlation = z.T @ z / (m - 1)
    mean_product = z.T @ z / m
    variance = ((z**2).T @ (z**2) / m - mean_product**2) * m**2 / (m - 1) ** 3
    off = ~np.eye(x.shape[1], dtype=bool)
    strength = np.sum(correlation[off] ** 2)
    shrink = float(np.clip(variance[off].sum() / strength, 0, 1)) if strength > 0 else 1.0
    covariance = x.T @ x / (m - 1 if dof is None else dof) * np.where(off, 1 - shrink, 1.0)
    return np.linalg.inv(covariance)


def _responses(values: Array, name: str) -> np.ndarray:
    matrix = as_matrix(values, name)
    check_finite(matrix, name)
    if matrix.shape[0] < 3:
        raise InterpError(f"{name} has {matrix.shape[0]} rows; expected at least 3")
    return matrix.to("cpu", torch.float64).numpy()


def _condition_means(
    x: np.ndarray, conditions: np.ndarray, names: np.ndarray, keep: np.ndarray, fold: object
) -> np.ndarray:
    missing = np.setdiff1d(names, conditions[keep])
    if len(missing):
        raise InterpError(f"conditions {missing.tolist()} lack measurements in or outside fold {fold}")
    return np.stack([x[keep & (conditions == name)].mean(0) for name in names])


def _distances(a: np.ndarray, b: np.ndarray, precision: np.ndarray | None) -> np.ndarray:
    d = a.shape[1]
    if precision is not None and (precision.shape != (d, d) or not np.isfinite(precision).all()):
        raise InterpError(f"precision has shape {precision.shape}; expected {(d, d)}, all values finite")
    a, b = a - a.mean(0), b - b.mean(0)
    products = a @ b.T if precision is None else a @ precision @ b.T
    diagonal = np.diag(products)
    return _upper(diagonal[:, None] + diagonal - products - products.T) / d


def _upper(matrix: np.ndarray) -> np.ndarray:
    return matrix[np.triu_indices(matrix.shape[0], 1)]
