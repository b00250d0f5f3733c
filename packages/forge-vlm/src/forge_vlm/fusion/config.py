"""What `[model.fusion]` holds: how a decoder is given visual tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from forge_config import Config, Registry
from forge_model.config import DecoderConfig

if TYPE_CHECKING:
    from torch import nn


class FusionConfig(Config):
    """Interface of `[model.fusion]`."""

    def decoder(self, config: DecoderConfig) -> DecoderConfig:
        """The decoder that is built: the one of the configuration, with the blocks that the fusion needs."""
        return config

    def build(self) -> nn.Module:
        """A module that makes inputs of the decoder of visual tokens; see `forge_vlm.fusion.joint.Joint`."""
        raise NotImplementedError

    def arrays(self, places: np.ndarray, images: np.ndarray, doc_ids: np.ndarray) -> dict[str, np.ndarray]:
        """What the model takes of a sequence beside `image_index` and `image_places`, by name.

        Args:
            places: [T] int64, 0 for text, else 1 + the number of the place in the sequence.
            images: [T] int64, 0 for text, else 1 + the number of the image in the sequence.
            doc_ids: [T] int64, the sample of each token.
        """
        return {}

    def by_token(self) -> Sequence[str]:
        """Those of `arrays` that have a value for each token."""
        return ()


fusions = Registry("fusion", FusionConfig, default="joint")


@fusions.register("joint")
class JointConfig(FusionConfig):
    """Visual tokens take the places of tokens, and the decoder sees one sequence (LLaVA, arXiv:2304.08485).

    Attributes:
        attention: what a visual token sees: `causal` as text does, or all of its `image`, in both directions.
    """

    attention: Literal["causal", "image"] = "causal"

    def build(self) -> nn.Module:
        """See `FusionConfig.build`."""
        from forge_vlm.fusion.joint import Joint

        return Joint()

    def arrays(self, places: np.ndarray, images: np.ndarray, doc_ids: np.ndarray) -> dict[str, np.ndarray]:
        """See `FusionConfig.arrays`."""
        return {} if self.attention == "causal" else {"span_ids": images}

    def by_token(self) -> Sequence[str]:
        """See `FusionConfig.by_token`."""
        return () if self.attention == "causal" else ("span_ids",)
