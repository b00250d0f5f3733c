"""The section `[model.fusion]` with `type = "cross-attention"`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from forge_config import Meta
from forge_model.config import (
    DecoderConfig,
    FfnConfig,
    GroupedQueryConfig,
    LayerConfig,
    LayerOverride,
    StandardBlockConfig,
    blocks,
)
from forge_model.decoder.config import INDICES
from forge_model.side_inputs import Needs
from msgspec.structs import replace

from forge_vlm.fusion.config import FusionConfig, fusions

if TYPE_CHECKING:
    from torch import Tensor, nn

RESERVED = 8
"""Number of rows after the vocabulary in the embedding of Mllama; one of them is the image token."""

Count = Annotated[int, Meta(ge=1)]


@blocks.register("cross-attention")
class CrossBlockConfig(StandardBlockConfig):
    """A standard block after a gated layer that attends to visual tokens; see `CrossAttentionConfig`.

    Attributes:
        visual_tokens: number S of visual tokens of each sequence, padding included.
        num_heads: query heads; absent means as in the attention of the layer, also for the next two keys.
        num_kv_heads: key-value heads.
        head_dim: width of a head.
        ffn: feed-forward of the gated layer; absent means one like that of the layer.
        gate_init: initial value of both gates; a gate multiplies its input by its tanh.
        blind: result for a token that sees no image.
    """

    needs: ClassVar[Needs] = {"image_features": "other", "image_window": "token"}

    visual_tokens: Count = 256
    num_heads: Count | None = None
    num_kv_heads: Count | None = None
    head_dim: Count | None = None
    ffn: FfnConfig | None = None
    gate_init: float = 0.0
    blind: Literal["nothing", "mllama"] = "nothing"

    def heads(self, layer: LayerConfig) -> GroupedQueryConfig:
        """Return number of heads of the gated layer, and their width unless it is the default.

        Raises:
            ValueError: the layer has no heads to inherit.
        """
        like = layer.attention
        if self.num_heads is None and not isinstance(like, GroupedQueryConfig):
            raise ValueError(
                f"fusion.num_heads is absent, and a {type(like).__name__} has no heads to be inherited; give "
                "fusion.num_heads"
            )
        heads = self.num_heads or like.num_heads  # type: ignore[attr-defined]
        inherits = self.num_heads is None
        kv_heads = self.num_kv_heads or (like.kv_heads if inherits else heads)  # type: ignore[attr-defined]
        width = self.head_dim or (like.head_dim if inherits else None)  # type: ignore[attr-defined]
        return GroupedQueryConfig(num_heads=heads, num_kv_heads=kv_heads, head_dim=width)

    def attention(self, layer: LayerConfig, dim: int) -> GroupedQueryConfig:
        """Return the heads of the gated layer, all defaults resolved; raises the errors of `heads`."""
        heads = self.heads(layer)
        return replace(heads, head_dim=heads.head_width(dim))

    def feed_forward(self, layer: LayerConfig) -> FfnConfig:
        """Return the feed-forward of the gated layer."""
        return self.ffn or layer.ffn

    def build(self, layer: LayerConfig, dim: int) -> nn.Module:
        """See `BlockConfig.build`."""
        from forge_vlm.fusion.cross_attention import CrossBlock

        return CrossBlock(self, layer, dim)

    def forward_flops(self, layer: LayerConfig, dim: int, tokens: int, causal: bool) -> float:
        """See `BlockConfig.forward_flops`; a token attends to all places of visual tokens, filled or not."""
        heads = self.attention(layer, dim)
        width, kv_width = (n * heads.head_width(dim) for n in (heads.num_heads, heads.kv_heads))
        keys = 4 * dim * kv_width * self.visual_tokens / tokens
        looked = 4 * width * self.visual_tokens
        cross = 4 * dim * width + keys + looked + self.feed_forward(layer).forward_flops(dim)
        return super().forward_flops(layer, dim, tokens, causal) + cross

    def tensor_sizes(self, layer: LayerConfig, dim: int) -> dict[str, int]:
        """See `BlockConfig.tensor_sizes`."""
        heads = self.attention(layer, dim)
        parts = {"attention": heads.tensor_sizes(), "ffn": self.feed_forward(layer).tensor_sizes(dim)}
        cross = {f"cross.{part}.{key}": size for part, found in parts.items() for key, size in found.items()}
        return super().tensor_sizes(layer, dim) | cross

    def require_axes(self, layer: LayerConfig, tp: int, cp: int, sequence: bool) -> None:
        """See `BlockConfig.require_axes`."""
        super().require_axes(layer, tp, cp, sequence)
        self.heads(layer).require_axes(layer.norm, tp, cp)


@fusions.register("cross-attention")
class CrossAttentionConfig(FusionConfig):
    """The residual stream has text only; gated layers before some blocks attend to visual tokens.

    An image takes one token of a sequence, at its place. Flamingo, arXiv:2204.14198; Llama 3,
    arXiv:2407.21783 section 7; the layers are those of `MllamaTextModel` of transformers.

    Attributes:
        layers: blocks after a gated layer: an index or a slice as in Python, or several with commas; "3::4"
            is every fourth from the fourth on.
        max_visual_tokens: S, room for visual tokens in a sequence. All of it is computed, filled or not.
        num_heads: query heads of the gated layers; absent means as in the attention of their block.
        num_kv_heads: key-value heads; absent means the same, or as many as `num_heads` if that is given.
        head_dim: width of a head.
        ffn: feed-forward of the gated layers; absent means one like that of their block.
        gate_init: initial value of the gates, before their tanh. 0 keeps the text decoder unchanged at first,
            but learns slowly from scratch, where 0.5 is better.
        sees: which images text sees: `all` images of its sample before it, or the `latest`: the last run of
            images without text between them, as in Mllama.
        blind: result for a token that sees no image: `nothing`; or, as in `mllama`, its attention sees all
            images of its sample, later ones too, and only the feed-forward is left out.
        place: embedding at the place of an image: that of a `token`, which ends a document or is the image
            token; or a vector of its own, `learned`, as in Mllama.
    """

    passed_on: ClassVar[str] = "image_features"

    layers: Annotated[str, Meta(pattern=INDICES)] = "::4"
    max_visual_tokens: Count = 256
    num_heads: Count | None = None
    num_kv_heads: Count | None = None
    head_dim: Count | None = None
    ffn: FfnConfig | None = None
    gate_init: float = 0.0
    sees: Literal["all", "latest"] = "all"
    blind: Literal["nothing", "mllama"] = "nothing"
    place: Literal["token", "learned"] = "token"

    @property
    def tokens_beside(self) -> int:
        """See `FusionConfig.tokens_beside`."""
        return self.max_visual_tokens

    @property
    def ids_behind(self) -> int:
        """See `FusionConfig.ids_behind`; the number of such rows in Mllama."""
        return RESERVED if self.place == "learned" else 0

    def decoder(self, config: DecoderConfig) -> DecoderConfig:
        """See `FusionConfig.decoder`."""
        if config.mtp.num_modules:
            raise ValueError(
                f'fusion.type = "cross-attention" with mtp.num_modules = {config.mtp.num_modules}, whose '
                "modules see no images; use 0"
            )
        if not self.layers:
            raise ValueError("fusion.layers is empty; name the blocks before which gated layers stand")
        block = CrossBlockConfig(
            visual_tokens=self.max_visual_tokens,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            ffn=self.ffn,
            gate_init=self.gate_init,
            blind=self.blind,
        )
        override = LayerOverride(layers=self.layers, block=block)
        for index in self.blocks(config.num_layers):
            self._require(index, config.layer(index), block, config.dim)
        return replace(config, overrides=[*config.overrides, override])

    def blocks(self, num_layers: int) -> list[int]:
        """Return the blocks after gated layers, rising."""
        return sorted({*LayerOverride(layers=self.layers).indices(num_layers)})

    def _require(self, index: int, layer: LayerConfig, block: CrossBlockConfig, dim: int) -> None:
        """Check that a gated layer can stand before a block."""
        if type(layer.block) is not StandardBlockConfig:
            raise ValueError(
                f"fusion.layers names layer {index}, whose block is a {type(layer.block).__name__}; gated "
                "layers stand before standard blocks"
            )
        ffn = block.feed_forward(layer)
        if ffn.expert_counts() or ffn.needs or layer.norm.needs:
            raise ValueError(
                f"the gated layer before layer {index} would have a {type(ffn).__name__} and a "
                f"{type(layer.norm).__name__}; it takes norms without side inputs, and dense feed-forwards, "
                "which fusion.ffn may give"
            )
        block.attention(layer, dim)

    def seed_of(self, name: str) -> str | None:
        """See `FusionConfig.seed_of`; gated layers are new."""
        return None if ".cross." in name else name

    def is_of_images(self, name: str) -> bool:
        """See `FusionConfig.is_of_images`; true for gated layers."""
        return name.endswith(".cross")

    def build(self, dim: int) -> nn.Module:
        """See `FusionConfig.build`."""
        from forge_vlm.fusion.cross_attention import Beside

        return Beside(self.max_visual_tokens, dim if self.place == "learned" else None)

    def places(self, visual_tokens: int) -> int:
        """See `FusionConfig.places`; one for any image."""
        return 1

    def arrays(
        self, places: np.ndarray, images: np.ndarray, doc_ids: np.ndarray, counts: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """See `FusionConfig.arrays`.

        `image_window` [2, T] int64: first and end index, in the sequence, of the visual tokens that a token
        sees; if it sees none, end and first index of those of its sample.

        Raises:
            ValueError: there is no room for the visual tokens.
        """
        if sum(counts) > self.max_visual_tokens:
            raise ValueError(
                f"{len(counts)} images have {sum(counts)} visual tokens, and model.fusion.max_visual_tokens "
                f"= {self.max_visual_tokens}; give fewer images, or train with more room "
                "(--model.fusion.max_visual_tokens, also beside model.from)"
            )
        offsets = np.cumsum([0, *counts], dtype=np.int64)
        starts = np.diff(doc_ids, prepend=doc_ids[:1] - 1) != 0  # where samples begin
        is_image = images > 0
        until = is_image.cumsum()  # images that stand at a token or before it
        before = until - is_image
        first = np.maximum.accumulate(np.where(starts, before, 0))
        number = starts.cumsum() - 1
        last = np.bincount(number, is_image).astype(np.int64)[number] + first
        blind = until == first
        if self.sees == "latest":
            goes_on = is_image & ~starts & np.roll(is_image, 1)
            first = np.maximum(first, np.maximum.accumulate(np.where(is_image & ~goes_on, before, 0)))
        low, high = np.where(blind, last, first), np.where(blind, first, until)
        window = np.stack([offsets[low], offsets[high]])
        return {"image_window": window, "image_places": np.array(offsets[-1])}

    def by_token(self) -> Sequence[str]:
        """See `FusionConfig.by_token`."""
        return ("image_window",)

    def side_inputs(self, tokens: Tensor, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """See `FusionConfig.side_inputs`."""
        window = inputs.get("image_window")
        none = tokens.new_zeros(len(tokens), 2, tokens.shape[1]) if window is None else window
        return {**inputs, "image_window": none}

    def after_prompt(self, tokens: Tensor, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """See `FusionConfig.after_prompt`; passes the images that the last prompt token sees."""
        return {
            "image_features": inputs["image_features"],
            "image_window": inputs["image_window"][..., -1:],
        }
