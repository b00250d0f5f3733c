"""How similar are the geometries of two layers, by centered kernel alignment with a linear kernel?

Letters: n samples, d features, K = X X^T and L = Y Y^T the [n, n] Gram matrices. HSIC is a dependence
between K and L; CKA = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)), without units, 1 for X = Y up to rotation
and scale.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forge_interp.analysis.accumulate import Accumulator, Moments
from forge_interp.analysis.arrays import ROUNDING, Array, as_matrix, centre, check_finite, same_rows
from forge_interp.errors import InterpError


@dataclass(frozen=True)
class LayerSimilarity:
    """One number for each pair of layers."""

    values: np.ndarray  # [len(rows), len(columns)] float64; NaN where the measure is undefined
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    measure: str  # what the number is, for the title of a plot


def over_pairs(moments: Moments, measure: str, score: Callable[[str, str], float]) -> LayerSimilarity:
    """Apply `score(row, column)` to every pair that `moments` was asked for."""
    values = np.array([[score(row, column) for column in moments.columns] for row in moments.rows])
    return LayerSimilarity(values, tuple(moments.rows), tuple(moments.columns), measure)


def linear_cka(moments: Moments, *, debiased: bool = True) -> LayerSimilarity:
    """Linear CKA of every layer pair: biased in [0, 1], debiased at most 1.

    Biased: |Xc^T Yc|_F^2 / (|Xc^T Xc|_F |Yc^T Yc|_F) with centred columns; exactly the Gram form. It tends
    to 1 for independent data when d is not small beside n. Debiased: each HSIC is the unbiased estimator
    HSIC_1, whose expectation is 0 for independent data; it may be slightly negative and needs n >= 4 (biased:
    2). Both are NaN for a layer that never varies; debiased too where HSIC_1(K, K) = 0: all samples are
    equally far apart (one-hot, say), which tells nothing of their likeness.

    Source: Kornblith et al. 2019, arXiv:1905.00414; HSIC_1: Song et al. 2012, JMLR 13:1393.
    """
    dependence = _unbiased_hsic if debiased else _biased_hsic
    own = {
        name: dependence(moments, name, name) if moments.power(name) > 0 else 0.0
        for name in {*moments.rows, *moments.columns}
    }

    def score(row: str, column: str) -> float:
        if own[row] <= 0 or own[column] <= 0:
            return math.nan
        return dependence(moments, row, column) / math.sqrt(own[row] * own[column])

    return over_pairs(moments, "debiased linear CKA" if debiased else "linear CKA", score)


def _biased_hsic(moments: Moments, first: str, second: str) -> float:
    return moments.comoment(first, second).square().sum().item()


def _unbiased_hsic(moments: Moments, first: str, second: str) -> float:
    """HSIC_1 from sums over features; a shift of the features does not change it.

    With centred columns the rows of K sum to 0, so with the diagonal removed sum(K) = -tr K and row i sums
    to -K_ii.
    """
    n = moments.count
    if n < 4:
        raise InterpError(f"{n} samples were given; expected at least 4 for debiased CKA")
    diagonal = moments.cross_power(first, second)
    traces = moments.power(first) * moments.power(second)
    product = _biased_hsic(moments, first, second) - diagonal
    total = product + traces / ((n - 1) * (n - 2)) - 2 * diagonal / (n - 2)
    return total / (n * (n - 3)) if abs(total) > ROUNDING * (product + diagonal) else 0.0


class MinibatchCKA(Accumulator):
    """Debiased linear CKA of every layer pair from minibatches, in memory O(L^2) whatever the width.

    Sums the unbiased HSIC_1 of each batch: sum_b HSIC_1(K_b, L_b) / sqrt(sum_b HSIC_1(K_b, K_b) sum_b
    HSIC_1(L_b, L_b)). The average over batches of *biased* CKAs stays biased however many batches there are;
    this converges to the CKA of the population. Use `Moments` and `linear_cka` where O(D^2) memory is at
    hand: it is exact for the samples seen, while this depends (slightly) on how they were batched. The layers
    `columns` are by default those of `rows`; Gram matrices are computed on `device`.

    Source: Nguyen et al. 2021, arXiv:2010.15327.
    """

    def __init__(
        self, rows: Iterable[str], columns: Iterable[str] | None = None, *, device: torch.device | str = "cpu"
    ):
        self.rows = tuple(rows)
        self.columns = self.rows if columns is None else tuple(columns)
        self.names = tuple(dict.fromkeys([*self.rows, *self.columns]))
        self._kind = f"layers {list(self.names)}"
        self._sums = torch.zeros(len(self.names), len(self.names), dtype=torch.float64, device=device)

    def update(self, batch: Mapping[str, Array]) -> None:
        """Add one batch, [n, d] per layer, n >= 4; its Gram matrices take 8 L n^2 bytes.

        InterpError where layers are missing, rows differ, n < 4, or a value is NaN or infinite.
        """
        missing = [name for name in self.names if name not in batch]
        if missing:
            raise InterpError(f"batch lacks {missing}; expected all of {list(self.names)}")
        given = {name: as_matrix(batch[name], name) for name in self.names}
        n = same_rows(given)
        if n < 4:
            raise InterpError(f"a batch has {n} rows; expected at least 4 for the unbiased HSIC")
        for name, matrix in given.items():
            check_finite(matrix, name)
        grams = torch.stack([_u_centred_gram(x.to(self._sums.device)).flatten() for x in given.values()])
        self._sums += grams @ grams.T / (n * (n - 3))

    def state(self) -> dict[str, Tensor]:
        """Return {"hsic": [L, L] float64 sums over batches}, a view."""
        return {"hsic": self._sums}

    def _additive(self) -> list[Tensor]:
        return [self._sums]

    def result(self) -> LayerSimilarity:
        """Return the similarities so far; NaN where a layer's summed HSIC with itself is 0."""
        own = self._sums.diagonal()
        if not own.any():
            raise InterpError("no batch in which a layer varies was given; expected update() before result()")
        scale = torch.where(own > 0, own, torch.nan).sqrt()
        values = self._sums / (scale[:, None] * scale)
        rows, columns = ([self.names.index(name) for name in side] for side in (self.rows, self.columns))
        chosen = values[rows][:, columns].cpu().numpy()
        return LayerSimilarity(chosen, self.rows, self.columns, "minibatch debiased linear CKA")


def _u_centred_gram(x: Tensor) -> Tensor:
    """[n, n] U-centred Gram matrix of the rows: HSIC_1 is the mean off-diagonal product of two."""
    n = x.shape[0]
    x = centre(x)
    gram = (x @ x.T).fill_diagonal_(0.0)
    means = gram.sum(0) / (n - 2)
    centred = gram - means[:, None] - means + gram.sum() / ((n - 1) * (n - 2))
    centred.fill_diagonal_(0.0)
    return centred if centred.abs().max() > ROUNDING * x.square().sum(1).max() else centred.zero_()
