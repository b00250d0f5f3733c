"""The base of fusions with separate weights for text and for visual tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from forge_model.config import DecoderConfig, LayerConfig, StandardBlockConfig
from forge_model.side_inputs import Needs

from forge_vlm.fusion.config import JointConfig

if TYPE_CHECKING:
    from torch import Tensor

MODALITIES = ("text", "image")
"""The modalities, by their numbers in `modality`; 2 is padding. A token uses the weights of its own."""

SORTED: Needs = {"modality_order": "other", "modality_inverse": "other", "modality_counts": "other"}
"""The side inputs of `forge_vlm.fusion.modalities.Sorted`."""


class ModalitiesConfig(JointConfig):
    """Visual tokens replace the tokens at image places; the modality of a token chooses its weights.

    Attributes:
        padding: whether padding is a modality of its own, which uses no weights.
    """

    host: ClassVar[frozenset[str]] = frozenset({"modality_sizes"})
    padding: ClassVar[bool] = False

    def require_layers(self, config: DecoderConfig) -> None:
        """Check that all layers are standard blocks without side inputs.

        Raises:
            ValueError: they are not, or the decoder predicts more than the next token.
        """
        name = type(self).__name__
        if config.mtp.num_modules:
            raise ValueError(
                f"mtp.num_modules = {config.mtp.num_modules} with a {name}: nobody makes the modalities of "
                "tokens further on; use 0"
            )
        for index in range(config.num_layers):
            layer = config.layer(index)
            if type(layer.block) is not StandardBlockConfig or layer.norm.needs:
                raise ValueError(
                    f"layer {index} has a {type(layer.block).__name__} with a {type(layer.norm).__name__}; a "
                    f"{name} takes standard blocks whose norms need no side inputs"
                )
            self.require_layer(index, layer)

    def require_layer(self, index: int, layer: LayerConfig) -> None:
        """Check that the fusion supports a layer."""

    def is_of_images(self, name: str) -> bool:
        """See `FusionConfig.is_of_images`; true for the copies for images."""
        return name.split(".")[-1] == "image"

    def arrays(
        self, places: np.ndarray, images: np.ndarray, doc_ids: np.ndarray, counts: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """See `FusionConfig.arrays`.

        `modality` [T] int64: 0 text, 1 a visual token, 2 padding; `modality_sizes` [2]: the numbers of visual
        and of padding tokens.
        """
        modality = np.where(places > 0, 1, np.where(doc_ids < 0, 2, 0))
        sizes = np.array([(modality == 1).sum(), (modality == 2).sum()])
        both = {"modality": modality, "modality_sizes": sizes}
        return super().arrays(places, images, doc_ids, counts) | both

    def by_token(self) -> Sequence[str]:
        """See `FusionConfig.by_token`."""
        return (*super().by_token(), "modality")

    def side_inputs(self, tokens: Tensor, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """See `FusionConfig.side_inputs`."""
        from forge_vlm.fusion.modalities import Sorted

        given = dict(inputs)
        modality, sizes = given.pop("modality", None), given.pop("modality_sizes", None)
        return given | Sorted.of(tokens, modality, sizes, self.padding).side_inputs()

    def after_prompt(self, tokens: Tensor, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """See `FusionConfig.after_prompt`; all these tokens are text."""
        return self.side_inputs(tokens[:, :1], {})

    def require_axes(self, tp: int, cp: int, sequence: bool, method: str) -> None:
        """See `FusionConfig.require_axes`."""
        if cp > 1:
            raise ValueError(
                f"a {type(self).__name__} sorts tokens by modality, of which a part of a sequence has a "
                "number that the host does not know; set mesh.cp = 1"
            )
