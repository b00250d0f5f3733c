"""The section `[model.block]`: how the parts of a layer form a block, and its further inputs.

Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from forge_config import Config, Meta, Registry

from forge_model.side_inputs import Needs

if TYPE_CHECKING:
    from torch import nn

    from forge_model.decoder.config import LayerConfig


class BlockConfig(Config):
    """Interface of `[model.block]`.

    Attributes:
        needs: names and kinds of the side inputs that the block itself takes; its feed-forward and its norms
            have their own.
    """

    needs: ClassVar[Needs] = {}

    def build(self, layer: LayerConfig, dim: int) -> nn.Module:
        """Build a module ([B, T, D], `forge_model.decoder.context.Context`) -> [B, T, D]."""
        raise NotImplementedError

    def forward_flops(self, layer: LayerConfig, dim: int, tokens: int, causal: bool) -> float:
        """Matmul FLOPs a token of a forward pass over sequences of `tokens`."""
        return layer.attention.forward_flops(dim, tokens, causal) + layer.ffn.forward_flops(dim)

    def tensor_sizes(self, layer: LayerConfig, dim: int) -> dict[str, int]:
        """The sizes, by key, that tensor parallelism must divide."""
        parts = {"attention": layer.attention.tensor_sizes(), "ffn": layer.ffn.tensor_sizes(dim)}
        return {f"{part}.{key}": size for part, found in parts.items() for key, size in found.items()}

    def require_axes(self, layer: LayerConfig, tp: int, cp: int, sequence: bool) -> None:
        """See `ModelConfig.require_axes`. A block that handles sharded tokens may allow its side inputs."""
        layer.attention.require_axes(layer.norm, tp, cp)
        by_token = [name for name, kind in layer.needs().items() if kind == "token"]
        if tp > 1 and sequence and (refused := [*self.needs, *by_token]):
            raise ValueError(
                f"{', '.join(dict.fromkeys(refused))}: side inputs, while sequence parallelism cuts the "
                "tokens between the parts of a block; set tensor_parallel.sequence = false"
            )


blocks = Registry("block", BlockConfig, default="standard")


@blocks.register("standard")
class StandardBlockConfig(BlockConfig):
    """x + attention(norm(x)), then x + ffn(norm(x)); `norm_order` says where the norms are."""

    def build(self, layer: LayerConfig, dim: int) -> nn.Module:
        """See `BlockConfig.build`."""
        from forge_model.decoder.block import Block

        return Block(layer, dim)


@blocks.register("residual")
class ResidualBlockConfig(BlockConfig):
    """The standard block with other residual connections.

    Attributes:
        parallel: attention and feed-forward read the same x, and both are added to it:
            x + attention(norm(x)) + ffn(norm(x)), each with its own norm (GPT-NeoX, arXiv:2204.06745).
        scale: factor on the outputs of attention and feed-forward (as Granite, arXiv:2408.13359).
    """

    parallel: bool = False
    scale: Annotated[float, Meta(gt=0)] = 1.0

    def build(self, layer: LayerConfig, dim: int) -> nn.Module:
        """See `BlockConfig.build`."""
        from forge_model.decoder.block import ResidualBlock

        return ResidualBlock(layer, dim, self.parallel, self.scale)
