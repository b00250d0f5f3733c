"""How do arrays come into the analyses?

Every analysis takes torch tensors (any device, any float dtype, bfloat16 too) or numpy arrays, and computes
in float64. Letters: n samples (rows), d features (columns).
"""

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forge_interp.errors import InterpError

Array = Tensor | np.ndarray
Labels = np.ndarray | Sequence[object]
ROUNDING = 1e-13  # float64 numbers count as equal if their spread, relative to their size, is smaller


def as_matrix(values: Array, name: str, *, dtype: torch.dtype | None = torch.float64) -> Tensor:
    """Return an array [n] or [n, d] as a detached [n, d] tensor in `dtype` (None keeps that of `values`).

    The tensor shares memory with `values` where it can, also with a read-only memory map: no analysis writes
    to its input. InterpError, which names `name`: more than two dimensions, or no real numbers.
    """
    array = values if isinstance(values, Tensor) else np.asarray(values)
    if array.is_complex() if isinstance(array, Tensor) else array.dtype.kind not in "biuf":
        raise InterpError(f"{name} is {array.dtype}; expected real numbers")
    if array.ndim not in (1, 2):
        raise InterpError(
            f"{name} has shape {tuple(array.shape)}; expected [samples, features]: "
            "flatten or pool the other axes first"
        )
    if not isinstance(array, Tensor):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
            array = torch.as_tensor(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))
    array = array.detach()
    return (array if array.ndim == 2 else array[:, None]).to(dtype or array.dtype)


def as_array(values: Array, name: str) -> np.ndarray:
    """Return the matrix of `as_matrix` as float64 NumPy; InterpError also for NaN and infinity."""
    check_finite(matrix := as_matrix(values, name), name)
    return matrix.cpu().numpy()


def as_alphas(alphas: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the candidate penalties; InterpError where there are none, or one is not positive."""
    found = np.asarray(alphas, dtype=np.float64)
    if not found.size or not (found > 0).all():
        raise InterpError(f"alphas are {found.tolist()}; expected at least one, all positive")
    return found


def as_labels(values: Array | Labels) -> np.ndarray:
    """Return labels or targets as a NumPy array; torch tensors may have any dtype and device."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    values = values.detach().cpu()
    return (values.double() if values.is_floating_point() else values).numpy()


def check_finite(values: Tensor, name: str) -> None:
    """Raise InterpError when `values` holds NaN or infinity."""
    if not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values)).sum())
        raise InterpError(
            f"{name} holds {bad} values that are NaN or infinite; expected finite: drop those rows"
        )
