"""How large, how low-dimensional and how peaked are the activations of a layer?

Letters: n samples, d features.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forge_interp.analysis.accumulate import Accumulator, Moments, checked_batch
from forge_interp.analysis.arrays import Array
from forge_interp.errors import InterpError


@dataclass(frozen=True)
class EffectiveRank:
    """How many directions a layer uses, three ways; each is between 1 and d."""

    entropy: float  # exp of the entropy of the normalized singular values of the centred [n, d] activations
    participation: float  # (sum of covariance eigenvalues)^2 / sum of their squares
    components_99: int  # principal components that explain 99 % of the variance


def effective_rank(moments: Moments, name: str) -> EffectiveRank:
    """Effective rank of one layer from its accumulated moments; at most n - 1 directions can show.

    Source: entropy: Roy and Vetterli 2007, EUSIPCO 606; participation: Gao et al. 2017, bioRxiv 214262.
    """
    if moments.power(name) == 0:
        raise InterpError(f"{name!r} never varies; expected a layer with variance")
    values = torch.linalg.eigvalsh(moments.comoment(name, name)).flip(0)
    rounding = len(values) * torch.finfo(values.dtype).eps * values[0]
    values = torch.where(values > rounding, values, 0.0)
    singular = values.sqrt() / values.sqrt().sum()
    entropy = -torch.special.xlogy(singular, singular).sum()
    share = values.cumsum(0) / values.sum()
    return EffectiveRank(
        entropy=entropy.exp().item(),
        participation=(values.sum().square() / values.square().sum()).item(),
        components_99=int((share < 0.99).sum()) + 1,
    )


@dataclass(frozen=True)
class NormProfile:
    """Sizes of the activations x_i of one layer, in the units of the activations.

    kurtosis is the fourth moment over the squared second moment, about 0 (3 for a centred normal; no units);
    NaN for a feature that is always 0.
    """

    mean_norm: float  # over samples, of |x_i|_2
    std_norm: float
    max_norm: float
    rms: np.ndarray  # [d] root mean square of each feature
    max_abs: np.ndarray  # [d]
    kurtosis: np.ndarray  # [d]
    outlier_share: np.ndarray  # [d] share of samples in which the magnitude reaches the threshold

    def outliers(self, *, min_share: float = 0.06) -> np.ndarray:
        """Return the indices of features that reach the threshold in at least `min_share` of the samples.

        Source: Dettmers et al. 2022, arXiv:2208.07339 (magnitude 6, 6 % of sequence positions).
        """
        return np.flatnonzero(self.outlier_share >= min_share)


class Profile(Accumulator):
    """One-pass norm and outlier profile of several layers, in float64 and O(d) memory.

    `widths` are the features of each layer, `threshold` the magnitude from which an activation counts as an
    outlier, in units of the activations.
    """

    def __init__(
        self, widths: Mapping[str, int], *, threshold: float = 6.0, device: torch.device | str = "cpu"
    ):
        self.widths, self.threshold = dict(widths), threshold
        self._kind = f"a profile of {self.widths} with threshold {threshold}"
        self._sums = {
            name: torch.zeros(3 + 3 * width, dtype=torch.float64, device=device)
            for name, width in self.widths.items()
        }
        self._tops = {name: torch.zeros_like(sums[: sums.numel() // 3]) for name, sums in self._sums.items()}
        self._centres = {name: torch.zeros_like(sums[:1]) for name, sums in self._sums.items()}

    def update(self, batch: Mapping[str, Array]) -> None:
        """Add samples, [n, d] per layer; layers may have different n. Raises as `checked_batch`."""
        for name, x in checked_batch(batch, self.widths).items():
            if len(x):
                self._add(name, x.to(self._sums[name].device, torch.float64).abs())

    def state(self) -> dict[str, Tensor]:
        """Return float64 views for each layer: "name/sums", maxima "name/tops", "name/centre" of norms."""
        parts = {"sums": self._sums, "tops": self._tops, "centre": self._centres}
        return {f"{name}/{part}": tensors[name] for part, tensors in parts.items() for name in self.widths}

    def result(self, name: str) -> NormProfile:
        """Return the profile of one layer; raise InterpError before the first sample."""
        sums, tops = self._sums[name].cpu().numpy(), self._tops[name].cpu().numpy().copy()
        count, norms, power = sums[:3]
        if count == 0:
            raise InterpError(f"{name!r} has no samples; expected update() before result()")
        second, fourth, reached = np.split(sums[3:] / count, 3)
        return NormProfile(
            mean_norm=float(self._centres[name].item() + norms / count),
            std_norm=float(np.sqrt(max(power / count - (norms / count) ** 2, 0))),
            max_norm=float(tops[0]),
            rms=np.sqrt(second),
            max_abs=tops[1:],
            kurtosis=fourth / np.where(second > 0, second, np.nan) ** 2,
            outlier_share=reached,
        )

    def _add(self, name: str, x: Tensor) -> None:
        """Add magnitudes [n, d]: n, norms, their squares; squares, fourth powers, outliers by feature."""
        squares = x.square()
        norms = squares.sum(1).sqrt()
        sums, centre = self._sums[name], self._centres[name]
        if sums[0] == 0:
            centre.copy_(norms.mean())
        rest = norms - centre
        head = torch.stack([rest.new_tensor(len(x)), rest.sum(), rest.square().sum()])
        reached = (x >= self.threshold).to(x.dtype).sum(0)
        sums += torch.cat([head, squares.sum(0), squares.square().sum(0), reached])
        tops = torch.cat([norms.max()[None], x.amax(0)])
        self._tops[name].copy_(torch.maximum(self._tops[name], tops))

    def _total(self) -> Tensor:
        """[L, 2] number of samples, and sum of their norms."""
        sums = torch.stack([sums[:2] for sums in self._sums.values()])
        sums[:, 1:] += sums[:, :1] * torch.stack(list(self._centres.values()))
        return sums

    def _recentre(self, total: Tensor) -> None:
        for (count, norm), sums, centre in zip(
            total, self._sums.values(), self._centres.values(), strict=True
        ):
            mean = norm / count.clamp_min(1)
            shift = mean - centre[0]
            sums[2] += sums[0] * shift.square() - 2 * shift * sums[1]
            sums[1] -= sums[0] * shift
            centre.fill_(mean)

    def _additive(self) -> list[Tensor]:
        return list(self._sums.values())

    def _maxima(self) -> list[Tensor]:
        return list(self._tops.values())
