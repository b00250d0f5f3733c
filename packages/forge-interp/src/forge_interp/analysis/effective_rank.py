"""How many directions does a layer use? Letters: n samples, d features."""

from dataclasses import dataclass

import torch

from forge_interp.analysis.accumulate import Moments
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
