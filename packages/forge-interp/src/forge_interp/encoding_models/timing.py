"""How do features at one time reach recordings at another?

Letters: n samples (scans), m events (tokens, words, frames), d features, L delays.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forge_interp.analysis.arrays import Array, Labels, as_matrix, check_finite, same_rows
from forge_interp.errors import InterpError

_KERNEL_ELEMENTS = 2**20  # float64 weights made at a time: 8 MiB


def fir_delays(x: Array, delays: Sequence[int], runs: Labels | None = None) -> Tensor:
    """Finite impulse response features: copies of `x` delayed by whole samples, never across runs.

    Row t of the copy for delay k is row t - k of `x`, and 0 where that lies outside the run; z-score `x`
    first, so that 0 is the mean. A linear model of the copies fits one response over time for each feature.
    `x` is [n, d]; of L delays in samples, a negative one lets later features predict earlier recordings;
    `runs` [n] labels the run of each row, contiguous; default one run. Returns [n, L d] float64, all features
    of the first delay first.

    Source: Huth et al. 2016, Nature 532:453 (methods).
    """
    x = as_matrix(x, "x")
    if not delays:
        raise InterpError("delays is empty; expected at least one, e.g. (0,) for none")
    out = x.new_zeros(x.shape[0], len(delays), x.shape[1])
    for start, stop in run_bounds(runs, x.shape[0]):
        for i, delay in enumerate(delays):
            first, last = max(start, start + delay), min(stop, stop + delay)
            if first < last:
                out[first:last, i] = x[first - delay : last - delay]
    return out.flatten(1)


def run_bounds(runs: Labels | None, num_rows: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each run; raise InterpError when the rows of a run are not contiguous."""
    if runs is None:
        return [(0, num_rows)]
    labels = np.asarray(runs)
    if labels.shape != (num_rows,):
        raise InterpError(f"runs has shape {labels.shape}; expected ({num_rows},), one label per row")
    starts = np.flatnonzero(np.r_[True, labels[1:] != labels[:-1]])
    if len(starts) != len(np.unique(labels)):
        raise InterpError(
            "the rows of a run are not contiguous; expected all rows of a run together: sort them"
        )
    return list(zip(starts.tolist(), [*starts[1:].tolist(), num_rows], strict=True))


def resample(x: Array, times: Labels, at: Labels, *, method: str = "lanczos", lobes: int = 3) -> Tensor:
    """Bring features [m, d] of irregular events (tokens) to the times of scans: [n, d] float64.

    mean: each event belongs to the scan interval [at_i, at_(i+1)) it falls into (the last as long as the one
    before it); its features are averaged, and 0 where there is none. lanczos: a sum weighted by the low-pass
    kernel sinc(u) sinc(u / lobes), |u| < lobes, u = (at - time) / spacing of scans. `x` are [m, d] features
    of the events, `times` [m] in seconds, `at` [n] scan times in seconds, evenly spaced, rising.

    Source: Huth et al. 2016, Nature 532:453 (Lanczos, 3 lobes); kernel: Duchon 1979, J. Appl. Meteorol.
    18:1016.
    """
    x = as_matrix(x, "x")
    events = as_matrix(np.asarray(times), "times").to(x.device)
    same_rows({"x": x, "times": events})
    check_finite(x, "x")
    check_finite(events, "times")
    scans = torch.as_tensor(np.asarray(at), dtype=torch.float64, device=x.device)
    steps = scans.diff()
    if len(scans) < 2 or steps[0] <= 0 or not torch.allclose(steps, steps.mean(), rtol=1e-3, atol=0):
        raise InterpError("scan times are not evenly spaced and rising; expected at least two, one per scan")
    if method not in ("mean", "lanczos") or lobes < 1:
        raise InterpError(f"method is {method!r}, lobes {lobes}; expected 'mean' or 'lanczos', lobes >= 1")
    if method == "lanczos":
        rows = scans.split(max(1, _KERNEL_ELEMENTS // max(1, len(x))))
        places = ((part[:, None] - events[:, 0]) / steps.mean() for part in rows)
        return torch.cat([((u / lobes).sinc() * u.sinc() * (u.abs() < lobes)) @ x for u in places])
    edges = torch.cat([scans, scans[-1:] + steps[-1]])
    scan = torch.searchsorted(edges, events[:, 0], right=True) - 1
    inside = (scan >= 0) & (scan < len(scans))
    total = x.new_zeros(len(scans), x.shape[1]).index_add_(0, scan[inside], x[inside])
    return total / scan[inside].bincount(minlength=len(scans)).clamp_min(1)[:, None]
