"""A tower, a connector and a decoder as one model. B batch, T tokens, P patches, n images, D width."""

from __future__ import annotations

from typing import Any

import torch
from forge_model.attention.cache import Cache
from forge_model.decoder.decoder import Decoder
from forge_model.model import Model
from torch import Tensor, nn

from forge_vlm.config import VisionLanguageConfig

FED_BY = ["patches", "grids", "image_index", "image_places"]
"""The inputs that only the tower and the first stage need."""


class VisionLanguage(Model):
    """Images are inputs like tokens: whoever trains the model knows nothing of them.

    Attributes:
        encoder: patches -> features; None on later stages of a pipeline.
        connector: features -> visual tokens.
        fusion: visual tokens -> inputs of the decoder.
        decoder: the language model.
    """

    encoder: nn.Module | None
    connector: nn.Module | None
    fusion: nn.Module | None
    decoder: Decoder

    def __init__(self, config: VisionLanguageConfig) -> None:
        super().__init__()
        decoder = config.fused_decoder()
        self.config, self.init_std = config, decoder.init_std
        self.encoder = config.encoder.build()
        self.connector = config.connector.build(config.encoder.width, decoder.dim, config.encoder.extra)
        self.fusion = config.fusion.build()
        self.decoder = decoder.build()  # type: ignore[assignment]

    def forward(
        self,
        tokens: Tensor,
        *,
        patches: Tensor | None = None,
        grids: Tensor | None = None,
        image_index: Tensor | None = None,
        image_places: Tensor | None = None,
        hidden: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """What the decoder returns.

        Args:
            tokens: [B, T] int64; what stands at places of visual tokens does not count.
            patches: [P, 3 p p] uint8 of all images in their order; absent or empty if there is none.
            grids: [n, 3] frames, rows, columns of patches of each image, on the host.
            image_index: [B, T] 0 for text, else 1 + the number of the visual token in its row.
            image_places: [B] visual tokens of each row.
            hidden: from the stage before.
            inputs: see `Decoder.forward`.
        """
        if self.encoder is not None:
            features, index = self.visual_tokens(tokens, patches, grids, image_index, image_places)
            assert self.fusion is not None
            inputs |= self.fusion(self.decoder.embedded(tokens), features, index)
            hidden = inputs.pop("hidden", hidden)
        return self.decoder(tokens, hidden=hidden, **inputs)

    def visual_tokens(
        self,
        tokens: Tensor,
        patches: Tensor | None,
        grids: Tensor | None,
        image_index: Tensor | None,
        image_places: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Those of all rows [V, D], and which of them stands where [B, T], 0 for text.

        Where there is no image, one is made up that stands nowhere: all ranks then compute the same modules.
        """
        assert self.encoder is not None and self.connector is not None
        if patches is None or grids is None or not len(patches):
            side, pixels = self.config.encoder.side, 3 * self.config.encoder.patch_size**2
            patches = torch.zeros(side * side, pixels, dtype=torch.uint8, device=tokens.device)
            grids = torch.tensor([[1, side, side]])
        features = self.connector(self.encoder(patches, grids), grids)
        if image_index is None or image_places is None:
            return features, torch.zeros_like(tokens)
        before = image_places.cumsum(0) - image_places
        return features, torch.where(image_index > 0, image_index + before[:, None], 0)

    @property
    def writer(self) -> Decoder:
        """See `Decoder.writer`: what follows a prompt is text."""
        return self.decoder

    def new_cache(self, capacity: int, padding: Tensor | None, device: torch.device) -> Cache:
        """See `Decoder.new_cache`."""
        return self.decoder.new_cache(capacity, padding, device)

    def begin(self, tokens: Tensor, cache: Cache, **inputs: Tensor) -> Tensor:
        """See `Decoder.begin`."""
        return self(tokens, cache=cache, last_logits=1, **inputs)[:, -1]

    def parallel_plan(self) -> dict[str, Any]:
        """What may be done to this model in parallel, as plain data; see `forge_parallel.plan`."""
        decoder = self.decoder.parallel_plan()
        stages = decoder["stages"]
        fusion = {} if self.fusion is None else getattr(self.fusion, "tensor_roles", {})
        mounts: dict[str, Any] = {}
        if self.encoder is not None:
            mounts["encoder"] = {"blocks": "layers.*", "tensor": {"": "unsharded"}, "inputs": FED_BY[:2]}
            mounts["connector"] = {
                "blocks": [],
                "units": [[""]],
                "tensor": {"": "unsharded"},
                "inputs": FED_BY[:2],
            }
        by_token = ["image_index", *self.config.fusion.by_token()]
        return {
            "blocks": [],
            "mounts": mounts | {"decoder": decoder},
            "tensor": {f"fusion.{name}": role for name, role in fusion.items()},
            "host_inputs": ["grids"],
            "sequence_inputs": list(dict.fromkeys([*decoder["sequence_inputs"], *by_token])),
            "stages": stages
            | {
                "blocks": "decoder.layers.*",
                "first": ["encoder", "connector", "fusion", "decoder.embed"],
                "last": [f"decoder.{name}" for name in stages["last"]],
                "first_cost": 0.0,
                "first_inputs": FED_BY,
            },
        }
