"""The section `[model.fusion]` with `type = "mixture-of-transformers"`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from forge_model.config import (
    DecoderConfig,
    GroupedQueryConfig,
    LayerConfig,
    LayerOverride,
    NormConfig,
    RMSNormConfig,
    StandardBlockConfig,
    blocks,
    norms,
)
from forge_model.side_inputs import Needs
from msgspec.structs import replace

from forge_vlm.fusion.config import fusions
from forge_vlm.fusion.modalities_config import MODALITIES, SORTED, ModalitiesConfig

if TYPE_CHECKING:
    from torch import Tensor, nn


@norms.register("by-modality")
class ModalityNormConfig(NormConfig):
    """Two norms; the modality of a token chooses one.

    Attributes:
        norm: the norm of each modality.
    """

    needs: ClassVar[Needs] = {"modality": "token"}

    norm: NormConfig = RMSNormConfig()

    def build(self, dim: int) -> nn.Module:
        """See `NormConfig.build`."""
        from forge_vlm.fusion.mixture_of_transformers import ModalityNorm

        return ModalityNorm(self.norm, dim)


@blocks.register("mixture-of-transformers")
class ModalityBlockConfig(StandardBlockConfig):
    """A standard block with its own weights for each modality; all modalities share one attention."""

    needs: ClassVar[Needs] = SORTED

    def build(self, layer: LayerConfig, dim: int) -> nn.Module:
        """See `BlockConfig.build`."""
        from forge_vlm.fusion.mixture_of_transformers import ModalityBlock

        norm = layer.norm.norm if isinstance(layer.norm, ModalityNormConfig) else layer.norm
        return ModalityBlock(replace(layer, norm=norm), dim)


@fusions.register("mixture-of-transformers")
class MixtureOfTransformersConfig(ModalitiesConfig):
    """All weights but embeddings and head exist twice, for text and for images; one attention is shared.

    Liang et al. 2024, arXiv:2411.04996 algorithm 1. A token costs as much as in the dense decoder.
    `norm_order` of the decoder says where norms are: the paper's code has them after the parts ("reordered").
    """

    def decoder(self, config: DecoderConfig) -> DecoderConfig:
        """See `FusionConfig.decoder`."""
        self.require_layers(config)
        if config.norm.needs:
            raise ValueError(
                f"a {type(config.norm).__name__} needs side inputs; choose a norm that needs none"
            )
        every = LayerOverride(layers=":", block=ModalityBlockConfig())
        norm = ModalityNormConfig(eps=config.norm.eps, norm=config.norm)
        return replace(config, norm=norm, overrides=[*config.overrides, every])

    def seed_of(self, name: str) -> str | None:
        """See `FusionConfig.seed_of`; both copies start from the weights of the text model."""
        return ".".join(part for part in name.split(".") if part not in MODALITIES)

    def require_layer(self, index: int, layer: LayerConfig) -> None:
        """See `ModalitiesConfig.require_layer`."""
        attention = layer.attention
        if not isinstance(attention, GroupedQueryConfig) or attention.sinks:
            raise ValueError(
                f"layer {index} has a {type(attention).__name__} or sinks; a mixture of transformers takes "
                'attention.type = "gqa" without sinks'
            )
        if layer.ffn.expert_counts() or layer.ffn.needs:
            raise ValueError(
                f"layer {index} has a {type(layer.ffn).__name__}; a mixture of transformers is made of dense "
                'feed-forwards, fusion.type = "moma" has experts'
            )

    def side_inputs(self, tokens: Tensor, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """See `FusionConfig.side_inputs`; adds `modality` for the last norm."""
        modality = inputs.get("modality")
        given = tokens.new_zeros(tokens.shape) if modality is None else modality
        return super().side_inputs(tokens, inputs) | {"modality": given}
