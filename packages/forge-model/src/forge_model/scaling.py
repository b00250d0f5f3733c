"""How initial values and learning rates follow from the width and the depth of a model. Imports no torch."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from forge_config import Config, Meta

Size = Annotated[int, Meta(ge=1)]


class Factors(NamedTuple):
    """How a parameter differs from that of the base model if the model is wider or deeper.

    Attributes:
        init: factor on the standard deviation of its initial values.
        lr: factor on its learning rate.
        decay: factor on its weight decay; decay times learning rate then equals that of the base model.
    """

    init: float = 1.0
    lr: float = 1.0
    decay: float = 1.0


class Scaling(NamedTuple):
    """The size of a model relative to its base model.

    Attributes:
        width: how many times wider the model is.
        depth: how many times deeper the model is, if the depth rule is on; otherwise 1.
    """

    width: float = 1.0
    depth: float = 1.0

    def factors(self, role: str, writes_residual: bool) -> Factors:
        """Return the factors of a parameter by its role, for optimizers with normalized updates like Adam.

        Source: Yang et al. 2022, arXiv:2203.03466 table 8 and, for a head that is not tied, the equivalent
        table 3, whose multiplier of the logits is in the initial values and the learning rate; Dey et al.
        2025, arXiv:2505.01618 table 1 with alpha = 1, whose multiplier of residual branches is likewise in
        the matrices that write into the residual stream.
        """
        init = lr = 1.0
        if role in ("matrix", "expert"):
            init, lr = self.width**-0.5, 1 / self.width
        elif role in ("head", "router"):
            init = lr = 1 / self.width
        if writes_residual:
            init, lr = init / self.depth, lr / self.depth
        return Factors(init, lr, 1 / lr)


class ScalingConfig(Config):
    """`[model.scaling]`: learning rates and initial values that are right for a base model stay right.

    All widths are to grow with `dim`: that of feed-forwards, and the number of heads or their width. The base
    model itself is trained as without this section.

    Attributes:
        base_dim: `dim` of the model that the learning rate was found for.
        base_head_dim: the width of its heads, where that differs: scores are then scaled by
            sqrt(base_head_dim) / head_dim in place of 1 / sqrt(head_dim).
        base_layers: `num_layers` of that model: residual branches shrink as the model becomes deeper
            (CompleteP); absent leaves the depth out.
    """

    base_dim: Size
    base_head_dim: Size | None = None
    base_layers: Size | None = None

    def of(self, dim: int, num_layers: int) -> Scaling:
        """Return the size of a model relative to its base model."""
        return Scaling(dim / self.base_dim, num_layers / self.base_layers if self.base_layers else 1.0)
