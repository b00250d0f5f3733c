"""How can all layer pairs be compared in one pass, in memory that does not grow with the data?

A row x of a block is summed as phi(x) = [1, x, |x|^2]: the sum of phi(x) phi(y)^T over samples holds every
moment of a pair that is needed, and phi of a shifted row is a linear map of phi.
Letters: n samples, L blocks (layers), d features of one block, D features of all blocks.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, product
from typing import Self

import torch
from torch import Tensor

from forge_interp.analysis.arrays import ROUNDING, Array, as_matrix, check_finite
from forge_interp.errors import InterpError

Between = tuple[Iterable[str], Iterable[str]]
_CHUNK_ELEMENTS = 2**20  # float64 numbers converted at a time: 8 MiB


class Moments:
    """Second moments of every pair of blocks, from one pass over the samples, in float64.

    For blocks x, y with rows x_i, y_i and means mu, nu it holds n, mu, the co-moment sum_i
    (x_i-mu)(y_i-nu)^T, and the scalars sum_i |x_i-mu|^2 |y_i-nu|^2 which debiased CKA needs. These suffice
    for CKA, the CCA family, Procrustes, ridge regression and effective rank. Sums are taken around the mean
    of the first chunk, so that large means (outlier features) cancel nothing. Moving the sums to another
    centre is exact, so the states of different ranks can be added.

    Memory: 8 bytes times the sum over pairs of (d_x + 2) (d_y + 2); about 16 MiB more while updating.

    `widths` is the number of features of each block, e.g. {"layers.0": 256, "layers.1": 256}; `between` is
    (rows, columns): only these pairs and each block with itself (default: all). `device` holds the sums.

    Source: Chan, Golub and LeVeque 1983, Am. Stat. 37:242 (shifted sums, and how sums of parts are merged).
    """

    def __init__(
        self,
        widths: Mapping[str, int],
        *,
        between: Between | None = None,
        device: torch.device | str = "cpu",
    ):
        self.widths, self.names = dict(widths), list(widths)
        if not self.widths or min(self.widths.values()) < 1:
            raise InterpError(
                f"widths are {self.widths}; expected {{name: features, at least 1}}, one or more blocks"
            )
        self.rows, self.columns = (list(side) for side in between or (self.names, self.names))
        if unknown := [name for name in (*self.rows, *self.columns) if name not in self.widths]:
            raise InterpError(f"between names {unknown}; expected blocks of widths: {self.names}")
        ends = dict(zip(self.names, accumulate(self.widths.values()), strict=True))
        self._spans = {name: slice(end - self.widths[name], end) for name, end in ends.items()}
        asked = [*zip(self.names, self.names, strict=True), *product(self.rows, self.columns)]
        pairs = dict.fromkeys(tuple(sorted(pair, key=self.names.index)) for pair in asked)
        shapes = [(self.widths[a] + 2, self.widths[b] + 2) for a, b in pairs]
        sizes = [math.prod(shape) for shape in shapes]
        self._centre, self._products = (
            torch.zeros(size, dtype=torch.float64, device=device)
            for size in (sum(self.widths.values()), sum(sizes))
        )
        parts = map(Tensor.view, self._products.split(sizes), shapes)
        self._blocks = dict(zip(pairs, parts, strict=True))

    @classmethod
    def of(cls, blocks: Mapping[str, Array], *, between: Between | None = None) -> "Moments":
        """Build the moments of arrays [n, d] in memory, on the device of the first array."""
        given = {name: as_matrix(x, name, dtype=None) for name, x in blocks.items()}
        device = next((x.device for x in given.values()), "cpu")
        moments = cls({name: x.shape[1] for name, x in given.items()}, between=between, device=device)
        moments.update(given)
        return moments

    def update(self, batch: Mapping[str, Array]) -> None:
        """Add samples, [n, d] per block, all with the same rows; any float dtype, torch or numpy.

        InterpError, with nothing added: blocks missing or unknown, widths or rows differ, NaN or infinity.
        """
        if set(batch) != set(self.widths):
            raise InterpError(f"batch has {sorted(batch)}; expected {sorted(self.widths)}")
        given = {name: as_matrix(batch[name], name, dtype=None) for name in self.widths}
        for name, matrix in given.items():
            if matrix.shape[1] != self.widths[name]:
                text = f"{name} has {matrix.shape[1]} features; expected {self.widths[name]}, as in widths"
                raise InterpError(text)
            check_finite(matrix, name)
        rows = {name: len(matrix) for name, matrix in given.items()}
        if len(set(rows.values())) > 1:
            text = f"rows are {rows}; expected one number: every array holds the same samples in order"
            raise InterpError(text)
        step = max(1, _CHUNK_ELEMENTS // len(self._centre))
        for start in range(0, rows[self.names[0]], step):
            self._add({name: matrix[start : start + step] for name, matrix in given.items()})

    def state(self) -> dict[str, Tensor]:
        """Return the sums as plain float64 tensors (views, not copies): to save, to send."""
        return {"centre": self._centre, "products": self._products}

    def load_state(self, state: Mapping[str, Tensor]) -> Self:
        """Copy a state of the same blocks and pairs into this object, and return the object.

        InterpError, with nothing copied, where a tensor is missing or has another shape.
        """
        mine = self.state()
        for name, tensor in mine.items():
            if name not in state or state[name].shape != tensor.shape:
                shape = tuple(state[name].shape) if name in state else "nothing"
                raise InterpError(f"state {name!r} has {shape}; expected shape {tuple(tensor.shape)}")
        for name, tensor in mine.items():
            tensor.copy_(state[name])
        return self

    def merge(self, other: Self) -> Self:
        """Add the samples of `other`, of the same blocks and pairs, in place, and return this object."""
        if (other.widths, other._blocks.keys()) != (self.widths, self._blocks.keys()):
            raise InterpError(
                f"cannot merge {other.widths} into {self.widths}; expected the same blocks, pairs"
            )
        twin = copy.deepcopy(self).load_state(other.state())
        total = self._total() + twin._total()
        for each in (self, twin):
            each._move_to(total[1:] / total[0].clamp_min(1))
        self._products += twin._products
        return self

    def all_reduce(self, add: Callable[[Tensor], object] | None = None) -> Self:
        """Replace the samples of this rank by the samples of all ranks, in place. Collective.

        `add` replaces a tensor by its sum over ranks, in place; default `torch.distributed.all_reduce`.
        """
        add = torch.distributed.all_reduce if add is None else add
        add(total := self._total())
        self._move_to(total[1:] / total[0].clamp_min(1))
        add(self._products)
        return self

    @property
    def count(self) -> int:
        """The number of samples that were added."""
        return round(self._count.item())

    def mean(self, name: str) -> Tensor:
        """Return the mean of a block, [d] float64; InterpError if no sample was added."""
        if self.count == 0:
            raise InterpError("0 samples were given; expected at least 1: call update() first")
        return self._centre[self._spans[name]] + self._blocks[name, name][0, 1:-1] / self._count

    def comoment(self, first: str, second: str) -> Tensor:
        """Return sum_i (x_i - mean x)(y_i - mean y)^T, [d_x, d_y] float64: n - 1 times the covariance.

        The result is a copy. InterpError: no such pair in `between`, fewer than 2 samples, or an overflow.
        """
        return self._centred(first, second)[1:-1, 1:-1].clone()

    def power(self, name: str) -> float:
        """Return sum_i |x_i - mean x|^2, the trace of the co-moment; 0 if constant to rounding."""
        power = self._centred(name, name)[0, -1].item()
        size = self._count.item() * self._centre[self._spans[name]].square().sum().item()
        return power if power > ROUNDING**2 * size else 0.0

    def cross_power(self, first: str, second: str) -> float:
        """Return sum_i |x_i - mean x|^2 |y_i - mean y|^2."""
        return self._centred(first, second)[-1, -1].item()

    @property
    def _count(self) -> Tensor:
        return next(iter(self._blocks.values()))[0, 0]

    def _total(self) -> Tensor:
        """Return the number of samples and the sum of each feature: they give the mean over all ranks."""
        sums = torch.cat([self._blocks[name, name][0, 1:-1] for name in self.names])
        return torch.cat([self._count[None], sums + self._count * self._centre])

    def _add(self, chunk: Mapping[str, Tensor]) -> None:
        made: dict[str, Tensor] = {}
        is_first = not self._count
        for name, rows in chunk.items():
            x, centre = rows.to(self._centre), self._centre[self._spans[name]]
            if is_first:
                centre.copy_(x.mean(0))
            x = x - centre
            square = x.square().sum(1, keepdim=True)
            made[name] = torch.cat([torch.ones_like(square), x, square], dim=1)
        for (a, b), block in self._blocks.items():
            block.addmm_(made[a].T, made[b])

    def _centred(self, first: str, second: str) -> Tensor:
        """Return the sum of phi(x) phi(y)^T around the means, [d_x + 2, d_y + 2]: a view until `update`."""
        if self.count < 2:
            raise InterpError(f"{self.count} samples were given; expected at least 2")
        own = [self._blocks[name, name] for name in self.names]
        if any(bool(block[0, 1:-1].any()) for block in own):
            self._move_to(torch.cat([self.mean(name) for name in self.names]))
            for block in self._blocks.values():  # sums around the mean are 0, but for rounding
                block[0, 1:-1] = block[1:-1, 0] = 0.0
        check_finite(torch.stack([block[0, -1] for block in own]), "the accumulated squared norms")
        if (first, second) in self._blocks:
            return self._blocks[first, second]
        if (second, first) in self._blocks:
            return self._blocks[second, first].T
        raise InterpError(
            f"the pair {first!r}, {second!r} was not accumulated; expected one of `between`: add it there"
        )

    def _move_to(self, centre: Tensor) -> None:
        """Express every sum around `centre`: an exact expansion of the products, no second pass."""
        shift = centre - self._centre
        for (a, b), block in self._blocks.items():
            for side, name in ((block, a), (block.T, b)):  # phi(x - s) from phi(x)
                one, x, square, s = side[0], side[1:-1], side[-1], shift[self._spans[name]]
                square += (s @ s) * one - 2 * (s @ x)
                x -= torch.outer(s, one)
        self._centre.copy_(centre)
