"""Do two systems find the same pairs of conditions alike, and how well could any model do?

RDMs are vectors of P = n (n - 1) / 2 entries (see `forge_interp.analysis.rdm`). Letters: n conditions,
P pairs, M models, S subjects (one data RDM each), R bootstrap samples. Similarities have no units; 1 is best.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from forge_interp.analysis.arrays import ROUNDING, check_finite
from forge_interp.analysis.rdm import num_conditions, square
from forge_interp.errors import InterpError


@dataclass(frozen=True)
class RSAResult:
    """Agreement of each model with the data."""

    similarity: np.ndarray  # [M, S] of each model RDM with each subject's
    ceiling: tuple[float, float]  # (lower, upper) of what the true model could reach; NaN for one subject
    method: str  # how RDMs were compared
    names: tuple[str, ...]  # of the models, M; their numbers where none were given


def compare_rdms(first: np.ndarray, second: np.ndarray, *, method: str = "spearman") -> np.ndarray:
    """Similarity of every RDM of one set with every RDM of another, [A, B] float64 in [-1, 1].

    pearson, spearman (ties share their mean rank), kendall (tau-a: concordant minus discordant pairs over all
    pairs, so that a model which predicts ties does not gain) and cosine on the entries. whitened_cosine and
    whitened_pearson replace a^T b by a^T V^-1 b, V the covariance of squared distances estimated from the
    same noisy patterns; whitened_cosine equals (biased) linear CKA for Euclidean RDMs. NaN where an RDM is
    constant (or zero, for the cosines). RDMs are [P] or [A, P], and [P] or [B, P].

    Source: Nili et al. 2014, PLoS Comput. Biol. 10:e1003553 (tau-a); Diedrichsen et al. 2020,
        arXiv:2007.02789 (whitened).
    """
    _check_method(method)
    a, b = _same_conditions(first, second)
    return _compare(a, b, method)


def noise_ceiling(data: np.ndarray, *, method: str = "spearman") -> tuple[float, float]:
    """Bounds (lower, upper) on the similarity that the unknown true model would have with these subjects.

    Upper: mean similarity of each subject with the mean RDM of all (which contains it). Lower: with the mean
    RDM of the others. RDMs are normalized as the method does (ranks, z-scores, or unit length) before the
    mean. NaN for a single subject, or where an RDM is constant. `data` are [S, P], one RDM per subject.

    Source: Nili et al. 2014, PLoS Comput. Biol. 10:e1003553; as `rsatoolbox.inference.boot_noise_ceiling`
            (which pools RDMs without whitening under the whitened methods; here the mean is whitened too).
    """
    _check_method(method)
    data = _rdms(data)
    num_subjects = len(data)
    if num_subjects < 2:
        return float("nan"), float("nan")
    pooled = _rank_rows(data) if method == "kendall" else _unit_entries(data, method)
    upper = np.mean(compare_rdms(pooled.mean(0), data, method=method))
    others = [np.delete(pooled, i, axis=0).mean(0) for i in range(num_subjects)]
    lower = np.mean([compare_rdms(mean, rdm, method=method) for mean, rdm in zip(others, data, strict=True)])
    return float(lower), float(upper)


def evaluate_models(
    models: Mapping[str, np.ndarray] | np.ndarray, data: np.ndarray, *, method: str = "spearman"
) -> RSAResult:
    """Compare model RDMs, [M, P] or {name: [P]}, with those of subjects [S, P], as `compare_rdms` does."""
    names, stacked = _named(models)
    similarity = compare_rdms(stacked, data, method=method)
    return RSAResult(similarity, noise_ceiling(data, method=method), method, names)


def bootstrap_rsa(
    models: Mapping[str, np.ndarray] | np.ndarray,
    data: np.ndarray,
    *,
    method: str = "spearman",
    num_samples: int = 1000,
    over: str = "both",
    seed: int = 0,
) -> np.ndarray:
    """Bootstrap distribution of each model's mean similarity over subjects, [R, M].

    Draws conditions and/or subjects with replacement; pairs of one condition with itself (dissimilarity 0 by
    construction) are left out, so the whitened methods, which need whole RDMs, cannot resample conditions.
    Resampling conditions counts the variance that noise of single pairs adds three times: intervals come out
    wide, not narrow. The standard deviation over the first axis is a standard error, quantiles an interval.
    NaN for a draw of fewer than 3 distinct conditions, or in which an RDM is constant: use `np.nanstd`.

    `models` are [M, P], or {name: [P]}, `data` [S, P], `num_samples` is R; `over` is "conditions", "subjects"
    (at least two) or "both": one alone generalizes to new ones of that kind only.

    Source: Nili et al. 2014, PLoS Comput. Biol. 10:e1003553; Schuett et al. 2023, eLife 12:e82566.
    """
    _check_method(method)
    models, data = _same_conditions(_named(models)[1], data)
    if over not in ("conditions", "subjects", "both"):
        raise InterpError(f"over is {over!r}; expected 'conditions', 'subjects' or 'both'")
    if over != "subjects" and method.startswith("whitened"):
        raise InterpError(f"{method} needs whole RDMs; expected over='subjects', or an unwhitened method")
    n, num_subjects = num_conditions(data.shape[1]), len(data)
    if over != "conditions" and num_subjects < 2:
        raise InterpError("there is 1 subject; expected at least 2 to resample, or over='conditions'")
    random = np.random.default_rng(seed)
    whole = square(models), square(data)
    rows, columns = np.triu_indices(n, 1)
    result = np.full((num_samples, len(models)), np.nan)
    for sample in range(num_samples):
        who = _draw(random, num_subjects, replace=over != "conditions")
        what = _draw(random, n, replace=over != "subjects")
        if len(np.unique(what)) < 3:
            continue
        i, j = what[rows], what[columns]
        i, j = i[i != j], j[i != j]
        result[sample] = _compare(whole[0][:, i, j], whole[1][who][:, i, j], method).mean(1)
    return result


def _named(models: Mapping[str, np.ndarray] | np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
    if isinstance(models, Mapping):
        return tuple(models), np.stack(list(models.values()))
    return tuple(str(i) for i in range(len(np.atleast_2d(models)))), models


def _draw(random: np.random.Generator, count: int, *, replace: bool) -> np.ndarray:
    return random.integers(count, size=count) if replace else np.arange(count)


def _rdms(values: np.ndarray) -> np.ndarray:
    """[A, P] float64 from [P] or [A, P]; ranks would turn NaN into the largest dissimilarity."""
    rdms = np.atleast_2d(np.asarray(values, np.float64))
    num_conditions(rdms.shape[1])
    check_finite(torch.from_numpy(rdms), "an RDM")
    return rdms


def _same_conditions(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    a, b = _rdms(first), _rdms(second)
    if a.shape[1] != b.shape[1]:
        raise InterpError(f"RDMs have {a.shape[1]} and {b.shape[1]} entries; expected the same conditions")
    return a, b


def _compare(a: np.ndarray, b: np.ndarray, method: str) -> np.ndarray:
    if method == "kendall":
        return np.array([[_kendall(x, y) for y in b] for x in a])
    return _unit(a, method) @ _unit(b, method).T


def _check_method(method: str) -> None:
    if method not in _METHODS:
        raise InterpError(f"method is {method!r}; expected one of {list(_METHODS)}")


def _unit(rdms: np.ndarray, method: str) -> np.ndarray:
    """Rows whose inner products are the similarity: whitened where the method says so."""
    base = _rank_rows(rdms) if method == "spearman" else rdms
    rows = _METHODS[method](base)
    return rows / _norms(rows, base)


def _norms(rows: np.ndarray, rdms: np.ndarray) -> np.ndarray:
    """[A, 1] lengths of `rows`; NaN where rounding is all that they keep of `rdms`."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.where(norms > ROUNDING * np.linalg.norm(rdms, axis=1, keepdims=True), norms, np.nan)


def _unit_entries(rdms: np.ndarray, method: str) -> np.ndarray:
    """RDM entries scaled so that each subject weighs the same in the mean."""
    if method == "spearman":
        return _rank_rows(rdms)
    rows = rdms if method.endswith("cosine") else _centre(rdms)
    base = _isotropic(rows) if method.startswith("whitened") else rows
    return rows / _norms(base, rdms)


def _centre(rows: np.ndarray) -> np.ndarray:
    return rows - rows.mean(1, keepdims=True)


def _isotropic(rows: np.ndarray) -> np.ndarray:
    """Rows w with w_a . w_b proportional to a^T V^-1 b: the doubly centred matrices -1/2 H D H, [A, n * n].

    For i.i.d. noise V = (C C^T)^2 elementwise (C the contrasts of pairs), and its inverse form is this one.
    """
    matrices = square(rows)
    matrices = matrices - matrices.mean(-1, keepdims=True)
    matrices = matrices - matrices.mean(-2, keepdims=True)
    return -0.5 * matrices.reshape(len(rows), -1)


def _rank_rows(rows: np.ndarray) -> np.ndarray:
    """Ranks from 1 along each row, ties sharing their mean."""
    ranks = np.empty_like(rows)
    for row, out in zip(rows, ranks, strict=True):
        _, inverse, counts = np.unique(row, return_inverse=True, return_counts=True)
        last = counts.cumsum()
        out[:] = ((last - counts + 1 + last) / 2)[inverse]
    return ranks


_METHODS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "pearson": _centre,
    "spearman": _centre,
    "kendall": lambda rows: rows,
    "cosine": lambda rows: rows,
    "whitened_cosine": _isotropic,
    "whitened_pearson": lambda rows: _isotropic(_centre(rows)),
}


def _kendall(a: np.ndarray, b: np.ndarray) -> float:
    """tau-a in O(P log^2 P): (all - tied in a - tied in b + tied in both - 2 discordant) / all."""
    _, x = np.unique(a, return_inverse=True)
    _, y = np.unique(b, return_inverse=True)
    if x.max() == 0 or y.max() == 0:
        return float("nan")
    pairs = len(x) * (len(x) - 1) // 2
    order = np.lexsort((y, x))
    both = np.unique(x * (y.max() + 1) + y, return_counts=True)[1]
    tied = sum(_choose_two(np.bincount(ranks)) for ranks in (x, y)) - _choose_two(both)
    return float((pairs - tied - 2 * _inversions(y[order])) / pairs)


def _choose_two(counts: np.ndarray) -> int:
    return int((counts * (counts - 1) // 2).sum())


def _inversions(values: np.ndarray) -> int:
    """Count i < j with values[i] > values[j], by a bottom-up merge sort, all blocks of a level at once."""
    count, width, size = 0, 1, len(values)
    values = values.astype(np.int64)
    span = int(values.max()) + 1
    place = np.arange(size)
    while width < size:
        block, is_left = place // (2 * width), place // width % 2 == 0
        key = block * span + values
        left = key[is_left]
        block_ends = np.searchsorted(left, (block[~is_left] + 1) * span)
        count += int((block_ends - np.searchsorted(left, key[~is_left], side="right")).sum())
        values = np.sort(key) - block * span
        width *= 2
    return count
