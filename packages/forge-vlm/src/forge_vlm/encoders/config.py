"""What `[model.encoder]` holds. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from forge_config import Config, Meta, Registry

if TYPE_CHECKING:
    from torch import nn

Count = Annotated[int, Meta(ge=1)]
Triple = tuple[float, float, float]


class EncoderConfig(Config):
    """Interface of `[model.encoder]`: a tower that takes images of one size.

    Attributes:
        image_size: height and width in pixels that images are resized to.
        patch_size: height and width of a patch.
        mean: of each colour, subtracted from values between 0 and 1.
        std: of each colour, by which they are divided then.
    """

    image_size: Count = 32
    patch_size: Count = 8
    mean: Triple = (0.5, 0.5, 0.5)
    std: Triple = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise ValueError(
                f"encoder.image_size = {self.image_size} is no multiple of patch_size = {self.patch_size}"
            )

    @property
    def side(self) -> int:
        """Patches in a row, and rows, of an image."""
        return self.image_size // self.patch_size

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches of an image of so many pixels; by default all have one size."""
        return self.side, self.side

    @property
    def width(self) -> int:
        """Width of its features."""
        raise NotImplementedError

    def build(self) -> nn.Module:
        """A module (patches [P, 3 p p] uint8, grids [n, 3]) -> features [P, width]."""
        raise NotImplementedError

    def forward_flops(self) -> float:
        """Matmul FLOPs of a forward pass over one image."""
        raise NotImplementedError


encoders = Registry("encoder", EncoderConfig, default="vit")


@encoders.register("vit")
class ViTConfig(EncoderConfig):
    """A vision transformer with learnt positions and norms before its parts (arXiv:2010.11929).

    Attributes:
        dim: width of the residual stream.
        num_layers: blocks.
        num_heads: of each attention.
        ffn_dim: hidden width of the feed-forward; absent means 4 dim.
        init_std: standard deviation of the initial matrices and positions.
    """

    dim: Count = 128
    num_layers: Count = 1
    num_heads: Count = 4
    ffn_dim: Count | None = None
    init_std: Annotated[float, Meta(gt=0)] = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % (2 * self.num_heads):
            raise ValueError(
                f"encoder.dim = {self.dim} is no even multiple of encoder.num_heads = {self.num_heads}"
            )

    @property
    def width(self) -> int:
        """See `EncoderConfig.width`."""
        return self.dim

    def build(self) -> nn.Module:
        """See `EncoderConfig.build`."""
        from forge_vlm.encoders.vit import ViT

        return ViT(self)

    def forward_flops(self) -> float:
        """See `EncoderConfig.forward_flops`."""
        tokens, pixels = self.side**2, 3 * self.patch_size**2
        ffn = 2 * self.dim * (self.ffn_dim or 4 * self.dim)
        block = 2 * (4 * self.dim**2 + ffn) + 4 * self.dim * tokens
        return tokens * (2 * pixels * self.dim + self.num_layers * block)
