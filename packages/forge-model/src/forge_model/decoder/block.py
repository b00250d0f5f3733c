"""The standard block: attention, then a feed-forward. B batch, T tokens, D model dim."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from forge_model.decoder.config import LayerConfig
from forge_model.decoder.context import Context


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)); `norm_order` says where the norms are.

    Attributes:
        attention_norm: norm of the input of attention; None if that is not normalized.
        attention_post_norm: norm of the output of attention, or None.
        ffn_norm: norm of the input of the feed-forward, or None.
        ffn_post_norm: norm of the output of the feed-forward, or None.
    """

    tensor_roles: ClassVar[dict[str, str]] = {
        "attention_norm": "norm",
        "attention_post_norm": "norm",
        "ffn_norm": "norm",
        "ffn_post_norm": "norm",
    }

    def __init__(self, config: LayerConfig, dim: int) -> None:
        super().__init__()
        before, after = config.norm_order != "reordered", config.norm_order != "pre"
        self.attention_norm = config.norm.build(dim) if before else None
        self.attention = config.attention.build(dim, config.norm)
        self.attention_post_norm = config.norm.build(dim) if after else None
        self.ffn_norm = config.norm.build(dim) if before else None
        self.ffn = config.ffn.build(dim)
        self.ffn_post_norm = config.norm.build(dim) if after else None
        self._norm_needs, self._ffn_needs = tuple(config.norm.needs), tuple(config.ffn.needs)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        # in one frame: where a graph breaks inside of a call, the frames around it break as well
        normed = self._normalized(self.attention_norm, x, context)
        attended = self.attention(normed, context.rope, context.mask, context.cache)
        x = x + self._normalized(self.attention_post_norm, attended, context)
        fed = context.call(self.ffn, self._ffn_needs, self._normalized(self.ffn_norm, x, context))
        return x + self._normalized(self.ffn_post_norm, fed, context)

    def _normalized(self, norm: nn.Module | None, x: Tensor, context: Context) -> Tensor:
        return x if norm is None else context.call(norm, self._norm_needs, x)


class ResidualBlock(Block):
    """See `forge_model.decoder.block_config.ResidualBlockConfig`."""

    def __init__(self, config: LayerConfig, dim: int, parallel: bool, scale: float) -> None:
        super().__init__(config, dim)
        self.parallel, self.scale = parallel, scale

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        attended = x + self._scaled(self._attended(x, context))
        return attended + self._scaled(self._fed(x if self.parallel else attended, context))

    def _attended(self, x: Tensor, context: Context) -> Tensor:
        """[B, T, D] through attention and its norms."""
        normed = self._normalized(self.attention_norm, x, context)
        attended = self.attention(normed, context.rope, context.mask, context.cache)
        return self._normalized(self.attention_post_norm, attended, context)

    def _fed(self, x: Tensor, context: Context) -> Tensor:
        """[B, T, D] through the feed-forward and its norms."""
        fed = context.call(self.ffn, self._ffn_needs, self._normalized(self.ffn_norm, x, context))
        return self._normalized(self.ffn_post_norm, fed, context)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1 else x * self.scale
