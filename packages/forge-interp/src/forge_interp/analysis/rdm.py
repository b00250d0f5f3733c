"""How dissimilar are the responses to each pair of conditions (stimuli, tokens, sentences)?

An RDM (representational dissimilarity matrix) is kept as a vector of its P = n (n - 1) / 2 entries above the
diagonal, row by row, as `scipy.spatial.distance.squareform` orders them. Letters: n conditions, d channels
(features, voxels, neurons), P pairs.
"""

import numpy as np

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
    for mahalanobis only. InterpError for a row without variance.

    Source: Kriegeskorte et al. 2008, Front. Syst. Neurosci. 2:4; definitions as in rsatoolbox 0.3.
    """
    matrix = as_matrix(responses, "responses")
    check_finite(matrix, "responses")
    x = matrix.cpu().numpy()
    if len(x) < 3:
        raise InterpError(f"responses has {len(x)} rows; expected at least 3")
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
    d, x = x.shape[1], x - x.mean(0)
    if precision is not None and (precision.shape != (d, d) or not np.isfinite(precision).all()):
        raise InterpError(f"precision has shape {precision.shape}; expected {(d, d)}, all values finite")
    products = x @ x.T if precision is None else x @ precision @ x.T
    squares = np.diag(products)
    distances = _upper(squares[:, None] + squares - products - products.T) / d
    return distances if precision is not None else np.maximum(distances, 0)


def _upper(matrix: np.ndarray) -> np.ndarray:
    return matrix[np.triu_indices(matrix.shape[0], 1)]
