"""A vision transformer of forge-model's parts. n images, N patches of one, P = n N patches, D width."""

from __future__ import annotations

from typing import ClassVar

import torch
from forge_model.attention.mask import Mask, softmax_attention
from forge_model.attention.rope_config import NoRopeConfig
from forge_model.config import GroupedQueryConfig, LayerNormConfig, MLPConfig
from forge_model.decoder.block import Block
from forge_model.decoder.config import LayerConfig
from forge_model.decoder.context import Context
from forge_model.layers import Linear
from forge_model.model import Model
from forge_model.roles import Role
from torch import Tensor, nn

from forge_vlm.encoders.config import ViTConfig


class Positions(nn.Module):
    """A learnt vector for each place of an image."""

    roles: ClassVar[dict[str, Role]] = {"weight": "embedding"}

    def __init__(self, places: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(places, dim))

    def forward(self, x: Tensor) -> Tensor:
        """[n, N, D] -> [n, N, D]."""
        return x + self.weight


class ViT(Model):
    """Patches, positions, blocks that see all of their image, a norm."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config, self.depth, dim = config, config.num_layers, config.dim
        self.init_std = config.init_std
        self.patches = Linear(3 * config.patch_size**2, dim, bias=True)
        self.positions = Positions(config.side**2, dim)
        norm = LayerNormConfig(bias=True)
        layer = LayerConfig(
            attention=GroupedQueryConfig(num_heads=config.num_heads, bias=True, output_bias=True),
            ffn=MLPConfig(dim=config.ffn_dim, bias=True, activation="gelu_tanh"),
            norm=norm,
            rope=NoRopeConfig(),
        )
        self.layers = nn.ModuleDict({str(i): Block(layer, dim) for i in range(config.num_layers)})
        self.norm = norm.build(dim)

    def forward(self, patches: Tensor, grids: Tensor) -> Tensor:
        """[P, 3 p p] uint8 -> [P, D]; every image has the same number of patches."""
        x = self.positions(self.patches(self.normalized(patches)).unflatten(0, (-1, self.config.side**2)))
        mask = Mask(x.shape[1], x.device, causal=False)
        for block in self.layers.values():
            x = block(x, Context(None, softmax_attention.resolve(mask, None)))
        return self.norm(x).flatten(0, 1)

    def blocks(self) -> dict[str, nn.Module]:
        """See `Model.blocks`."""
        return {f"layers.{name}": block for name, block in self.layers.items()}

    def normalized(self, patches: Tensor) -> Tensor:
        """Pixels as the tower was trained on them, in the dtype of its weights."""
        # made on the device: a copy from the host would wait for it
        mean, std = (
            torch.cat([torch.full((1,), value, device=patches.device) for value in values])
            for values in (self.config.mean, self.config.std)
        )
        pixels = patches.unflatten(-1, (-1, 3)).float() / 255
        return ((pixels - mean) / std).flatten(-2).to(self.patches.weight.dtype)
