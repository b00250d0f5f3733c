"""What is the ridge solution for every penalty at once?

Ridge: minimize |Y - X W - b|_F^2 + alpha |W|_F^2, the intercept b unpenalized. With centred X = U S V^T every
penalty costs only a rescaling: W = V diag(s / (s^2 + alpha)) U^T Y. Letters: n samples, d features, T
targets, A penalties, r rank. alpha has units of the features squared (times samples).

Source: Hoerl and Kennard 1970, Technometrics 12:55; leave-one-out: Allen 1974, Technometrics 16:125 (PRESS).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forge_interp.analysis.accumulate import Moments
from forge_interp.analysis.arrays import Array, as_matrix, centre, check_alphas, check_finite, same_rows
from forge_interp.errors import InterpError

DEFAULT_ALPHAS = tuple(float(alpha) for alpha in np.logspace(-2, 6, 17))
_RELATIVE_RANK = 1e-13  # of squares, for a Gram matrix; of singular values, for the features themselves
_UNEVEN = 1e-9  # variance of a feature beside the largest below which the Gram matrix loses its digits


@dataclass(frozen=True)
class RidgeFit:
    """A fitted ridge regression."""

    weights: Tensor  # [d, T] float64
    intercept: Tensor  # [T] float64
    alpha: Tensor  # [T] the penalty chosen for each target
    errors: Tensor | None = (
        None  # [A, T] mean squared leave-one-out error of every penalty, if one was chosen
    )

    def predict(self, x: Array) -> Tensor:
        """Return [n, T] predictions, float64."""
        return as_matrix(x, "x").to(self.weights.device) @ self.weights + self.intercept


class RidgePath:
    """Ridge solutions for all penalties from one eigendecomposition of the smaller Gram matrix of x [n, d].

    Where the variances of features differ by a factor above 1e9 it takes the singular values of the features
    instead, which is slower (about twice) but does not lose the small ones. n >= 2, d >= 1, values finite.
    """

    def __init__(self, x: Array):
        x = as_matrix(x, "x")
        check_finite(x, "x")
        if x.shape[0] < 2 or x.shape[1] < 1:
            raise InterpError(f"x has shape {tuple(x.shape)}; expected at least 2 rows and 1 feature")
        self.mean = x.mean(0)
        x = centre(x)
        spread = x.square().sum(0)
        if ((spread > 0) & (spread < _UNEVEN * spread.max())).any():
            left, values, right = torch.linalg.svd(x, full_matrices=False)
            kept = values > _RELATIVE_RANK * values[0]
            self.squares, self.left, self.right = values[kept].square(), left[:, kept], right[kept].T
            return
        wide = x.shape[1] > x.shape[0]
        squares, vectors = torch.linalg.eigh(x @ x.T if wide else x.T @ x)
        kept = squares > _RELATIVE_RANK * squares[-1].clamp_min(1e-300)
        self.squares, vectors = squares[kept], vectors[:, kept]
        scaled = (x.T if wide else x) @ vectors / self.squares.sqrt()
        self.left, self.right = (vectors, scaled) if wide else (scaled, vectors)

    def project(self, y: Tensor) -> Tensor:
        """Return U^T (y - mean y), [r, T]: all that the solutions need of the targets."""
        return self.left.T @ (y - y.mean(0))

    def weights(self, projected: Tensor, alpha: Tensor | float) -> Tensor:
        """Return [d, T] weights for one penalty, or one per target [T]."""
        shrink = self.squares.sqrt()[:, None] / (self.squares[:, None] + alpha)
        return self.right @ (shrink * projected)

    def predict(self, x: Tensor, projected: Tensor, alphas: Sequence[float]) -> Tensor:
        """Return [A, n, T] centred predictions of new rows for every penalty."""
        rotated = (x - self.mean) @ self.right * self.squares.sqrt()
        return torch.stack([rotated @ (projected / (self.squares[:, None] + alpha)) for alpha in alphas])

    def leave_one_out(self, y: Tensor, alpha: float) -> Tensor:
        """Return [n, T] residuals of each sample predicted from all others, exactly, without refitting."""
        share = self.squares / (self.squares + alpha)
        fitted = self.left @ (share[:, None] * self.project(y))
        leverage = 1 / y.shape[0] + self.left.square() @ share
        return (y - y.mean(0) - fitted) / (1 - leverage).clamp_min(1e-12)[:, None]


def fit_ridge(
    x: Array, y: Array, *, alphas: Sequence[float] = DEFAULT_ALPHAS, per_target: bool = True
) -> RidgeFit:
    """Fit ridge regression; the penalty is chosen by exact leave-one-out error.

    Leave-one-out leaks between samples that are not independent (tokens of one sentence, scans of one run):
    there use `probe_layers`, which chooses by groups. `x` are [n, d] features, not rescaled:
    z-score them if their units differ; `y` [n] or [n, T] targets, with a penalty each, or one for all (least
    mean error) without `per_target`.
    """
    candidates = check_alphas(alphas)
    x, y = as_matrix(x, "x"), as_matrix(y, "y")
    same_rows({"x": x, "y": y})
    check_finite(y, "y")
    y = y.to(x.device)
    path = RidgePath(x)
    errors = torch.stack([path.leave_one_out(y, alpha).square().mean(0) for alpha in candidates])
    best = errors.argmin(0) if per_target else errors.mean(1).argmin().expand(y.shape[1])
    return fit_path(path, y, x.new_tensor(candidates)[best], errors)


def fit_path(path: RidgePath, y: Tensor, alpha: Tensor, errors: Tensor | None = None) -> RidgeFit:
    """Solve for the targets `y` [n, T] with one penalty per target, `alpha` [T]."""
    weights = path.weights(path.project(y), alpha)
    return RidgeFit(weights, y.mean(0) - path.mean @ weights, alpha, errors)


def ridge_from_moments(moments: Moments, features: str, targets: str, alpha: float) -> RidgeFit:
    """Fit ridge regression from accumulated moments: one pass, data of any length, any number of ranks.

    `moments` hold the pair of blocks (features, targets); `alpha` is the penalty for all targets.
    """
    (penalty,) = check_alphas([alpha])
    gram = moments.comoment(features, features)
    regular = gram + penalty * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    weights = torch.linalg.solve(regular, moments.comoment(features, targets), left=True)
    intercept = moments.mean(targets) - moments.mean(features) @ weights
    return RidgeFit(weights, intercept, torch.full_like(intercept, penalty))
