"""How similar are two sets of layers, in one call? Letters: n samples, d features."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from forge_interp.analysis.accumulate import Moments
from forge_interp.analysis.arrays import Array, as_matrix, check_finite
from forge_interp.analysis.cca import mean_cca, procrustes, pwcca, svcca
from forge_interp.analysis.cka import LayerSimilarity, linear_cka
from forge_interp.errors import InterpError

MEASURES: Mapping[str, Callable[[Moments], LayerSimilarity]] = {
    "cka": linear_cka,
    "cka_biased": lambda moments: linear_cka(moments, debiased=False),
    "mean_cca": mean_cca,
    "svcca": svcca,
    "pwcca": pwcca,
    "procrustes": procrustes,
}
_BLOCK_ROWS = 1024


def compare_layers(
    first: Mapping[str, Array],
    second: Mapping[str, Array] | None = None,
    *,
    measure: str = "cka",
    project: int | None = None,
    seed: int = 0,
) -> LayerSimilarity:
    """Compare every layer of one model with every layer of another (or of itself), from whole arrays.

    For data that does not fit into memory, or several measures at once, feed `Moments` batch by batch and
    call the measures on it: this function gives the same. A layer wider than there are samples is rotated
    into the n dimensions that its samples span, which changes no measure: costs go with min(n, d).

    `first` and `second` (default `first`) are {layer: [n, d]}, rows and columns of the result, with the same
    samples in the same order. `measure` is "cka" (debiased), "cka_biased", "mean_cca", "svcca", "pwcca" or
    "procrustes". `project` brings wider layers to this many random directions of `seed` first: an inner
    product of two samples is then off by about their norms' product / sqrt(project).
    """
    if measure not in MEASURES:
        raise InterpError(f"measure is {measure!r}; expected one of {list(MEASURES)}")
    left = {f"0/{name}": array for name, array in first.items()}
    right = left if second is None else {f"1/{name}": array for name, array in second.items()}
    layers: dict[str, Tensor] = {}
    rotations: dict[str, Tensor] = {}
    for name, array in {**left, **right}.items():
        x = as_matrix(array, name[2:])
        check_finite(x, name[2:])
        if project is not None and x.shape[1] > project:
            x = _projected(x, project, seed)
        if x.shape[1] > x.shape[0]:
            rotations[name], triangle = torch.linalg.qr(x.T)
            x = triangle.T
        layers[name] = x
    moments = Moments.of(layers, between=(left, right))
    found = pwcca(moments, rotations=rotations) if measure == "pwcca" else MEASURES[measure](moments)
    return LayerSimilarity(found.values, tuple(first), tuple(second or first), found.measure)


def _projected(x: Tensor, width: int, seed: int) -> Tensor:
    """[n, width] products with random normal directions; inner products of rows are kept in expectation."""
    random = torch.Generator().manual_seed(seed)
    out = x.new_zeros(x.shape[0], width)
    for part in x.split(_BLOCK_ROWS, dim=1):
        out += part @ torch.randn(part.shape[1], width, generator=random, dtype=x.dtype).to(x.device)
    return out / width**0.5
