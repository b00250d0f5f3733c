"""How well do features predict recordings of a run that the fit has not seen?

The regressions are those of himalaya. Letters: S scans, V voxels, D features, B bands, F held-out runs, R
repeats, P permutations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forge_interp.analysis.arrays import Array, Labels, as_alphas, as_array, as_labels
from forge_interp.errors import InterpError, optional
from forge_interp.recordings.words import as_runs, delayed

ALPHAS = np.logspace(-1, 7, 17)
_TARGETS = 2048  # voxels, or permutations of them, that are predicted at once


@dataclass(frozen=True)
class EncodingScores:
    """Scores of each held-out run, after the run's means of recordings and predictions are subtracted."""

    bands: tuple[str, ...]
    r: np.ndarray  # [F, V] correlation; NaN where a voxel or its prediction is constant
    r2: np.ndarray  # [F, V] share of the variance; the correlation of scans is not enough, the size counts
    band_r2: np.ndarray  # [F, B, V] the part of each band: sums to r2
    penalties: np.ndarray  # [F, B, V] that were chosen
    predictions: np.ndarray  # [S, V] of the held-out runs, NaN in others
    p: np.ndarray | None  # [V] of the mean of r over runs; None without `permutations`


@dataclass(frozen=True)
class _Problem:
    bands: Mapping[str, np.ndarray]  # [S, D] each
    runs: np.ndarray  # [S] numbers
    held_out: Sequence[int]
    delays: Sequence[int]
    alphas: np.ndarray
    weights: np.ndarray  # [draws, B] of the bands, each draw sums to 1


def encode(
    bands: Array | Mapping[str, Array],
    recordings: Array,
    runs: Labels,
    *,
    test_runs: Sequence[object] | None = None,
    delays: Sequence[int] = (0,),
    alphas: Sequence[float] | None = None,
    draws: int = 100,
    permutations: int = 0,
    block: int = 10,
    seed: int = 0,
) -> EncodingScores:
    """Fit ridge regression to all runs but one and score it on that run; several bands: banded ridge.

    In each fold the other runs alone decide the scale of features and the penalties of each voxel: those that
    predict each of these runs best from the rest. It runs on the backend of himalaya
    (`himalaya.backend.set_backend("torch_cuda")`), in float64.

    A p value is the share of permutations with a mean r at least as large; they shuffle blocks of scans
    within their run. With one test run its recordings are shuffled; with several, each run is in the fit of
    the others, and each permutation repeats the whole fit.

    Args:
        bands: features [S, D] at the scans, or several by name.
        recordings: [S, V].
        runs: [S] the run of each scan; at least 3, each side by side and in order of time.
        test_runs: runs to hold out in turn; default all.
        delays: scans by which features are delayed; with (1, 2, 3, 4) the regression fits the response, (0,)
            is for features that are already convolved with it.
        alphas: candidate penalties; default 0.1 to 1e7. A band of weight w has alpha / w.
        draws: number of draws of band weights, from Dirichlet distributions of concentration 0.1 and 1; the
            first draw has equal weights.
        permutations: number of permutations; 0 for no p values.
        block: scans of a block; choose it longer than the autocorrelation of the recordings.
        seed: seed of the draws and permutations.

    InterpError where shapes, runs or values do not fit. Source: Nunez-Elizalde et al. 2019 (NeuroImage
    197:482), Dupre la Tour et al. 2022 (NeuroImage 264:119728).
    """
    optional("himalaya", "encode", "recordings")
    from himalaya.kernel_ridge import generate_dirichlet_samples

    features = bands if isinstance(bands, Mapping) else {"features": bands}
    x = {name: as_array(band, name) for name, band in features.items()}
    y, numbers = as_array(recordings, "recordings"), as_runs(runs)
    candidates = as_alphas(ALPHAS if alphas is None else alphas)
    held_out = _held_out(as_labels(runs), numbers, test_runs)
    for name, array in ({"recordings": y} | x).items():
        if len(array) != len(numbers):
            raise InterpError(f"{name} has {len(array)} rows, runs {len(numbers)}; expected one a scan")
    if permutations and not 1 <= block <= (shortest := np.bincount(numbers).min()) // 2:
        raise InterpError(f"block is {block} scans, runs have from {shortest}; expected at most half of one")
    weights = np.ones((1, 1))
    if len(x) > 1:
        drawn = generate_dirichlet_samples(max(draws, 1), len(x), [0.1, 1.0], random_state=seed)
        weights = np.concatenate([np.full((1, len(x)), 1 / len(x)), _to_numpy(drawn)[1:]])
    problem = _Problem(x, numbers, held_out, delays, candidates, weights)
    found = _folds(problem, y)
    return (
        replace(found, p=_p_values(problem, y, found, permutations, block, seed)) if permutations else found
    )


def noise_ceiling(repeats: Array, runs: Labels) -> np.ndarray:
    """Estimate the correlation [V] of a perfect model with the mean of repeats [R, S, V]; at least 0.

    It is the square root of the mean's reliability: the share of signal in the variance within runs (NaN
    without variance).
    Source: Sahani and Linden 2003 (NeurIPS 15, eq. 1), as Cronbach's alpha of the repeats.
    """
    y, numbers = np.asarray(as_labels(repeats), dtype=np.float64), as_runs(runs)
    if y.ndim != 3 or len(y) < 2 or y.shape[1] != len(numbers):
        raise InterpError(f"repeats are {y.shape}, with {len(numbers)} scans; expected [2 or more, scans, V]")
    pieces = (y[:, numbers == run] for run in range(numbers[-1] + 1))
    y = np.concatenate([piece - piece.mean(1, keepdims=True) for piece in pieces], axis=1)
    power = y.mean(0).var(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        reliability = (len(y) * power - y.var(1).mean(0)) / (len(y) - 1) / power
    return np.sqrt(reliability.clip(0, 1))


def _folds(problem: _Problem, y: np.ndarray) -> EncodingScores:
    """Return the scores of recordings [S, V], without p values."""
    predictions, scores = np.full(y.shape, np.nan), []
    for run in problem.held_out:
        test = problem.runs == run
        parts, penalties = _fit(problem, y, test)
        guess = parts.sum(0)
        predictions[test] = guess + y[~test].mean(0)
        parts, actual = parts - parts.mean(1, keepdims=True), y[test] - y[test].mean(0)
        guess = parts.sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            band_r2 = (parts * (2 * actual - guess)).sum(1) / (actual**2).sum(0)
        scores.append((_correlation(guess, actual), band_r2.sum(0), band_r2, penalties))
    r, r2, band_r2, penalties = (np.stack(column) for column in zip(*scores, strict=True))
    return EncodingScores(tuple(problem.bands), r, r2, band_r2, penalties, predictions, None)


def _fit(problem: _Problem, y: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each band's addition [B, test scans, V] to the mean of the other runs, and penalties [B, V]."""
    from himalaya.kernel_ridge import solve_multiple_kernel_ridge_random_search
    from himalaya.ridge import solve_group_ridge_random_search
    from sklearn.model_selection import PredefinedSplit
    from sklearn.preprocessing import StandardScaler

    train, bands = ~test, []
    for band in problem.bands.values():
        scaler: Any = StandardScaler().fit(band[train])
        x = delayed(scaler.transform(band), problem.delays, problem.runs)
        bands.append(x - x[train].mean(0))
    size = y[train].std(0)  # himalaya takes differences of squared errors below 1e-16 for ties
    size[size == 0] = 1
    targets = (y[train] - y[train].mean(0)) / size
    options: dict[str, Any] = {"n_iter": problem.weights, "alphas": problem.alphas, "fit_intercept": True}
    options |= {"n_targets_batch": _TARGETS, "progress_bar": False}
    options |= {"cv": PredefinedSplit(problem.runs[train])}
    known = [band[train] for band in bands]
    if sum(band.shape[1] for band in bands) <= len(targets):
        deltas, found, *_ = solve_group_ridge_random_search(known, targets, return_weights=True, **options)
        coefs = np.split(_to_numpy(found), np.cumsum([band.shape[1] for band in bands])[:-1])
    else:
        kernels = np.stack([band @ band.T for band in known])
        options |= {"return_weights": "dual"}
        deltas, found, *_ = solve_multiple_kernel_ridge_random_search(kernels, targets, **options)
        scales = np.exp(_to_numpy(deltas))
        coefs = [scale * (band.T @ _to_numpy(found)) for scale, band in zip(scales, known, strict=True)]
    parts = [band[test] @ (coef * size) for band, coef in zip(bands, coefs, strict=True)]
    return np.stack(parts), np.exp(-_to_numpy(deltas))


def _p_values(
    problem: _Problem, y: np.ndarray, found: EncodingScores, permutations: int, block: int, seed: int
) -> np.ndarray:
    """Return [V], the share of permutations (and the unshuffled data) with a mean r at least as large."""
    random = np.random.default_rng(seed)
    actual = found.r.mean(0)
    orders = [_shuffled_blocks(problem.runs, block, random) for _ in range(permutations)]
    together = max(1, _TARGETS // y.shape[1])
    test = problem.runs == problem.held_out[0]
    count = np.ones(len(actual))
    for start in range(0, permutations, together):
        some = orders[start : start + together]
        if len(problem.held_out) == 1:
            r = np.stack([_correlation(found.predictions[test], y[order][test]) for order in some])
        else:
            r = _folds(problem, np.concatenate([y[order] for order in some], axis=1)).r.mean(0)
        count += (r.reshape(len(some), -1) >= actual).sum(0)
    return np.where(np.isnan(actual), np.nan, count / (permutations + 1))


def _shuffled_blocks(runs: np.ndarray, block: int, random: np.random.Generator) -> np.ndarray:
    """Return [S] scans with blocks of neighbouring scans shuffled within each run."""
    order = []
    for run in range(runs[-1] + 1):
        scans = np.flatnonzero(runs == run)
        blocks = np.split(scans, np.arange(random.integers(1, block + 1), len(scans), block))
        order += [blocks[i] for i in random.permutation(len(blocks))]
    return np.concatenate(order)


def _correlation(guess: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Return [V], Pearson's r of two [S, V]; NaN where one does not vary."""
    a, b = guess - guess.mean(0), actual - actual.mean(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (a * b).sum(0) / np.sqrt((a**2).sum(0) * (b**2).sum(0))


def _held_out(labels: np.ndarray, numbers: np.ndarray, test_runs: Sequence[object] | None) -> list[int]:
    """Return the numbers of the runs to hold out."""
    names = [labels[numbers == number][0] for number in range(numbers[-1] + 1)]
    chosen = names if test_runs is None else list(test_runs)
    if len(names) < 3 or not chosen or any(run not in names for run in chosen):
        raise InterpError(
            f"there are runs {names}, of which {chosen} are held out; expected at least 3 runs, so that two "
            "are left to choose penalties, and at least one of them held out"
        )
    return [names.index(run) for run in chosen]


def _to_numpy(values: Any) -> np.ndarray:
    from himalaya.backend import get_backend

    return get_backend().to_numpy(values)
