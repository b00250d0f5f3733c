"""Which places does a patching run visit, and what was the metric at each?

A place is a site, or one of its positions or heads, or a part that the caller names.
Letters: B batch, T tokens, N heads, H head dim, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor

from forge_interp.errors import InterpError, check_kind, fitting

Index = Any
"""An index into a tensor, as in `tensor[index]`."""
Where = str | Sequence[str] | Mapping[str, Index] | None
"""None, "positions", "heads", "neurons", several of them, or {label: index}."""
Metric = Callable[[Any], Tensor | float]
"""Function from the output of the model to one number."""

_DIMS = {
    "positions": {"attn": 2, "module": 1},
    "heads": {"attn": 1},
    "neurons": {"attn": -1, "module": -1},
}


@dataclass(frozen=True)
class PatchingTable:
    """The metric at every place.

    `residual` [sites] is for integrated gradients: the sum of all attributions of a site minus the measured
    effect of patching the whole site; it tends to 0 with many steps.
    """

    values: np.ndarray  # [sites, ...] the metric of the corrupted run with that place patched
    axes: tuple[str, ...]  # "site", then "position", "head", "neuron", "place" or "receiver"
    labels: tuple[tuple[str, ...], ...]  # for each axis
    clean: float  # the metric of the clean run
    corrupted: float  # the metric of the corrupted run
    residual: np.ndarray | None = None

    @property
    def effect(self) -> np.ndarray:
        """`values - corrupted`, in units of the metric."""
        return self.values - self.corrupted

    @property
    def normalized(self) -> np.ndarray:
        """(values - corrupted) / (clean - corrupted): 0 is no effect, 1 brings the clean metric back."""
        if self.clean == self.corrupted:
            raise InterpError(
                f"clean and corrupted metric are {self.clean}; expected two values: read `effect`"
            )
        return self.effect / (self.clean - self.corrupted)

    def top(self, count: int = 10) -> list[tuple[tuple[str, ...], float]]:
        """Return the places with the largest absolute effect, the largest first: [(labels, effect)]."""
        order = np.argsort(-np.abs(self.effect), axis=None, kind="stable")[:count]
        cells = zip(*np.unravel_index(order, self.values.shape), strict=True)
        return [
            (tuple(names[i] for names, i in zip(self.labels, cell, strict=True)), float(self.effect[cell]))
            for cell in cells
        ]


@dataclass(frozen=True)
class Grid:
    """The places within each site: names and labels of the axes after the first axis, the site."""

    axes: tuple[str, ...] = ()
    labels: tuple[tuple[str, ...], ...] = ()
    _indices: tuple[Index, ...] | None = None
    _kinds: tuple[str, ...] = ()

    @classmethod
    def over(cls, activations: Mapping[str, Tensor], where: Where) -> Grid:
        """Apply `where` to captured activations; InterpError where it does not fit all sites."""
        if where is None:
            return cls()
        check_kind("where", where, (str, Sequence, Mapping), f"of {list(_DIMS)}, or {{label: index}}")
        if isinstance(where, Mapping):
            for site, value in activations.items():
                for label, index in where.items():
                    with fitting(value, f"where={{{label!r}: {index!r}}} at {site!r}"):
                        _ = value[index]
            return cls(("place",), (tuple(map(str, where)),), tuple(where.values()))
        kinds = (where,) if isinstance(where, str) else tuple(where)
        if len(set(kinds)) < len(kinds):
            raise InterpError(f"where is {where}; expected each axis once")
        labels = [tuple(map(str, range(_size(kind, activations, 1 + len(kinds))))) for kind in kinds]
        return cls(tuple(kind.removesuffix("s") for kind in kinds), tuple(labels), None, kinds)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of places along each axis."""
        return tuple(map(len, self.labels))

    def cells(self) -> Iterator[tuple[int, ...]]:
        """Iterate over the places, numbers along each axis; one empty tuple if the site is not divided."""
        return product(*map(range, self.shape))

    def index(self, site: str, cell: tuple[int, ...]) -> Index:
        """Return the index of a place into the activation of a site."""
        if self._indices is not None:
            return self._indices[cell[0]]
        dims = [_dim(kind, site) for kind in self._kinds]
        numbers = dict(zip(dims, cell, strict=True))
        front = tuple(numbers.get(dim, slice(None)) for dim in range(max(dims, default=-1) + 1))
        return (*front, ..., numbers[-1]) if -1 in numbers else (*front, ...)

    def table(
        self, values: np.ndarray, sites: Iterable[str], clean: float, corrupted: float, residual: Any = None
    ) -> PatchingTable:
        """Make the table of the metric at these places of the sites."""
        labels = (tuple(sites), *self.labels)
        return PatchingTable(values, ("site", *self.axes), labels, clean, corrupted, residual)

    def sums(self, site: str, values: Tensor) -> np.ndarray:
        """Sum an array of the shape of the site's activation within each place."""
        if self._indices is not None:
            return np.array([values[index].sum().item() for index in self._indices])
        dims = [_dim(kind, site) % values.ndim for kind in self._kinds]
        others = [dim for dim in range(values.ndim) if dim not in dims]
        summed = values.sum(others) if others else values
        return summed.permute([sorted(dims).index(dim) for dim in dims]).cpu().numpy()


def score(metric: Metric, output: Any) -> float:
    """Return the metric as a number; InterpError where it is not a single one."""
    value = apply_metric(metric, output)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise InterpError(f"the metric gave shape {tuple(value.shape)}; expected one number: reduce it")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InterpError(f"the metric gave a {type(value).__name__}; expected one number") from error


def apply_metric(metric: Metric, output: Any) -> Tensor | float:
    """Apply the metric to a model's output; InterpError where the metric expects another type."""
    try:
        return metric(output)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        if isinstance(output, Tensor):
            raise
        fields = f" with {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
        raise InterpError(
            f"the metric raised {error!r}; it is given what the model returns, a {type(output).__name__}"
            f"{fields}: take the tensor from it, as in output.logits"
        ) from error


def at_call(site: str) -> str:
    """Add the number of the first call to a site without a number, whose edits would apply to all calls."""
    return site if "#" in site else f"{site}#0"


def _is_attention(site: str) -> bool:
    return site.partition(":")[2].startswith("attn.")


def _dim(kind: str, site: str) -> int:
    """Return the dimension of one kind of place."""
    if kind not in _DIMS:
        raise InterpError(f"where is {kind!r}; expected of {list(_DIMS)}, or a mapping of labels to indices")
    dim = _DIMS[kind].get("attn" if _is_attention(site) else "module")
    if dim is None:
        raise InterpError(
            f"site {site!r} has no axis of {kind}; expected sites such as 'layers.*.attention:attn.z', or "
            "where={label: index}"
        )
    return dim


def _size(kind: str, activations: Mapping[str, Tensor], num_dims: int) -> int:
    """Return the number of places of a kind; values need `num_dims` dimensions, those of attention 4."""
    sizes = {}
    for site, value in activations.items():
        dim = _dim(kind, site)
        if value.ndim < (4 if _is_attention(site) else num_dims):
            raise InterpError(
                f"site {site!r} has shape {tuple(value.shape)}; expected {kind} along dim {dim} of "
                "[B, T, ..., D], or of [B, N, T, ...] of attention: give where={label: index}"
            )
        sizes[site] = value.shape[dim]
    if len(set(sizes.values())) != 1:
        raise InterpError(f"the sites have {sizes} {kind}; expected one number: call once for each kind")
    return next(iter(sizes.values()))
