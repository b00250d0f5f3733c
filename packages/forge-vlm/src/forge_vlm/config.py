"""The section `[model]` with `type = "vision-language"`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from forge_config import Meta, sentences_from
from forge_model.config import ComposedConfig, DecoderConfig, ModelConfig, models
from forge_model.decoder.config import over
from forge_model.model_config import Prompt
from msgspec import field

from forge_vlm.connectors.config import ConnectorConfig, LinearConfig, ResamplerConfig
from forge_vlm.encoders import families as families  # registers them
from forge_vlm.encoders.config import EncoderConfig, ViTConfig
from forge_vlm.fusion.config import FusionConfig, JointConfig
from forge_vlm.fusion.cross_attention_config import CrossAttentionConfig as CrossAttentionConfig  # registers
from forge_vlm.fusion.mixture_of_transformers_config import (
    MixtureOfTransformersConfig as MixtureOfTransformersConfig,  # registers its type
)
from forge_vlm.fusion.moma_config import MomaConfig as MomaConfig  # registers its type
from forge_vlm.images.config import ImagesConfig
from forge_vlm.images.positions import AXES, PositionKind, grid_of
from forge_vlm.images.video import VideoConfig

if TYPE_CHECKING:
    from forge_model.hf.checkpoint import HuggingFace
    from torch import nn

    from forge_vlm.images.reader import ImageReader


@models.register("vision-language")
class VisionLanguageConfig(ComposedConfig):
    """A tower that makes features of images, a connector that makes visual tokens of them, a decoder.

    Attributes:
        from: fills in all absent keys from the `config.json` in this Hugging Face folder and, unless `images`
            are given, from its image processor. The run keeps the keys, not the folder.
        decoder: the language model, of type `decoder`.
        encoder: the tower.
        connector: converts features of the tower to visual tokens of the width of the decoder.
        fusion: how the decoder gets visual tokens.
        images: how images become pictures of the size of the tower.
        positions: kind of positions of visual tokens; see `forge_vlm.images.positions.PositionKind`.
        image_token_id: id of the token at image places in a Hugging Face checkpoint; only an export needs it.
        video: how videos become frames; absent means that there are none.
    """

    free_keys = ("image_token_id",)

    from_: str | None = field(default=None, name="from")
    decoder: ModelConfig
    encoder: EncoderConfig = ViTConfig()
    connector: ConnectorConfig = LinearConfig()
    fusion: FusionConfig = JointConfig()
    images: ImagesConfig = ImagesConfig()
    positions: PositionKind = "sequential"
    image_token_id: Annotated[int, Meta(ge=0)] | None = None
    video: VideoConfig | None = None

    @classmethod
    def expand(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Lay the keys of `[model]` over those of the folder named by `from`.

        Raises:
            ValueError: the folder has no model that can be read.
        """
        if not isinstance(tree.get("from"), str):
            return tree
        from forge_vlm.hf.checkpoint import model_tree

        found = model_tree(tree["from"], with_images="images" not in tree)
        return over(found, {key: tree[key] for key in tree if key != "from"})

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if not isinstance(self.decoder, DecoderConfig):
            yield f'model.decoder is a {type(self.decoder).__name__}; expected type = "decoder"'
            return
        if self.fusion.places(self.image_tokens) >= self.max_tokens:
            yield (
                f"an image has {self.image_tokens} visual tokens, and model.decoder.max_tokens = "
                f"{self.max_tokens} leaves no room for text; use a larger patch_size, or longer sequences"
            )
        if self.video is not None and (most := self._video_tokens(self.video)) >= self.max_tokens:
            yield (
                f"a video has up to {most} visual tokens ({self.video.max_frames} frames), and "
                f"model.decoder.max_tokens = {self.max_tokens} leaves no room for text; use fewer frames, a "
                "larger video.merge, or longer sequences"
            )
        side = self.encoder.side
        if (
            isinstance(self.connector, ResamplerConfig)
            and self.encoder.extras(side, 2 * side) > self.encoder.extra
        ):
            yield (
                f"a resampler after a {type(self.encoder).__name__}, which has a class token for each tile; "
                'use connector.type = "linear" or "mlp"'
            )
        most = self.vocab_size + self.fusion.ids_behind
        if self.image_token_id is not None and self.image_token_id >= most:
            yield (
                f"model.image_token_id = {self.image_token_id}; expected an id from "
                f"{self.vocab_size * bool(self.fusion.ids_behind)} to {most - 1}, where "
                f"model.decoder.vocab_size = {self.vocab_size}"
            )
        yield from self._beside(self.fusion.tokens_beside)
        if self.positions == "grid":
            yield from self._axes_of_positions(self.decoder)

    def _video_tokens(self, video: VideoConfig) -> int:
        return -(-video.max_frames // video.merge) * self.image_tokens

    def _beside(self, most: int) -> Iterator[str]:
        """Yield contradictions of visual tokens beside a sequence with room for `most`; 0 means in it."""
        if most and self.image_tokens > most:
            yield (
                f"an image has {self.image_tokens} visual tokens, and model.fusion.max_visual_tokens = "
                f"{most}; use a larger patch_size, or a larger max_visual_tokens"
            )
        if most and self.positions != "sequential":
            yield (
                f'positions = "{self.positions}" with visual tokens that stand beside the sequence, and have '
                'no positions; use positions = "sequential"'
            )

    def _axes_of_positions(self, decoder: DecoderConfig) -> Iterator[str]:
        if self.encoder.extra:
            yield (
                'positions = "grid", and encoder.class_token = true makes a visual token without a place; '
                "leave one of them out"
            )
        else:
            yield from sentences_from(grid_of, self.connector, self.encoder.side, self.encoder.side)
        for number in range(decoder.num_layers):
            rope = decoder.layer(number).rope
            axes = len(getattr(rope, "sections", ()))
            if rope.rotates and axes != AXES["grid"]:
                yield (
                    f'positions = "grid" has {AXES["grid"]} axes, and the rotation of layer {number} has '
                    f'{axes or 1}; set rope = {{ type = "mrope", sections = [...] }} with 3 sections'
                )
                break

    @property
    def item_tokens(self) -> int:
        """See `ModelConfig.item_tokens`; counts one square image as one picture."""
        return self.fusion.places(self.image_tokens)

    @property
    def tokenizer_ids(self) -> int:
        """See `ModelConfig.tokenizer_ids`: ids of image places are never looked up."""
        return max(self.vocab_size, 1 + (self.image_token_id or 0))

    @property
    def image_tokens(self) -> int:
        """Number of visual tokens of one square image."""
        return self.picture_tokens(self.encoder.side, self.encoder.side)

    def picture_tokens(self, rows: int, columns: int) -> int:
        """Return the number of visual tokens of a picture with so many rows and columns of patches."""
        return self.connector.tokens(rows, columns, self.encoder.extras(rows, columns))

    def language_model(self) -> tuple[str, ModelConfig]:
        """See `ComposedConfig.language_model`."""
        return "decoder", self.fused_decoder()

    def fused_decoder(self) -> DecoderConfig:
        """Return the decoder with the blocks that the fusion needs."""
        assert isinstance(self.decoder, DecoderConfig)
        return self.fusion.decoder(self.decoder)

    def seeds(self) -> dict[str, ModelConfig]:
        """See `ModelConfig.seeds`."""
        from forge_vlm.hf.checkpoint import TowerPart

        return {"decoder": self.decoder, "encoder": TowerPart(encoder=self.encoder)}

    def seed_of(self, name: str) -> str | None:
        """See `ModelConfig.seed_of`."""
        part, _, inner = name.partition(".")
        if part != "decoder":
            return name
        seed = self.fusion.seed_of(inner)
        return None if seed is None else f"decoder.{seed}"

    def hugging_face(self) -> HuggingFace:
        """See `ModelConfig.hugging_face`."""
        from forge_vlm.hf.checkpoint import form_of_model

        return form_of_model(self)

    def build(self) -> nn.Module:
        """See `ModelConfig.build`."""
        from forge_vlm.model import VisionLanguage

        return VisionLanguage(self)

    def items(self) -> ImageReader:
        """See `ModelConfig.items`."""
        from forge_vlm.images.reader import ImageReader

        return ImageReader(self.encoder, self.connector, self.fusion, self.images, self.positions, self.video)

    def prompt(self, text: str, images: Sequence[bytes], tokenizer: Any) -> Prompt:
        """See `ModelConfig.prompt`; images stand at `<image>` in the text, or before it.

        Raises:
            ValueError: there are not as many images as marks in the text, or an image is damaged.
        """
        from forge_vlm.images.prompt import prompt_of

        return prompt_of(self.items(), text, images, tokenizer)

    @property
    def extra_tokens(self) -> int:
        """See `ModelConfig.extra_tokens`."""
        return self.fusion.tokens_beside

    def require_axes(self, tp: int, cp: int, sequence: bool, method: str) -> None:
        """See `ModelConfig.require_axes`."""
        self.fusion.require_axes(tp, cp, sequence, method)
        super().require_axes(tp, cp, sequence, method)

    def other_flops(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, float]:
        """See `ComposedConfig.other_flops`."""
        side, decoder, width = self.encoder.side, self.fused_decoder(), self.encoder.width
        images = shapes.get("patches", (0,))[0] / side**2  # as if all were squares
        connector = self.connector.forward_flops(side, side, width, decoder.dim, self.encoder.extra)
        return {
            "encoder": images * self.encoder.forward_flops(side, side),
            "connector": images * connector,
            "decoder": self.fusion.other_flops(decoder, round(images * self.image_tokens)),
        }
