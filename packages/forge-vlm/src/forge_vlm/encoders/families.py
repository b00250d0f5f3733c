"""Towers of published models, by their names in `[model.encoder]`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, isqrt
from typing import TYPE_CHECKING, ClassVar, Literal

from forge_model.config import BlockConfig, GroupedQueryConfig, LayerConfig, SwiGLUConfig
from forge_model.ffn.config import FfnConfig
from msgspec import field
from msgspec.structs import replace

from forge_vlm.encoders.config import Activation, Count, FixedConfig, Positive, TowerConfig, Triple, encoders

if TYPE_CHECKING:
    from torch import nn

CLIP_MEAN: Triple = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Triple = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)


@encoders.register("clip")
class CLIPConfig(FixedConfig):
    """The tower of CLIP (arXiv:2103.00020); the defaults are those of ViT-L/14 at 336 pixels.

    Attributes:
        class_token: whether the feature of the class token comes before the other features of an image.
    """

    has_class_token: ClassVar[bool] = True
    has_pre_norm: ClassVar[bool] = True
    has_patch_bias: ClassVar[bool] = False
    normalizes_last: ClassVar[bool] = False

    image_size: Count = 336
    patch_size: Count = 14
    dim: Count = 1024
    num_layers: Count = 24
    num_heads: Count = 16
    activation: Activation = "quick_gelu"
    mean: Triple = CLIP_MEAN
    std: Triple = CLIP_STD
    class_token: bool = False

    @property
    def extra(self) -> int:
        """See `EncoderConfig.extra`."""
        return int(self.class_token)


@encoders.register("siglip")
class SiglipConfig(FixedConfig):
    """The tower of SigLIP, and of SigLIP 2 of fixed size, without its head (arXiv:2303.15343, 2502.14786).

    The defaults are those of B/16 at 224 pixels.
    """

    image_size: Count = 224
    patch_size: Count = 16
    dim: Count = 768
    num_layers: Count = 12
    num_heads: Count = 12
    eps: Positive = 1e-6


@encoders.register("idefics3")
class Idefics3TowerConfig(SiglipConfig):
    """The tower of Idefics3 and SmolVLM (arXiv:2408.12637).

    It is that of SigLIP, but looks positions up by their fraction of the image (arXiv:2307.06304).
    """

    resize_positions: ClassVar[Literal["bicubic", "bilinear", "nearest"]] = "nearest"


@encoders.register("siglip2")
class Siglip2Config(TowerConfig):
    """The tower of SigLIP 2 NaFlex (arXiv:2502.14786): images keep their aspect ratio.

    Attributes:
        max_patches: most patches of an image, which is resized to use as many as fit.
        positions: rows, and columns, of the table of positions, which is resized to each image (bilinear).
    """

    resize_positions: ClassVar[Literal["bicubic", "bilinear", "nearest"]] = "bilinear"

    patch_size: Count = 16
    dim: Count = 768
    num_layers: Count = 12
    num_heads: Count = 12
    eps: Positive = 1e-6
    max_patches: Count = 256
    positions: Count = 16

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """See `EncoderConfig.resized`; equals `Siglip2ImageProcessor` of `transformers` bit for bit.

        The scale is found by bisection, so that it is not exactly the largest that fits.
        """
        low, high = 1e-6, 100.0
        while high - low >= 1e-5:
            middle = (low + high) / 2
            rows, columns = self._patches(height, middle), self._patches(width, middle)
            low, high = (middle, high) if rows * columns <= self.max_patches else (low, middle)
        return self._patches(height, low) * self.patch_size, self._patches(width, low) * self.patch_size

    def _patches(self, size: int, scale: float) -> int:
        return max(1, ceil(size * scale / self.patch_size))

    @property
    def side(self) -> int:
        """See `EncoderConfig.side`."""
        return isqrt(self.max_patches)

    @property
    def position_side(self) -> int:
        """See `TowerConfig.position_side`."""
        return self.positions


class ScaledBlockConfig(BlockConfig):
    """The standard block with a learnt factor for each channel of the output of its parts.

    Attributes:
        initial: initial value of the factors.
    """

    initial: Positive = 1.0

    def build(self, layer: LayerConfig, dim: int) -> nn.Module:
        """See `BlockConfig.build`."""
        from forge_vlm.encoders.tower import ScaledBlock

        return ScaledBlock(layer, dim, self.initial)


@encoders.register("dinov2")
class Dinov2Config(FixedConfig):
    """The tower of DINOv2 (arXiv:2304.07193); the defaults are those of B/14 at 224 pixels.

    Attributes:
        class_token: whether the feature of the class token comes before the other features of an image.
        ffn_type: `mlp`, or `swiglu` as in the giant model.
        qkv_bias: biases on queries, keys and values.
        layer_scale: initial value of the learnt factors on the output of attention and feed-forward.
    """

    has_class_token: ClassVar[bool] = True

    image_size: Count = 224
    patch_size: Count = 14
    positions: Count | None = 37
    dim: Count = 768
    num_layers: Count = 12
    num_heads: Count = 12
    activation: Activation = "gelu"
    eps: Positive = 1e-6
    mean: Triple = IMAGENET_MEAN
    std: Triple = IMAGENET_STD
    class_token: bool = False
    ffn_type: Literal["mlp", "swiglu"] = "mlp"
    qkv_bias: bool = True
    layer_scale: Positive = 1.0

    @property
    def extra(self) -> int:
        """See `EncoderConfig.extra`."""
        return int(self.class_token)

    def ffn(self) -> FfnConfig:
        """See `TowerConfig.ffn`."""
        return super().ffn() if self.ffn_type == "mlp" else SwiGLUConfig(dim=self.ffn_dim, bias=True)

    def block(self) -> BlockConfig:
        """See `TowerConfig.block`."""
        return ScaledBlockConfig(initial=self.layer_scale)

    def layer(self) -> LayerConfig:
        """See `TowerConfig.layer`."""
        attention = GroupedQueryConfig(num_heads=self.num_heads, bias=self.qkv_bias, output_bias=True)
        return replace(super().layer(), attention=attention)


def canvases_of(tiles: int) -> list[tuple[int, int]]:
    """Return rows and columns of canvases of at most so many tiles, in the order in which Mllama has them."""
    sizes = range(1, tiles + 1)
    return [(rows, columns) for rows in sizes for columns in sizes if rows * columns <= tiles]


@encoders.register("mllama")
class MllamaTowerConfig(FixedConfig):
    """The tower of Llama 3.2 Vision (arXiv:2407.21783 section 7.1), which gets an image in tiles.

    Attributes:
        layers: hidden states that are concatenated to that of the last block.
        global_layers: number of gated blocks after the other `num_layers` blocks.
        max_tiles: most tiles, each of `image_size`, of the canvas (rows and columns of tiles) of an image.
    """

    has_class_token: ClassVar[bool] = True
    has_pre_norm: ClassVar[bool] = True
    has_patch_bias: ClassVar[bool] = False

    image_size: Count = 560
    patch_size: Count = 14
    dim: Count = 1280
    num_layers: Count = 32
    num_heads: Count = 16
    activation: Activation = "gelu"
    layers: int | list[int] = field(default_factory=lambda: [4, 8, 16, 24, 31])
    mean: Triple = CLIP_MEAN
    std: Triple = CLIP_STD
    global_layers: Count = 8
    post_norm: bool | None = True
    max_tiles: Count = 4

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        yield from super().contradictions()
        if self.image_size % self.patch_size or self.position_side != self.side or not self.post_norm:
            yield (
                f"encoder.image_size = {self.image_size}, patch_size = {self.patch_size}, positions = "
                f"{self.positions}, post_norm = {self.post_norm}; expected a multiple of the patch size, no "
                "positions, and post_norm = true: the norm stands before the last blocks"
            )

    @property
    def canvases(self) -> list[tuple[int, int]]:
        """See `canvases_of`."""
        return canvases_of(self.max_tiles)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """See `EncoderConfig.resized`: the canvas, as `get_optimal_tiled_canvas` of transformers chooses it.

        It is the canvas on which the image grows least or, if it must shrink on all, shrinks least.
        """
        size = self.image_size
        scales = {one: min(one[0] * size / height, one[1] * size / width) for one in self.canvases}
        best = min((scale for scale in scales.values() if scale >= 1), default=max(scales.values()))
        alike = [one for one, scale in scales.items() if scale == best]
        rows, columns = min(alike, key=lambda one: one[0] * one[1])
        return rows * size, columns * size

    def extras(self, rows: int, columns: int) -> int:
        """See `EncoderConfig.extras`: the class token of each tile."""
        return rows * columns // self.side**2

    @property
    def extra(self) -> int:
        """See `EncoderConfig.extra`."""
        return 1

    @property
    def width(self) -> int:
        """See `EncoderConfig.width`."""
        return self.dim * (1 + len(self.chosen_layers))

    def layer(self) -> LayerConfig:
        """See `TowerConfig.layer`: no biases in the attention."""
        return replace(super().layer(), attention=GroupedQueryConfig(num_heads=self.num_heads))

    def build(self) -> nn.Module:
        """See `EncoderConfig.build`."""
        from forge_vlm.encoders.mllama import MllamaTower

        return MllamaTower(self)

    def forward_flops(self, rows: int, columns: int) -> float:
        """See `EncoderConfig.forward_flops`; includes the padding of a canvas."""
        layer, tokens = self.layer(), self.max_tiles * ((self.side**2 + 8) // 8 * 8)
        block = layer.block.forward_flops(layer, self.dim, tokens, causal=False)
        patches = rows * columns * 2 * 3 * self.patch_size**2 * self.dim
        return patches + tokens * (self.num_layers + self.global_layers) * block
