"""What `[model.connector]` holds. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from forge_config import Config, Meta, Registry

if TYPE_CHECKING:
    from torch import nn

Count = Annotated[int, Meta(ge=1)]


class ConnectorConfig(Config):
    """Interface of `[model.connector]`."""

    def tokens(self, rows: int, columns: int) -> int:
        """Visual tokens of an image of so many patches.

        Raises:
            ValueError: it takes no such image.
        """
        raise NotImplementedError

    def build(self, width: int, dim: int) -> nn.Module:
        """A module (features [P, width], grids [n, 3] on the host) -> visual tokens [V, dim]."""
        raise NotImplementedError

    def forward_flops(self, rows: int, columns: int, width: int, dim: int) -> float:
        """Matmul FLOPs of a forward pass over one image."""
        raise NotImplementedError


connectors = Registry("connector", ConnectorConfig, default="linear")


@connectors.register("linear")
class LinearConfig(ConnectorConfig):
    """One matrix for each patch (LLaVA, arXiv:2304.08485)."""

    def tokens(self, rows: int, columns: int) -> int:
        """See `ConnectorConfig.tokens`."""
        return rows * columns

    def build(self, width: int, dim: int) -> nn.Module:
        """See `ConnectorConfig.build`."""
        from forge_vlm.connectors.projections import Projection

        return Projection(width, dim)

    def forward_flops(self, rows: int, columns: int, width: int, dim: int) -> float:
        """See `ConnectorConfig.forward_flops`."""
        return 2 * rows * columns * width * dim


@connectors.register("mlp")
class MLPConnectorConfig(ConnectorConfig):
    """Two matrices with a GELU between them (LLaVA-1.5, arXiv:2310.03744).

    Attributes:
        hidden: width between them; absent means that of the decoder.
    """

    hidden: Count | None = None

    def tokens(self, rows: int, columns: int) -> int:
        """See `ConnectorConfig.tokens`."""
        return rows * columns

    def build(self, width: int, dim: int) -> nn.Module:
        """See `ConnectorConfig.build`."""
        from forge_vlm.connectors.projections import MLP

        return MLP(width, self.hidden or dim, dim)

    def forward_flops(self, rows: int, columns: int, width: int, dim: int) -> float:
        """See `ConnectorConfig.forward_flops`."""
        return 2 * rows * columns * (self.hidden or dim) * (width + dim)
