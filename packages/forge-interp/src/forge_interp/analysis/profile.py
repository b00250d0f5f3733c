"""How large, how low-dimensional and how peaked are the activations of a layer?

Letters: n samples, d features.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forge_interp.analysis.accumulate import Moments
from forge_interp.analysis.arrays import Array, as_matrix, check_finite, copy_state
from forge_interp.errors import InterpError


@dataclass(frozen=True)
class EffectiveRank:
    """How many directions a layer uses, three ways; each is between 1 and d.

    Attributes:
        entropy: exp of the entropy of the normalized singular values of the centred [n, d] activations.
        participation: (sum of covariance eigenvalues)^2 / sum of their squares.
        components_99: principal components that explain 99 % of the variance.
    """

    entropy: float
    participation: float
    components_99: int


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
    """Sizes of the activations of one layer, in the units of the activations.

    Attributes:
        mean_norm: mean over samples of |x_i|_2.
        std_norm: standard deviation over samples of |x_i|_2.
        max_norm: largest |x_i|_2.
        rms: [d] root mean square of each feature.
        max_abs: [d] largest magnitude of each feature.
        kurtosis: [d] fourth moment over squared second moment, about 0, of each feature (3 for a centred
            normal; no units); NaN for a feature that is always 0.
        outlier_share: [d] share of samples in which the magnitude reaches the threshold.
    """

    mean_norm: float
    std_norm: float
    max_norm: float
    rms: np.ndarray
    max_abs: np.ndarray
    kurtosis: np.ndarray
    outlier_share: np.ndarray

    def outliers(self, *, min_share: float = 0.06) -> np.ndarray:
        """Return the indices of features that reach the threshold in at least `min_share` of the samples.

        Source: Dettmers et al. 2022, arXiv:2208.07339 (magnitude 6, 6 % of sequence positions).
        """
        return np.flatnonzero(self.outlier_share >= min_share)


class Profile:
    """One-pass norm and outlier profile of several layers, in float64 and O(d) memory.

    Args:
        widths: features of each layer.
        threshold: magnitude from which an activation counts as an outlier, in units of the activations.
        device: where the sums live.
    """

    def __init__(
        self, widths: Mapping[str, int], *, threshold: float = 6.0, device: torch.device | str = "cpu"
    ):
        self.widths, self.threshold = dict(widths), threshold
        self._sums = {
            name: torch.zeros(3 + 3 * width, dtype=torch.float64, device=device)
            for name, width in self.widths.items()
        }
        self._tops = {name: torch.zeros_like(sums[: sums.numel() // 3]) for name, sums in self._sums.items()}
        self._centres = {name: torch.zeros_like(sums[:1]) for name, sums in self._sums.items()}

    def update(self, batch: Mapping[str, Array]) -> None:
        """Add samples, [n, d] per layer; layers may have different n.

        InterpError where layers are missing or unknown, a width differs, or a value is not finite.
        """
        if set(batch) != set(self.widths):
            raise InterpError(f"batch has layers {sorted(batch)}; expected {sorted(self.widths)}")
        given = {name: as_matrix(values, name, dtype=None) for name, values in batch.items()}
        for name, x in given.items():
            if x.shape[1] != self.widths[name]:
                raise InterpError(f"{name} has {x.shape[1]} features; expected {self.widths[name]}")
            check_finite(x, name)
        for name, x in given.items():
            if len(x):
                self._add(name, x.to(self._sums[name].device, torch.float64).abs())

    def merge(self, other: "Profile") -> "Profile":
        """Add the samples of `other`, in place, and return this one."""
        if (other.widths, other.threshold) != (self.widths, self.threshold):
            raise InterpError(
                f"cannot merge a profile of {other.widths} into {self.widths}; expected the same"
            )
        twin = Profile(self.widths, threshold=self.threshold).load_state(other.state())
        for name, sums in self._sums.items():
            if sums[0] == 0:
                self._centres[name].copy_(twin._centres[name])
            twin._move_to(name, self._centres[name].cpu())
            sums += twin._sums[name].to(sums.device)
            self._tops[name].copy_(torch.maximum(self._tops[name], twin._tops[name].to(sums.device)))
        return self

    def all_reduce(
        self, add: Callable[[Tensor], object] | None = None, maximum: Callable[[Tensor], object] | None = None
    ) -> "Profile":
        """Combine all ranks, in place. Collective.

        `add` and `maximum` replace a tensor by its sum and maximum over ranks; default
        `torch.distributed.all_reduce`.
        """
        dist = torch.distributed
        add = dist.all_reduce if add is None else add
        for name, sums in self._sums.items():
            total = torch.stack([sums[0], sums[1] + sums[0] * self._centres[name][0]])
            add(total)
            self._move_to(name, total[1:] / total[0].clamp_min(1))
            add(sums)
            if maximum is None:
                dist.all_reduce(self._tops[name], op=dist.ReduceOp.MAX)
            else:
                maximum(self._tops[name])
        return self

    def state(self) -> dict[str, Tensor]:
        """Return float64 views for each layer: "name/sums", maxima "name/tops", "name/centre" of norms."""
        parts = {"sums": self._sums, "tops": self._tops, "centre": self._centres}
        return {f"{name}/{part}": tensors[name] for part, tensors in parts.items() for name in self.widths}

    def load_state(self, state: Mapping[str, Tensor]) -> "Profile":
        """Copy a state of the same widths and threshold into this one, and return this one."""
        copy_state(state, self.state())
        return self

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

    def _move_to(self, name: str, centre: Tensor) -> None:
        """Express the sums of norms around `centre` [1], exactly."""
        sums, shift = self._sums[name], centre - self._centres[name]
        sums[2:3] += sums[0] * shift.square() - 2 * shift * sums[1]
        sums[1:2] -= sums[0] * shift
        self._centres[name].copy_(centre)
