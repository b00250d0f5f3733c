"""How do arrays come into the analyses?

Every analysis takes torch tensors (any device, any float dtype, bfloat16 too) or numpy arrays, and computes
in float64. Letters: n samples (rows), d features (columns).
"""

import math
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from forge_interp.errors import InterpError

Array = Tensor | np.ndarray
Labels = np.ndarray | Sequence[object]
ROUNDING = 1e-13  # spread beside size below which float64 numbers are taken to be equal


def as_matrix(values: Array, name: str, *, dtype: torch.dtype | None = torch.float64) -> Tensor:
    """Give a detached [n, d] tensor of an array [n] or [n, d], in `dtype` (None keeps that of `values`).

    Raises InterpError, which calls it `name`: more than two dimensions, or not real numbers.
    """
    tensor = as_real(values, name)
    if tensor.ndim not in (1, 2):
        raise InterpError(
            f"{name} has shape {tuple(tensor.shape)}; expected [samples, features]: "
            "flatten or pool the other axes first"
        )
    tensor = tensor if tensor.ndim == 2 else tensor[:, None]
    return tensor if dtype is None else tensor.to(dtype)


def as_real(values: Array, name: str) -> Tensor:
    """Give a detached tensor of any shape, which shares memory with `values` where that can be.

    That holds for a read-only memory map too: no analysis writes to its input. InterpError for complex
    numbers, strings or objects.
    """
    array = values if isinstance(values, Tensor) else np.asarray(values)
    if array.is_complex() if isinstance(array, Tensor) else array.dtype.kind not in "biuf":
        raise InterpError(f"{name} is {array.dtype}; expected real numbers")
    if isinstance(array, Tensor):
        return array.detach()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.as_tensor(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))


def as_labels(values: Array | Labels) -> np.ndarray:
    """Give labels or targets as a numpy array, torch ones (bfloat16 and device tensors too) copied."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    values = values.detach().cpu()
    return (values.double() if values.is_floating_point() else values).numpy()


def centre(x: Tensor, dim: int = 0) -> Tensor:
    """Subtract the mean over `dim`; exactly 0 where the numbers are equal up to rounding.

    Without that, n copies of 0.1 keep residues around 1e-17, whose correlation is an arbitrary number.
    """
    rest = x - x.mean(dim, keepdim=True)
    if x.shape[dim] == 0:
        return rest
    equal = rest.abs().amax(dim, keepdim=True) <= ROUNDING * x.abs().amax(dim, keepdim=True)
    return rest.masked_fill(equal, 0.0)


def same_rows(matrices: Mapping[str, Tensor]) -> int:
    """Return the number of rows that all matrices share; InterpError where they differ, or there is none."""
    rows = {name: matrix.shape[0] for name, matrix in matrices.items()}
    if len(set(rows.values())) != 1:
        raise InterpError(
            f"rows are {rows}; expected one number: every array holds the same samples in order"
        )
    return next(iter(rows.values()))


def check_finite(values: Tensor, name: str) -> None:
    """Raise InterpError when `values` holds NaN or infinity."""
    if not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values)).sum())
        raise InterpError(
            f"{name} holds {bad} values that are NaN or infinite; expected finite: drop those rows"
        )


def check_alphas(alphas: Sequence[float] | np.ndarray) -> list[float]:
    """Return the ridge penalties as floats; raise InterpError unless all are positive and finite."""
    values = [float(alpha) for alpha in alphas]
    if not values or not all(0 < alpha < math.inf for alpha in values):
        raise InterpError(
            f"alphas are {values}; expected at least one, all positive: e.g. np.logspace(-2, 5, 8)"
        )
    return values
