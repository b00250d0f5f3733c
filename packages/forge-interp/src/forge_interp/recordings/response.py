"""How do words that are heard at any time become features of scans?

Letters: W words, S scans, D features, L delays.
"""

from collections.abc import Callable, Sequence
from math import factorial

import numpy as np

from forge_interp.analysis.arrays import Array, Labels, as_labels, as_matrix
from forge_interp.errors import InterpError

Response = Callable[[np.ndarray], np.ndarray]


def canonical_response(seconds: np.ndarray) -> np.ndarray:
    """The blood response to a moment, this long before: a peak at 5 s, an undershoot at 15 s, integral 1.

    The difference of two gamma densities, of shapes 6 and 16 and rate 1 a second, the second a sixth of the
    first. Source: SPM, `spm_hrf` with its default parameters (Friston et al. 1998, NeuroImage 7:30).
    """
    t = np.clip(seconds, 0, 200)  # where it is 0 in float64
    peak, undershoot = (t ** (k - 1) * np.exp(-t) / factorial(k - 1) for k in (6, 16))
    return (peak - undershoot / 6) / (1 - 1 / 6)


def lanczos(interval_s: float, lobes: int = 3) -> Response:
    """The low-pass filter of Huth et al. 2016 (Nature 532:453) for scans that are `interval_s` apart.

    It has no delay: the response is left to `encode(..., delays=)`.
    """

    def response(seconds: np.ndarray) -> np.ndarray:
        u = seconds / interval_s
        return np.sinc(u) * np.sinc(u / lobes) * (np.abs(u) < lobes)

    return response


def at_scans(
    features: Array, onsets: Array, scan_times: Array, response: Response = canonical_response
) -> np.ndarray:
    """Convolve words at their onsets with a response, read at the scans of one run: exact, on no grid.

    Args:
        features: [W, D] of the words.
        onsets: [W] seconds, in any order.
        scan_times: [S] seconds, on the same clock.
        response: the value at a scan this many seconds [S, W] after the onset.

    Returns:
        [S, D] float64: sum over words of response(scan - onset) x features.
    """
    x = as_matrix(features, "features").cpu().numpy()
    starts, scans = (np.asarray(as_labels(times), dtype=np.float64) for times in (onsets, scan_times))
    if starts.shape != (len(x),) or scans.ndim != 1 or not np.isfinite([*starts, *scans]).all():
        raise InterpError(
            f"onsets are {starts.shape}, scan_times {scans.shape}, for {len(x)} words; expected finite "
            "times in seconds, one of each word and of each scan"
        )
    return response(scans[:, None] - starts) @ x


def delayed(features: Array, delays: Sequence[int], runs: Labels) -> np.ndarray:
    """Copy features to later scans of the same run, 0 where the run had not begun (finite impulse response).

    Args:
        features: [S, D].
        delays: L scans; negative ones bring later features to earlier scans.
        runs: [S] the run of each scan; the scans of a run stand side by side, in order of time.

    Returns:
        [S, L D] float64: the features of the first delay, then those of the next.
    """
    x, labels = as_matrix(features, "features").cpu().numpy(), as_runs(runs)
    copies = []
    for delay in delays:
        source = np.arange(len(x)) - delay
        inside = (source >= 0) & (source < len(x))
        source = source.clip(0, len(x) - 1)
        copies.append(np.where((inside & (labels[source] == labels))[:, None], x[source], 0.0))
    return np.concatenate(copies, axis=1)


def as_runs(runs: Labels) -> np.ndarray:
    """[S] the number of each scan's run, from 0 in their order; InterpError where a run is in pieces."""
    labels = as_labels(runs)
    begins = np.append(True, labels[1:] != labels[:-1]) if labels.ndim == 1 else np.zeros(0, dtype=bool)
    if labels.ndim != 1 or begins.sum() != len(np.unique(labels)):
        raise InterpError(
            f"runs are {labels.shape}, in {begins.sum()} pieces; expected a label for each scan, and "
            "the scans of a run side by side"
        )
    return begins.cumsum() - 1
