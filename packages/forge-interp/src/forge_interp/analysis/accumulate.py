"""How can all layer pairs be compared in one pass, in memory that does not grow with the data?

Letters: n samples, L blocks (layers), d features of one block, D features of all blocks, P numbers in all
pairs.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Self

import torch
from torch import Tensor

from forge_interp.analysis.arrays import ROUNDING, Array, as_matrix, check_finite
from forge_interp.errors import InterpError

_CHUNK_ELEMENTS = 2**20  # float64 numbers converted at a time: 8 MiB


class Moments:
    """Second moments of every pair of blocks, from one pass over the samples, in float64.

    For blocks x, y with rows x_i, y_i and means mu, nu it holds n, mu, the co-moment sum_i
    (x_i-mu)(y_i-nu)^T, and the scalars sum_i |x_i-mu|^2 |y_i-nu|^2 which debiased CKA needs. That is enough
    for CKA, the CCA family, Procrustes, ridge regression and effective rank. Sums are taken around the mean
    of the first chunk, so that large means (outlier features) cancel nothing; moving them to another centre
    is exact, which is what makes states of different ranks addable.

    Memory: 8 bytes times sum over pairs of d_x d_y, and 8 L D; about 16 MiB more while updating.

    `widths` are the features of each block, e.g. {"layers.0": 256, "layers.1": 256}; `between` is (rows,
    columns): only these pairs, and each block with itself (default: all); the sums live on `device`.

    Source: Chan, Golub and LeVeque 1983, Am. Stat. 37:242 (shifted sums, and merging those of parts).
    """

    def __init__(
        self,
        widths: Mapping[str, int],
        *,
        between: tuple[Iterable[str], Iterable[str]] | None = None,
        device: torch.device | str = "cpu",
    ):
        self.widths = dict(widths)
        if not self.widths or min(self.widths.values()) < 1:
            raise InterpError(
                f"widths are {self.widths}; expected {{name: features, at least 1}}, one or more blocks"
            )
        self.names = list(self.widths)
        self.rows, self.columns = self._sides(between)
        ends = list(itertools.accumulate(self.widths.values()))
        self._spans = {
            name: slice(end - width, end)
            for (name, width), end in zip(self.widths.items(), ends, strict=True)
        }
        self._index = {name: i for i, name in enumerate(self.names)}
        pairs = itertools.chain(
            zip(self.names, self.names, strict=True), itertools.product(self.rows, self.columns)
        )
        self._pairs = list(dict.fromkeys(tuple(sorted(pair, key=self._index.__getitem__)) for pair in pairs))
        total, blocks = ends[-1], len(self.names)
        shapes = [(self.widths[a], self.widths[b]) for a, b in self._pairs]
        sizes = [rows * columns for rows, columns in shapes]

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self._count, self._centre, self._sums = zeros(1), zeros(total), zeros(total)
        self._power, self._cross_power = zeros(blocks), zeros(blocks, blocks)
        self._skew = zeros(blocks, total)
        self._products = zeros(sum(sizes))
        parts = map(Tensor.view, self._products.split(sizes), shapes)
        self._blocks = dict(zip(self._pairs, parts, strict=True))

    @classmethod
    def of(
        cls, blocks: Mapping[str, Array], *, between: tuple[Iterable[str], Iterable[str]] | None = None
    ) -> "Moments":
        """Build from whole arrays, each [n, d]; the device is that of the first."""
        given = {name: as_matrix(x, name, dtype=None) for name, x in blocks.items()}
        device = next((x.device for x in given.values()), "cpu")
        moments = cls({name: x.shape[1] for name, x in given.items()}, between=between, device=device)
        moments.update(given)
        return moments

    def update(self, batch: Mapping[str, Array]) -> None:
        """Add samples, [n, d] per block, all with the same rows; any float dtype, torch or numpy.

        Raises InterpError, and adds nothing then: blocks are missing or unknown, widths or row counts differ,
        or a value is NaN or infinite.
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
        num_rows = rows[self.names[0]]
        step = max(1, _CHUNK_ELEMENTS // self._centre.numel())
        for start in range(0, num_rows, step):
            self._add([matrix[start : start + step] for matrix in given.values()])

    def state(self) -> dict[str, Tensor]:
        """Return the sums as plain float64 tensors (views, not copies): to save, to send, to add up."""
        return {
            "count": self._count,
            "centre": self._centre,
            "sums": self._sums,
            "power": self._power,
            "cross_power": self._cross_power,
            "skew": self._skew,
            "products": self._products,
        }

    def load_state(self, state: Mapping[str, Tensor]) -> Self:
        """Copy a state of the same blocks and pairs into this one, all of it or nothing, and return this one.

        Raises InterpError: a tensor is missing, or has another shape.
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
        """Add the samples of `other`, of the same blocks and pairs, in place, and return this one."""
        if (other.widths, other._pairs) != (self.widths, self._pairs):
            raise InterpError(
                f"cannot merge {other.widths} into {self.widths}; expected the same blocks, pairs"
            )
        twin = copy.deepcopy(self).load_state(other.state())
        total = self._total() + twin._total()
        for each in (self, twin):
            each._move_to(total[1:] / total[0].clamp_min(1))
        for mine, theirs in zip(self._additive(), twin._additive(), strict=True):
            mine += theirs
        return self

    def all_reduce(self, add: Callable[[Tensor], object] | None = None) -> Self:
        """Replace the samples of this rank by those of all ranks, in place. Collective.

        `add` replaces a tensor by its sum over ranks, in place; default `torch.distributed.all_reduce`.
        """
        add = torch.distributed.all_reduce if add is None else add
        add(total := self._total())
        self._move_to(total[1:] / total[0].clamp_min(1))
        for tensor in self._additive():
            add(tensor)
        return self

    @property
    def count(self) -> int:
        """Samples seen."""
        return round(self._count.item())

    def mean(self, name: str) -> Tensor:
        """Return the mean of a block, [d] float64; InterpError if no sample was given."""
        if self.count == 0:
            raise InterpError("0 samples were given; expected at least 1: call update() first")
        span = self._spans[name]
        return self._centre[span] + self._sums[span] / self._count

    def comoment(self, first: str, second: str) -> Tensor:
        """Return sum_i (x_i - mean x)(y_i - mean y)^T, [d_x, d_y] float64; divide by n - 1 for a covariance.

        A copy. InterpError: the pair is not `between`, there are fewer than 2 samples, or squares overflowed.
        """
        return self._centred(first, second).clone()

    def power(self, name: str) -> float:
        """Return sum_i |x_i - mean x|^2, the trace of the co-moment; 0 if constant to rounding."""
        self._centre_exactly()
        power = self._power[self._index[name]].item()
        size = self._count.item() * self._centre[self._spans[name]].square().sum().item()
        return power if power > ROUNDING**2 * size else 0.0

    def cross_power(self, first: str, second: str) -> float:
        """Return sum_i |x_i - mean x|^2 |y_i - mean y|^2."""
        self._centred(first, second)
        return self._cross_power[self._index[first], self._index[second]].item()

    def _centred(self, first: str, second: str) -> Tensor:
        """[d_x, d_y] co-moment: a view of the sums, good until the next update."""
        self._centre_exactly()
        if (first, second) in self._blocks:
            return self._blocks[first, second]
        if (second, first) in self._blocks:
            return self._blocks[second, first].T
        raise InterpError(
            f"the pair {first!r}, {second!r} was not accumulated; expected one of `between`: add it there"
        )

    def _sides(self, between: tuple[Iterable[str], Iterable[str]] | None) -> tuple[list[str], list[str]]:
        rows, columns = (list(side) for side in between) if between else (self.names, self.names)
        unknown = [name for name in [*rows, *columns] if name not in self.widths]
        if unknown:
            raise InterpError(f"between names {unknown}; expected blocks of widths: {self.names}")
        return list(rows), list(columns)

    def _total(self) -> Tensor:
        """The number of samples, and the sum of each feature: together they give the mean over all ranks."""
        return torch.cat([self._count, self._sums + self._count * self._centre])

    def _additive(self) -> list[Tensor]:
        return [tensor for name, tensor in self.state().items() if name != "centre"]

    def _add(self, chunk: list[Tensor]) -> None:
        device = self._centre.device
        x = torch.cat([part.to(device, torch.float64) for part in chunk], dim=1)
        if self._count.item() == 0:
            self._centre.copy_(x.mean(0))
        x -= self._centre
        power = torch.stack([x[:, span].square().sum(1) for span in self._spans.values()], dim=1)
        self._count += x.shape[0]
        self._sums += x.sum(0)
        self._power += power.sum(0)
        self._cross_power.addmm_(power.T, power)
        self._skew.addmm_(power.T, x)
        for (a, b), block in self._blocks.items():
            block.addmm_(x[:, self._spans[a]].T, x[:, self._spans[b]])

    def _centre_exactly(self) -> None:
        if self.count < 2:
            raise InterpError(f"{self.count} samples were given; expected at least 2")
        if self._sums.abs().max() > 0:
            self._move_to(self._centre + self._sums / self._count)
            self._sums.zero_()
        check_finite(self._power, "the accumulated squared norms")

    def _move_to(self, centre: Tensor) -> None:
        """Express every sum around `centre`: an exact expansion of the products, no second pass."""
        shift = centre - self._centre
        n, old_power = self._count, self._power.clone()
        along = {name: self._sums[s] @ shift[s] for name, s in self._spans.items()}
        size = {name: shift[s] @ shift[s] for name, s in self._spans.items()}
        for (a, b), block in self._blocks.items():
            i, j, sa, sb = self._index[a], self._index[b], self._spans[a], self._spans[b]
            da, db, power_a, power_b = shift[sa], shift[sb], old_power[i], old_power[j]
            forward, backward = block.T @ da, block @ db
            self._cross_power[i, j] += (
                size[b] * power_a + size[a] * power_b + 4 * (forward @ db) + n[0] * size[a] * size[b]
                - 2 * (self._skew[i, sb] @ db + self._skew[j, sa] @ da)
                - 2 * (size[b] * along[a] + size[a] * along[b])
            )  # fmt: skip
            self._cross_power[j, i] = self._cross_power[i, j]
        for (a, b), block in self._blocks.items():
            i, j, sa, sb = self._index[a], self._index[b], self._spans[a], self._spans[b]
            da, db = shift[sa], shift[sb]
            forward, backward = block.T @ da, block @ db
            self._skew[i, sb] += (
                size[a] * self._sums[sb] - 2 * forward + (2 * along[a] - old_power[i] - n * size[a]) * db
            )
            if i != j:
                self._skew[j, sa] += (
                    size[b] * self._sums[sa] - 2 * backward + (2 * along[b] - old_power[j] - n * size[b]) * da
                )
            block -= torch.outer(self._sums[sa], db) + torch.outer(da, self._sums[sb])
            block += n * torch.outer(da, db)
        for i, name in enumerate(self.names):
            self._power[i] += n[0] * size[name] - 2 * along[name]
        self._sums -= n * shift
        self._centre.copy_(centre)
