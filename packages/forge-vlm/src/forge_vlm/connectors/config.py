"""The section `[model.connector]`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal

from forge_config import Config, Meta, Registry

if TYPE_CHECKING:
    from torch import nn

Count = Annotated[int, Meta(ge=1)]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]


class ConnectorConfig(Config):
    """Interface of `[model.connector]`."""

    def tokens(self, rows: int, columns: int, extra: int = 0) -> int:
        """Return the number of visual tokens of an image with so many patches.

        Args:
            rows: rows of patches.
            columns: columns of patches.
            extra: number of features before those of the patches, such as that of a class token.

        Raises:
            ValueError: the connector takes no such image.
        """
        raise NotImplementedError

    def build(self, width: int, dim: int, extra: int = 0) -> nn.Module:
        """Build (features [P + n extra, width], grids [n, 3] on the host) -> visual tokens [V, dim]."""
        raise NotImplementedError

    def forward_flops(self, rows: int, columns: int, width: int, dim: int, extra: int = 0) -> float:
        """Matmul FLOPs of a forward pass over one image."""
        raise NotImplementedError


connectors = Registry("connector", ConnectorConfig, default="linear")


class ProjectedConfig(ConnectorConfig):
    """Interface of connectors that end in one matrix, or in two with a nonlinearity between them.

    Attributes:
        bias: add learnt biases.
    """

    bias: bool = True

    def widths(self, width: int, dim: int) -> list[int]:
        """Return the widths before, between and after the matrices."""
        return [width, dim]

    def projection(self, width: int, dim: int) -> nn.Module:
        """Build these matrices as a module."""
        from forge_vlm.connectors.projections import MLP, Projection

        first, *hidden, last = self.widths(width, dim)
        if not hidden:
            return Projection(first, last, self.bias)
        return MLP(first, hidden[0], last, getattr(self, "activation", "gelu"), self.bias)

    def forward_flops(self, rows: int, columns: int, width: int, dim: int, extra: int = 0) -> float:
        """See `ConnectorConfig.forward_flops`; counts the matrices."""
        widths = self.widths(width, dim)
        return self.tokens(rows, columns, extra) * 2 * sum(a * b for a, b in pairwise(widths))


@connectors.register("linear")
class LinearConfig(ProjectedConfig):
    """One matrix for each feature (LLaVA, arXiv:2304.08485; PaliGemma, arXiv:2407.07726)."""

    def tokens(self, rows: int, columns: int, extra: int = 0) -> int:
        """See `ConnectorConfig.tokens`."""
        return rows * columns + extra

    def build(self, width: int, dim: int, extra: int = 0) -> nn.Module:
        """See `ConnectorConfig.build`."""
        return self.projection(width, dim)


@connectors.register("mlp")
class MLPConnectorConfig(LinearConfig):
    """Two matrices with a nonlinearity between them (LLaVA-1.5, arXiv:2310.03744).

    Attributes:
        hidden: width between them; absent means that of the decoder.
        activation: the nonlinearity.
    """

    hidden: Count | None = None
    activation: Activation = "gelu"

    def widths(self, width: int, dim: int) -> list[int]:
        """See `ProjectedConfig.widths`."""
        return [width, self.hidden or dim, dim]


class WindowConfig(ProjectedConfig):
    """Interface of connectors that make one token of a window of patches.

    Windows at the bottom and right edges may be smaller.

    Attributes:
        window: height and width of a window, in patches.
        hidden: width between two matrices; absent means a single matrix.
        activation: nonlinearity between the two.
    """

    window: Count = 2
    hidden: Count | None = None
    activation: Activation = "gelu"

    def tokens(self, rows: int, columns: int, extra: int = 0) -> int:
        """See `ConnectorConfig.tokens`."""
        if extra:
            raise ValueError(
                f"a {type(self).__name__} makes tokens of windows of patches, and the tower keeps {extra} "
                "features that are no patch; use encoder.class_token = false, or another connector"
            )
        return -(-rows // self.window) * -(-columns // self.window)

    def widths(self, width: int, dim: int) -> list[int]:
        """See `ProjectedConfig.widths`."""
        return [width, dim] if self.hidden is None else [width, self.hidden, dim]


@connectors.register("avgpool")
class AveragePoolConfig(WindowConfig):
    """The mean of each window, then one matrix or two."""

    def build(self, width: int, dim: int, extra: int = 0) -> nn.Module:
        """See `ConnectorConfig.build`."""
        from forge_vlm.connectors.windows import AveragePool

        return AveragePool(self.window, self.projection(width, dim))


@connectors.register("pixel-shuffle")
class PixelShuffleConfig(WindowConfig):
    """All patches of a window concatenated, then one matrix or two (Idefics3, arXiv:2408.12637).

    Places of a window outside of the image are zeros.
    """

    bias: bool = False

    def widths(self, width: int, dim: int) -> list[int]:
        """See `ProjectedConfig.widths`."""
        return super().widths(width * self.window**2, dim)

    def build(self, width: int, dim: int, extra: int = 0) -> nn.Module:
        """See `ConnectorConfig.build`."""
        from forge_vlm.connectors.windows import PixelShuffle

        return PixelShuffle(self.window, self.projection(width, dim))


@connectors.register("attentional-pool")
class AttentionalPoolConfig(WindowConfig):
    """Attention over each window with its mean as query (Molmo, arXiv:2409.17146), then one matrix or two.

    Attributes:
        num_heads: heads of the attention.
    """

    num_heads: Count = 8

    def build(self, width: int, dim: int, extra: int = 0) -> nn.Module:
        """See `ConnectorConfig.build`."""
        from forge_vlm.connectors.windows import AttentionalPool

        if width % self.num_heads:
            raise ValueError(
                f"connector.num_heads = {self.num_heads} does not divide the width of the features, {width}"
            )
        return AttentionalPool(self.window, width, self.num_heads, self.projection(width, dim))

    def forward_flops(self, rows: int, columns: int, width: int, dim: int, extra: int = 0) -> float:
        """See `ConnectorConfig.forward_flops`."""
        tokens, seen = self.tokens(rows, columns, extra), self.window**2
        attention = 4 * (1 + seen) * width**2 + 4 * seen * width
        return tokens * attention + super().forward_flops(rows, columns, width, dim, extra)


@connectors.register("resampler")
class ResamplerConfig(ConnectorConfig):
    """Learnt tokens that attend to all features (Idefics2, arXiv:2405.02246): as many for any image size.

    Attributes:
        latents: number of visual tokens of an image.
        num_layers: blocks of attention and feed-forward.
        num_heads: query heads.
        num_kv_heads: key-value heads.
        head_dim: width of a head.
        hidden: width of the gated feed-forward that is applied to features first; absent means 4 times the
            width of the decoder.
        eps: epsilon of the norms.
    """

    latents: Count = 64
    num_layers: Count = 3
    num_heads: Count = 16
    num_kv_heads: Count = 4
    head_dim: Count = 96
    hidden: Count | None = None
    eps: Annotated[float, Meta(gt=0)] = 1e-6

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.num_heads % self.num_kv_heads:
            yield (
                f"connector.num_kv_heads = {self.num_kv_heads} does not divide num_heads = {self.num_heads}"
            )

    def tokens(self, rows: int, columns: int, extra: int = 0) -> int:
        """See `ConnectorConfig.tokens`."""
        return self.latents

    def build(self, width: int, dim: int, extra: int = 0) -> nn.Module:
        """See `ConnectorConfig.build`."""
        from forge_vlm.connectors.resampler import Resampler

        return Resampler(self, width, dim, extra)

    def forward_flops(self, rows: int, columns: int, width: int, dim: int, extra: int = 0) -> float:
        """See `ConnectorConfig.forward_flops`."""
        features, hidden = rows * columns + extra, self.hidden or 4 * dim
        keys, queries = features + self.latents, self.num_heads * self.head_dim
        layer = 4 * self.latents * dim * queries + 4 * keys * dim * self.num_kv_heads * self.head_dim
        layer += 4 * self.latents * keys * queries + 24 * self.latents * dim**2
        return features * 2 * hidden * (2 * width + dim) + self.num_layers * layer
