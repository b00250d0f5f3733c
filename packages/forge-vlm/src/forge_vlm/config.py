"""What `[model]` holds with `type = "vision-language"`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_model.config import ComposedConfig, DecoderConfig, ModelConfig, models
from forge_model.model_config import Prompt

from forge_vlm.connectors.config import ConnectorConfig, LinearConfig
from forge_vlm.encoders import families as families  # registers them
from forge_vlm.encoders.config import EncoderConfig, ViTConfig
from forge_vlm.fusion.config import FusionConfig, JointConfig

if TYPE_CHECKING:
    from torch import nn

    from forge_vlm.images.reader import ImageReader


@models.register("vision-language")
class VisionLanguageConfig(ComposedConfig):
    """A tower that makes features of images, a connector that makes visual tokens of them, a decoder.

    Attributes:
        decoder: the language model, of type `decoder`.
        encoder: the tower.
        connector: from the features of the tower to visual tokens of the width of the decoder.
        fusion: how the decoder is given visual tokens.
    """

    decoder: ModelConfig
    encoder: EncoderConfig = ViTConfig()
    connector: ConnectorConfig = LinearConfig()
    fusion: FusionConfig = JointConfig()

    def __post_init__(self) -> None:
        if not isinstance(self.decoder, DecoderConfig):
            raise ValueError(f'model.decoder is a {type(self.decoder).__name__}; expected type = "decoder"')
        if self.image_tokens >= self.max_tokens:
            raise ValueError(
                f"an image has {self.image_tokens} visual tokens, and model.decoder.max_tokens = "
                f"{self.max_tokens} leaves no room for text; use a larger patch_size, or longer sequences"
            )

    @property
    def image_tokens(self) -> int:
        """Visual tokens of one square image."""
        return self.connector.tokens(self.encoder.side, self.encoder.side, self.encoder.extra)

    def language_model(self) -> tuple[str, ModelConfig]:
        """See `ComposedConfig.language_model`."""
        return "decoder", self.fused_decoder()

    def fused_decoder(self) -> DecoderConfig:
        """The decoder with the blocks that the fusion needs."""
        assert isinstance(self.decoder, DecoderConfig)
        return self.fusion.decoder(self.decoder)

    def build(self) -> nn.Module:
        """See `ModelConfig.build`."""
        from forge_vlm.model import VisionLanguage

        return VisionLanguage(self)

    def items(self) -> ImageReader:
        """See `ModelConfig.items`."""
        from forge_vlm.images.reader import ImageReader

        return ImageReader(self.encoder, self.connector, self.fusion)

    def prompt(self, text: str, images: Sequence[bytes], tokenizer: Any) -> Prompt:
        """See `ModelConfig.prompt`; images stand where `<image>` does in the text, or before it.

        Raises:
            ValueError: there are other images than marks in the text, or one is damaged.
        """
        from forge_vlm.images.prompt import prompt_of

        return prompt_of(self.items(), text, images, tokenizer)

    def require_axes(self, tp: int, cp: int, sequence: bool, method: str) -> None:
        """See `ModelConfig.require_axes`."""
        if cp > 1 and method == "gather" and "span_ids" in self.fusion.by_token():
            raise ValueError(
                "visual tokens that see all of their image see later ones, which context parallelism by "
                '"gather" does not have; set context_parallel.method = "ulysses", or mesh.cp = 1'
            )
        super().require_axes(tp, cp, sequence, method)

    def other_flops(self, shapes: Mapping[str, Sequence[int]]) -> float:
        """See `ComposedConfig.other_flops`; a tower that is frozen counts as if it were not."""
        images = shapes.get("grids", (0,))[0]
        if not images:
            return 0
        side = round((shapes["patches"][0] / images) ** 0.5)  # as if all images were squares of one size
        dim, width, extra = self.fused_decoder().dim, self.encoder.width, self.encoder.extra
        connector = self.connector.forward_flops(side, side, width, dim, extra)
        return images * (self.encoder.forward_flops(side, side) + connector)
