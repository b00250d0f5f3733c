"""The tower of Llama 3.2 Vision. n images, C tiles of a canvas, N features of a tile, D width."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi
from typing import ClassVar

import torch
import torch.nn.functional as F
from forge_model.config import LayerConfig, LayerNormConfig
from forge_model.decoder.block import Block
from forge_model.decoder.context import Context
from forge_model.roles import Role
from torch import Tensor, nn

from forge_vlm.encoders.families import MllamaTowerConfig
from forge_vlm.encoders.positions import images_of
from forge_vlm.encoders.tower import Tower
from forge_vlm.fusion.cross_attention import Gate


class TileTable(nn.Module):
    """Gated learnt vectors for each tile, separate for each shape of a canvas."""

    roles: ClassVar[dict[str, Role]] = {"weight": "embedding"}

    def __init__(self, shapes: int, tiles: int, vectors: int, dim: int) -> None:
        super().__init__()
        self.tiles, self.dim = tiles, dim
        self.weight = nn.Parameter(torch.empty(1 + shapes, tiles * vectors * dim))
        self.gate = Gate(0.0)

    def forward(self, shapes: Sequence[int]) -> Tensor:
        """Return [n, C, vectors, D] for canvases, given the indices of their shapes."""
        return self.gate(torch.stack([self.weight[shape] for shape in shapes])).unflatten(
            1, (self.tiles, -1, self.dim)
        )


class GatedBlock(Block):
    """x + gate(attention(norm(x))), then the same with the feed-forward."""

    def __init__(self, layer: LayerConfig, dim: int) -> None:
        super().__init__(layer, dim)
        self.attention_post_norm, self.ffn_post_norm = Gate(pi / 4), Gate(pi / 4)


class MllamaTower(Tower):
    """A tower like `MllamaVisionModel` of transformers: tiles of a canvas see each other, gated blocks last.

    Canvases are padded to `max_tiles` tiles, and tiles to a multiple of eight patches. Real patches see the
    padding, padding sees real patches only. The result has no features of padding.
    """

    config: MllamaTowerConfig

    def __init__(self, config: MllamaTowerConfig) -> None:
        super().__init__(config)
        layer, dim, first = config.layer(), config.dim, config.num_layers
        norm = LayerNormConfig(bias=True)
        self.pre_norm, self.norm = norm.build(dim), norm.build(dim)
        self.layers.update({str(first + i): GatedBlock(layer, dim) for i in range(config.global_layers)})
        self.depth = len(self.layers.requires_grad_())
        sizes = len(config.canvases), config.max_tiles
        self.pre_tiles, self.post_tiles = TileTable(*sizes, 1, dim), TileTable(*sizes, 1, dim)
        self.position_tiles = TileTable(*sizes, len(self.positions.weight), dim)

    def forward(self, patches: Tensor, grids: Tensor) -> Tensor:
        """See `Tower.forward`; the rows and columns of an image are those of its canvas."""
        config = self.config
        assert self.pre_norm is not None and self.class_token is not None
        shapes = [(rows // config.side, columns // config.side) for rows, columns in images_of(grids)]
        numbers = [1 + config.canvases.index(shape) for shape in shapes]
        x = self._tiles(self.patches(self.normalized(patches)), shapes) + self.pre_tiles(numbers)
        none = x.new_zeros(1 + x.shape[2], x.shape[3])
        x = self.class_token(x.flatten(0, 1), none[:1]).unflatten(0, x.shape[:2])
        places = [self.positions(none[:1], ()), self.positions(none[1:], [(config.side, config.side)])]
        place = torch.cat(places)
        x = self.pre_norm(x + place - self.position_tiles.gate(place) + self.position_tiles(numbers))
        real, added = x.shape[2], -x.shape[2] % 8
        counts = [rows * columns for rows, columns in shapes]
        tile, patch = (torch.arange(size, device=x.device) for size in (config.max_tiles, real + added))
        is_real = torch.stack([(tile < count)[:, None] & (patch < real) for count in counts]).flatten(1)
        mask = (is_real[:, :, None] | is_real[:, None])[:, None]
        x = self._blocks(F.pad(x, (0, 0, 0, added)), mask, numbers)[:, :, :real]
        return torch.cat([one[:count].flatten(0, 1) for one, count in zip(x, counts, strict=True)])

    def _tiles(self, x: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
        """Cut canvases [P, D], stored row by row, into tiles [n, C, N - 1, D]; zeros for absent tiles."""
        side, found = self.config.side, []
        canvases = x.split([rows * columns * side * side for rows, columns in shapes])
        for one, (rows, columns) in zip(canvases, shapes, strict=True):
            cut = one.unflatten(0, (rows, side, columns, side)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
            found.append(F.pad(cut, (0, 0, 0, 0, 0, self.config.max_tiles - rows * columns)))
        return torch.stack(found)

    def _blocks(self, x: Tensor, mask: Tensor, numbers: Sequence[int]) -> Tensor:
        """[n, C, M, D] -> [n, C, M, width]: the last states, then those of `layers`, channel by channel."""
        context, (tiles, found), first = Context(None, mask), (x.shape[1], {}), self.config.num_layers
        x = x.flatten(1, 2)
        for number, block in enumerate(self.layers.values()):
            if number == first:
                x = self.norm(x).unflatten(1, (tiles, -1)) + self.post_tiles(numbers)
                x = x.flatten(1, 2)
            x = found[number + 1] = block(x, context)
        beside = [found[layer % (first + 1)] for layer in self.config.chosen_layers]
        return torch.cat([x, torch.stack(beside, -1).flatten(-2)], -1).unflatten(1, (tiles, -1))
