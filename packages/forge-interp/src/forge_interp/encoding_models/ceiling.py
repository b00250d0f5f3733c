"""How well could any model predict these recordings, given their noise?

Letters: R repeats of the same stimuli, n samples (times or stimuli), T targets (voxels, neurons, electrodes).
Model: recording = signal + noise, noise independent between repeats. The reliability of the mean of R
repeats is the share of its variance that is signal; its square root is the correlation that the true signal
would reach.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forge_interp.analysis.arrays import Array, as_real, centre, check_finite
from forge_interp.errors import InterpError


@dataclass(frozen=True)
class Ceiling:
    """What noise allows, for each target.

    The reliability is an estimate, at most 1 and by chance negative; 0 or NaN for a target that never varies.
    """

    reliability: np.ndarray  # [T] share of signal variance in the mean of the repeats; the ceiling of R^2
    num_repeats: int  # that the recordings to be predicted average over
    method: str  # how it was estimated

    @property
    def r(self) -> np.ndarray:
        """[T] ceiling of Pearson r: sqrt(reliability), 0 where that is negative."""
        return np.sqrt(np.clip(self.reliability, 0, None))

    def at(self, num_repeats: int) -> "Ceiling":
        """Return the ceiling of recordings that average over another number of repeats (Spearman-Brown).

        Use `ceiling.at(1)` for a model that is scored on single repeats.
        """
        if num_repeats < 1:
            raise InterpError(f"num_repeats is {num_repeats}; expected at least 1")
        return Ceiling(_prophecy(self.reliability, num_repeats / self.num_repeats), num_repeats, self.method)

    def normalize(self, r: np.ndarray, *, min_r: float = 0.1) -> np.ndarray:
        """Divide correlations [..., T] by the ceiling; NaN where that is below `min_r` > 0.

        Source: Schoppe et al. 2016, Front. Comput. Neurosci. 10:10 (CC_norm); Hsu et al. 2004, Network 15:91.
        """
        if min_r <= 0:
            raise InterpError(f"min_r is {min_r}; expected above 0: over a vanishing ceiling is noise")
        return np.asarray(r) / np.where(self.r >= min_r, self.r, np.nan)


def split_half_ceiling(repeats: Array, *, num_splits: int = 100, seed: int = 0) -> Ceiling:
    """Reliability from random split halves, with the Spearman-Brown correction.

    Correlates the means of two disjoint sets of R // 2 repeats, averages over splits (all distinct ones if
    there are no more than `num_splits`, else random ones), and steps up to R repeats: m c / (1 + (m - 1) c),
    m = R / (R // 2). `repeats` are [R, n, T], R >= 2, n >= 3, finite.

    Source: Spearman 1910, Br. J. Psychol. 3:271; Brown 1910, ibid. 296.
    """
    if num_splits < 1:
        raise InterpError(f"num_splits is {num_splits}; expected at least 1")
    x = _repeats(repeats)
    total, half = len(x), len(x) // 2
    if math.comb(total, half) * math.comb(total - half, half) // 2 <= num_splits:
        splits = _all_splits(total, half)
    else:
        random = np.random.default_rng(seed)
        splits = (random.permutation(total)[: 2 * half].reshape(2, half).tolist() for _ in range(num_splits))
    correlations = [pearson(x[first].mean(0), x[second].mean(0)) for first, second in splits]
    mean = torch.stack(correlations).mean(0).cpu().numpy()
    return Ceiling(_prophecy(mean, total / half), total, "split-half, Spearman-Brown")


def repeat_ceiling(repeats: Array) -> Ceiling:
    """Reliability from signal power: what the mean over repeats keeps of the power of single repeats.

    P = variance over samples (n - 1); signal = (R P(mean of repeats) - mean of P(repeat)) / (R - 1);
    reliability = signal / P(mean of repeats). A baseline that differs between repeats is not noise. `repeats`
    are as for `split_half_ceiling`.

    Source: Sahani and Linden 2003, NeurIPS 15, eq. 1.
    """
    x = _repeats(repeats)
    single, whole = centre(x, dim=1).square().sum(1).mean(0), centre(x.mean(0)).square().sum(0)
    signal = (len(x) * whole - single) / (len(x) - 1)
    reliability = signal / torch.where(whole > 0, whole, torch.nan)
    return Ceiling(reliability.cpu().numpy(), len(x), "repeats, signal power")


def pearson(a: Tensor, b: Tensor) -> Tensor:
    """[T] Pearson r of the columns of two [n, T]; 0 where a column never varies."""
    a, b = centre(a), centre(b)
    scale = a.norm(dim=0) * b.norm(dim=0)
    return torch.where(scale > 0, (a * b).sum(0) / scale.clamp_min(1e-300), 0.0)


def _prophecy(reliability: np.ndarray, factor: float) -> np.ndarray:
    """Spearman-Brown for `factor` times as many repeats; a negative estimate stays as it is."""
    positive = np.clip(reliability, 0, None)
    return np.where(reliability > 0, factor * positive / (1 + (factor - 1) * positive), reliability)


def _all_splits(total: int, half: int) -> Iterator[tuple[list[int], list[int]]]:
    """Every pair of disjoint sets of `half` repeats, once: a mirrored pair is the same one."""
    for first in itertools.combinations(range(total), half):
        rest = [i for i in range(first[0] + 1, total) if i not in first]
        for second in itertools.combinations(rest, half):
            yield list(first), list(second)


def _repeats(values: Array) -> Tensor:
    x = as_real(values, "repeats")
    if x.ndim != 3 or x.shape[0] < 2 or x.shape[1] < 3:
        raise InterpError(
            f"repeats has shape {tuple(x.shape)}; expected [repeats, samples, targets], at least 2 and 3"
        )
    check_finite(x, "repeats")
    return x.to(torch.float64)
