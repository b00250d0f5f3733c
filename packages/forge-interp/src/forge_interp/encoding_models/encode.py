"""How well do the features of a layer predict recordings of a brain?

Letters: n samples (scans, stimuli), d features, T targets (voxels, neurons), B bands (feature spaces), A
penalties, F outer folds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge_interp.analysis.arrays import Array, Labels, as_matrix, check_alphas, check_finite, same_rows
from forge_interp.analysis.probe import Fold, group_folds, r_squared, z_score
from forge_interp.analysis.ridge import DEFAULT_ALPHAS, RidgePath
from forge_interp.encoding_models.ceiling import Ceiling, pearson
from forge_interp.encoding_models.timing import fir_delays, run_bounds
from forge_interp.errors import InterpError


@dataclass(frozen=True)
class EncodingResult:
    """Held-out prediction of every target by one model, in each outer fold.

    Where recording or prediction never varies r is 0; where the recording never does, r2 is NaN.
    """

    r: np.ndarray  # [F, T] Pearson correlation of prediction and recording
    r2: np.ndarray  # [F, T] share of variance explained around the fold's mean; can be negative
    alpha: np.ndarray  # [F, T] the penalty chosen inside each training fold
    band_weights: np.ndarray  # [F, T, B] chosen for each band (they sum to 1; larger is less penalized)
    bands: tuple[str, ...]
    normalized: np.ndarray | None  # [T] mean r over folds / ceiling of r, if that is known and high enough

    @property
    def score(self) -> np.ndarray:
        """[T] mean r over folds."""
        return self.r.mean(0)


@dataclass(frozen=True)
class _Search:
    """What is tried inside each training fold: alphas [A], weights [C, B] of bands, inner folds."""

    alphas: list[float]
    weights: np.ndarray
    inner_folds: int


def encode(
    features: Array | Mapping[str, Array],
    recordings: Array,
    runs: Labels,
    *,
    delays: Sequence[int] = (0,),
    alphas: Sequence[float] = DEFAULT_ALPHAS,
    num_folds: int | None = None,
    inner_folds: int = 5,
    num_band_samples: int = 32,
    ceiling: Ceiling | None = None,
    min_ceiling: float = 0.1,
    seed: int = 0,
) -> EncodingResult:
    """Fit and score a linear encoding model by nested cross-validation over whole runs.

    In each outer fold: z-score the features by the training rows, delay them inside runs, choose per target
    the penalty (and, for several bands, the band weights) with the least squared error over inner folds of
    training runs, refit on all training runs, and score on the held-out runs. With several bands this is
    banded ridge: band b has penalty alpha / weight_b; candidate weights are equal ones and random draws from
    the simplex.

    Args:
        features: [n, d], or {band: [n, d_b]} for banded ridge.
        recordings: [n, T], e.g. z-scored BOLD per run; targets in any units (r and R^2 have none).
        runs: [n] run (story, session) of each row, contiguous; no fold divides a run. For samples without
            an order `range(n)`, with `num_folds` given.
        delays: in samples, see `fir_delays`; e.g. (1, 2, 3, 4) for BOLD at TR = 2 s.
        alphas: penalties to choose from.
        num_folds: outer folds; default one per run.
        inner_folds: inner folds, at most one per training run.
        num_band_samples: candidate band weights when there are two bands or more.
        ceiling: of these targets, from `split_half_ceiling` or `repeat_ceiling`, for as many repeats as
            `recordings` averages over (see `Ceiling.at`).
        min_ceiling: see `Ceiling.normalize`.
        seed: of folds and band weights.

    Source: Naselaris et al. 2011, NeuroImage 56:400 (encoding models); Nunez-Elizalde et al. 2019, NeuroImage
        197:482 and Dupre la Tour et al. 2022, NeuroImage 264:119728 (banded ridge, random search).
    """
    bands, y, labels = _bands(features), as_matrix(recordings, "recordings"), np.asarray(runs)
    check_finite(y, "recordings")
    same_rows({**bands, "recordings": y})
    if ceiling is not None and ceiling.reliability.shape != (y.shape[1],):
        raise InterpError(f"ceiling of {len(ceiling.reliability)} targets; expected {y.shape[1]}")
    search = _Search(check_alphas(alphas), _band_candidates(len(bands), num_band_samples, seed), inner_folds)
    folds = _outer_folds(labels, len(y), num_folds, seed)
    parts = [_score_fold(bands, y, labels, delays, train, test, search) for train, test in folds]
    r, r2, alpha, chosen = (np.stack(column) for column in zip(*parts, strict=True))
    normalized = None if ceiling is None else ceiling.normalize(r.mean(0), min_r=min_ceiling)
    return EncodingResult(r, r2, alpha, search.weights[chosen], tuple(bands), normalized)


def encode_layers(
    layers: Mapping[str, Array], recordings: Array, runs: Labels, **options: Any
) -> dict[str, EncodingResult]:
    """Fit one encoding model per layer; `options` are those of `encode`."""
    return {name: encode(layer, recordings, runs, **options) for name, layer in layers.items()}


def _bands(features: Array | Mapping[str, Array]) -> dict[str, Tensor]:
    named = features if isinstance(features, Mapping) else {"features": features}
    if not named:
        raise InterpError("features is empty; expected at least one band")
    bands = {name: as_matrix(x, name) for name, x in named.items()}
    for name, x in bands.items():
        check_finite(x, name)
    return bands


def _outer_folds(runs: np.ndarray, num_rows: int, num_folds: int | None, seed: int) -> list[Fold]:
    """Folds of whole runs, each with runs to choose by and rows to correlate over."""
    num_runs = len(run_bounds(runs, num_rows))
    if num_runs < 3:
        raise InterpError(f"{num_runs} runs; expected at least 3: one to test, two to choose by")
    folds = group_folds(runs, num_runs if num_folds is None else num_folds, seed=seed)
    for train, test in folds:
        num_train = len(np.unique(runs[train]))
        if num_train < 2 or len(test) < 3:
            raise InterpError(
                f"a fold tests {len(test)} rows and trains on {num_train} of {num_runs} runs; "
                "expected at least 3 rows and 2 runs: change num_folds"
            )
    return folds


def _band_candidates(num_bands: int, num_samples: int, seed: int) -> np.ndarray:
    """[C, B] points of the simplex: equal weights, then half sparse and half even draws (Dirichlet)."""
    equal = np.full((1, num_bands), 1 / num_bands)
    if num_bands == 1:
        return equal
    random = np.random.default_rng(seed)
    sparse = random.dirichlet(np.full(num_bands, 0.1), size=num_samples // 2)
    even = random.dirichlet(np.ones(num_bands), size=num_samples - num_samples // 2)
    return np.concatenate([equal, np.clip(sparse, 1e-10, None), even])


def _score_fold(
    bands: Mapping[str, Tensor],
    y: Tensor,
    runs: np.ndarray,
    delays: Sequence[int],
    train: np.ndarray,
    test: np.ndarray,
    search: _Search,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    delayed = [fir_delays(z_score(x[train], x)[1], delays, runs) for x in bands.values()]
    y = y.to(delayed[0].device)
    errors = _inner_errors([x[train] for x in delayed], y[train], runs[train], search)
    num_alphas = len(search.alphas)
    best = errors.flatten(0, 1).argmin(0)
    chosen, alpha = best // num_alphas, y.new_tensor(search.alphas)[best % num_alphas]
    prediction = torch.empty_like(y[test])
    for candidate in chosen.unique().tolist():
        targets = (chosen == candidate).nonzero()[:, 0]
        x = _weighted(delayed, search.weights[candidate])
        path, wanted = RidgePath(x[train]), y[train][:, targets]
        weights = path.weights(path.project(wanted), alpha[targets])
        prediction[:, targets] = (x[test] - path.mean) @ weights + wanted.mean(0)
    r, r2 = pearson(prediction, y[test]), r_squared(y[test], prediction)
    return r.cpu().numpy(), r2.cpu().numpy(), alpha.cpu().numpy(), chosen.cpu().numpy()


def _inner_errors(delayed: list[Tensor], y: Tensor, runs: np.ndarray, search: _Search) -> Tensor:
    """[C, A, T] squared error summed over the inner test rows."""
    errors = y.new_zeros(len(search.weights), len(search.alphas), y.shape[1])
    folds = group_folds(runs, min(search.inner_folds, len(np.unique(runs))))
    for c, weights in enumerate(search.weights):
        x = _weighted(delayed, weights)
        for train, test in folds:
            path, mean = RidgePath(x[train]), y[train].mean(0)
            projected = path.project(y[train])
            for a, alpha in enumerate(search.alphas):
                guess = path.predict(x[test], projected, [alpha])[0] + mean
                errors[c, a] += (guess - y[test]).square().sum(0)
    return errors


def _weighted(delayed: list[Tensor], weights: np.ndarray) -> Tensor:
    return torch.cat([x * float(w) ** 0.5 for x, w in zip(delayed, weights, strict=True)], dim=1)
