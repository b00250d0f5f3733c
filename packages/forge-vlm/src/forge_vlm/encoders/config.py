"""The section `[model.encoder]`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from forge_config import Config, Meta, Registry
from forge_model.attention.rope_config import NoRopeConfig
from forge_model.config import (
    BlockConfig,
    GroupedQueryConfig,
    LayerConfig,
    LayerNormConfig,
    MLPConfig,
    StandardBlockConfig,
)
from forge_model.ffn.config import FfnConfig
from msgspec import field

if TYPE_CHECKING:
    from torch import nn

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
Triple = tuple[float, float, float]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]


class EncoderConfig(Config):
    """Interface of `[model.encoder]`.

    Attributes:
        patch_size: height and width of a patch.
        mean: mean of each colour, subtracted from values between 0 and 1.
        std: standard deviation of each colour, the divisor after that.
    """

    patch_size: Count = 8
    mean: Triple = (0.5, 0.5, 0.5)
    std: Triple = (0.5, 0.5, 0.5)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width in pixels to which an image of so many pixels is resized."""
        raise NotImplementedError

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of patches of an image; the rest at its edges is cut off."""
        high, wide = self.resized(height, width)
        return high // self.patch_size, wide // self.patch_size

    @property
    def side(self) -> int:
        """Rows, and columns, of patches of a square image."""
        raise NotImplementedError

    @property
    def extra(self) -> int:
        """Number of features of an image before those of patches, such as that of a kept class token."""
        return 0

    def extras(self, rows: int, columns: int) -> int:
        """Return the number of such features of an image with so many patches."""
        return self.extra

    @property
    def width(self) -> int:
        """Width of the features."""
        raise NotImplementedError

    def build(self) -> nn.Module:
        """Build a module (patches [P, 3 p p] uint8, grids [n, 3] on the host) -> [P + n extra, width]."""
        raise NotImplementedError

    def forward_flops(self, rows: int, columns: int) -> float:
        """Return the matmul FLOPs of a forward pass over one image with so many patches."""
        raise NotImplementedError


encoders = Registry("encoder", EncoderConfig, default="vit")


class TowerConfig(EncoderConfig):
    """Interface of towers that are vision transformers (arXiv:2010.11929) with norms before their parts.

    Attributes:
        from: fills in all absent keys from the `config.json` in this Hugging Face folder, of the tower or of
            a model with the tower beside text. The run keeps the keys, not the folder.
        dim: width of the residual stream.
        num_layers: blocks.
        num_heads: heads of each attention.
        ffn_dim: hidden width of the feed-forward; absent means 4 dim.
        activation: nonlinearity of the feed-forward.
        layers: layers whose hidden states are the features: 0 is the input of the first block, `num_layers`
            or -1 the output of the last one (as `hidden_states` of `transformers`); several are concatenated.
            Blocks after the last of them are not computed, and never trained.
        post_norm: whether the last norm of the tower is applied to the features; absent means as in
            `last_hidden_state` of `transformers` if `layers` is -1 alone (CLIP: no, others: yes), otherwise
            no.
        eps: epsilon of the norms.
        init_std: standard deviation of the initial matrices and positions.
    """

    has_class_token: ClassVar[bool] = False
    has_pre_norm: ClassVar[bool] = False
    has_patch_bias: ClassVar[bool] = True
    normalizes_last: ClassVar[bool] = True
    resize_positions: ClassVar[Literal["bicubic", "bilinear", "nearest"]] = "bicubic"

    from_: str | None = field(default=None, name="from")
    dim: Count = 128
    num_layers: Count = 1
    num_heads: Count = 4
    ffn_dim: Count | None = None
    activation: Activation = "gelu_tanh"
    layers: int | list[int] = -1
    post_norm: bool | None = None
    eps: Positive = 1e-5
    init_std: Positive = 0.02

    @classmethod
    def expand(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Lay the keys of `[model.encoder]` over those of the folder named by `from`.

        Raises:
            ValueError: the folder has no tower of this type.
        """
        if not isinstance(tree.get("from"), str):
            return tree
        from forge_vlm.hf.towers import tower_tree

        return {key: tree[key] for key in tree if key != "from"} | {
            key: value for key, value in tower_tree(cls, tree["from"]).items() if key not in tree
        }

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.dim % self.num_heads:
            yield (f"encoder.dim = {self.dim} is no multiple of encoder.num_heads = {self.num_heads}")
        chosen = self.layers if isinstance(self.layers, list) else [self.layers]
        if not chosen or any(not -self.num_layers - 1 <= layer <= self.num_layers for layer in chosen):
            yield (
                f"encoder.layers = {self.layers} of num_layers = {self.num_layers}; expected one or several "
                f"from {-self.num_layers - 1} to {self.num_layers}"
            )

    @property
    def width(self) -> int:
        """See `EncoderConfig.width`."""
        return self.dim * len(self.chosen_layers)

    @property
    def chosen_layers(self) -> Sequence[int]:
        """The hidden states that form the features, with the numbers as given."""
        return self.layers if isinstance(self.layers, list) else (self.layers,)

    @property
    def normalizes(self) -> bool:
        """Whether the features are normalized."""
        last = len(self.chosen_layers) == 1 and self.chosen_layers[0] in (-1, self.num_layers)
        return last and self.normalizes_last if self.post_norm is None else self.post_norm

    @property
    def depth(self) -> int:
        """Number of blocks that are computed."""
        return max(layer % (self.num_layers + 1) for layer in self.chosen_layers)

    @property
    def position_side(self) -> int:
        """Rows, and columns, of the table of positions."""
        return self.side

    def ffn(self) -> FfnConfig:
        """Return the feed-forward of the blocks."""
        return MLPConfig(dim=self.ffn_dim, bias=True, activation=self.activation)

    def block(self) -> BlockConfig:
        """Return how parts form a block."""
        return StandardBlockConfig()

    def layer(self) -> LayerConfig:
        """Return the parts of a block."""
        return LayerConfig(
            attention=GroupedQueryConfig(num_heads=self.num_heads, bias=True, output_bias=True),
            ffn=self.ffn(),
            norm=LayerNormConfig(bias=True, eps=self.eps),
            rope=NoRopeConfig(),
            block=self.block(),
        )

    def build(self) -> nn.Module:
        """See `EncoderConfig.build`."""
        from forge_vlm.encoders.tower import Tower

        return Tower(self)

    def forward_flops(self, rows: int, columns: int) -> float:
        """See `EncoderConfig.forward_flops`."""
        patches, layer = rows * columns, self.layer()
        tokens = patches + self.has_class_token
        block = layer.block.forward_flops(layer, self.dim, tokens, causal=False)
        return patches * 2 * 3 * self.patch_size**2 * self.dim + tokens * self.depth * block


class FixedConfig(TowerConfig):
    """Interface of towers for square images of one size.

    Attributes:
        image_size: height and width in pixels that images are resized to.
        positions: rows, and columns, of the table of positions, which is resized (bicubic) to the grid of the
            image; absent means the size of that grid.
    """

    image_size: Count = 32
    positions: Count | None = None

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.image_size < self.patch_size:
            yield (f"encoder.image_size = {self.image_size} is less than patch_size = {self.patch_size}")
        yield from super().contradictions()

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """See `EncoderConfig.resized`."""
        return self.image_size, self.image_size

    @property
    def side(self) -> int:
        """See `EncoderConfig.side`."""
        return self.image_size // self.patch_size

    @property
    def position_side(self) -> int:
        """See `TowerConfig.position_side`."""
        return self.positions or self.side


@encoders.register("vit")
class ViTConfig(FixedConfig):
    """A small vision transformer for tests and training from scratch (arXiv:2010.11929)."""

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        yield from super().contradictions()
        if self.image_size % self.patch_size:
            yield (f"encoder.image_size = {self.image_size} is no multiple of patch_size = {self.patch_size}")
