"""A tower, a connector and a decoder as one model. B batch, T tokens, P patches, n images, D width."""

from __future__ import annotations

from typing import Any

import torch
from forge_model.attention.cache import Cache
from forge_model.declared import joined, tensor_roles
from forge_model.decoder.decoder import Decoder
from forge_model.model import Model
from torch import Tensor, nn

from forge_vlm.config import VisionLanguageConfig
from forge_vlm.frames import frame_by_frame, merged

FED_BY = ["patches", "grids", "image_index", "image_places"]
"""Inputs that only the tower and the first stage need."""


class VisionLanguage(Model):
    """A vision-language model. Images are inputs like tokens, so that training code need not handle them.

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
        self.fusion = config.fusion.build(decoder.dim)
        self.decoder = decoder.build()  # type: ignore[assignment]

    def forward(
        self,
        tokens: Tensor,
        *,
        patches: Tensor | None = None,
        grids: Tensor | None = None,
        image_index: Tensor | None = None,
        image_places: Tensor | None = None,
        position_offsets: Tensor | None = None,
        hidden: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Encode the images, fuse them with the tokens, and run the decoder.

        Args:
            tokens: [B, T] int64; ids at places of visual tokens are ignored.
            patches: [P, 3 p p] uint8 of all images in their order; absent or empty if there are none.
            grids: [n, 3] frames, rows, columns of patches of each image, on the host.
            image_index: [B, T] 0 for text, else 1 + the number of the place in its row.
            image_places: [B] number of image places of each row.
            position_offsets: [B, axes, T] offsets that are added to the positions of tokens.
            hidden: output of the previous stage.
            inputs: see `FusionConfig.arrays` and `Decoder.forward`.
        """
        fusion = self.config.fusion
        inputs = fusion.side_inputs(tokens, inputs)
        if self.encoder is not None:
            assert self.fusion is not None
            if image_index is None or image_places is None:
                image_index, image_places = torch.zeros_like(tokens), tokens.new_zeros(len(tokens))
            features = self.visual_tokens(tokens.device, patches, grids)
            inputs |= self.fusion(self.decoder.embedded(tokens), features, image_index, image_places)
            hidden = inputs.pop("hidden", hidden)
        elif beside := fusion.tokens_beside:
            assert hidden is not None
            hidden, inputs[fusion.passed_on] = hidden.split([hidden.shape[1] - beside, beside], 1)
        if position_offsets is not None:
            inputs["positions"] = self.shifted(tokens, position_offsets, **inputs)
        out = self.decoder(tokens, hidden=hidden, **inputs)
        if (cache := inputs.get("cache")) is not None:
            cache.side |= fusion.after_prompt(tokens, inputs)
        if self.decoder.head is None and fusion.tokens_beside:
            return torch.cat([out, inputs[fusion.passed_on]], 1)
        return out

    def shifted(
        self,
        tokens: Tensor,
        offsets: Tensor,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        **others: Any,
    ) -> Tensor:
        """Return positions of tokens [B, T], by default counted, plus offsets: [B, T] or [B, axes, T]."""
        if positions is None and cache is not None:
            positions = cache.positions(tokens.shape[1])
            cache.shift = offsets[:, 0, -1]
        elif positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        counted = positions.expand_as(tokens)[:, None] + offsets
        return counted[:, 0] if offsets.shape[1] == 1 else counted

    def visual_tokens(self, device: torch.device, patches: Tensor | None, grids: Tensor | None) -> Tensor:
        """Return the visual tokens of all images in order, [V, D].

        Without images a blank one is encoded and not used, so that all ranks run the same modules.
        """
        assert self.encoder is not None and self.connector is not None
        if patches is None or grids is None or not len(patches):
            side, pixels = self.config.encoder.side, 3 * self.config.encoder.patch_size**2
            patches = torch.zeros(side * side, pixels, dtype=torch.uint8, device=device)
            grids = torch.tensor([[1, side, side]])
        frames = frame_by_frame(grids)
        features = self.connector(self.encoder(patches, frames), frames)
        if (video := self.config.video) is not None:
            features = merged(features, grids, self.config.picture_tokens, video.merge)
        return features

    @property
    def writer(self) -> Decoder:
        """See `Decoder.writer`; the answer to a prompt is text, so it is the decoder."""
        return self.decoder

    def new_cache(self, capacity: int, padding: Tensor | None, device: torch.device) -> Cache:
        """See `Decoder.new_cache`."""
        return self.decoder.new_cache(capacity, padding, device)

    def begin(self, tokens: Tensor, cache: Cache, **inputs: Tensor) -> Tensor:
        """See `Decoder.begin`."""
        return self(tokens, cache=cache, last_logits=1, **inputs)[:, -1]

    def _of_images(self) -> list[str]:
        """Return patterns of the modules of this stage that only images use."""
        before = {name: getattr(self, name) for name in ("encoder", "connector", "fusion")}
        whole = [name for name, part in before.items() if part is not None and [*part.parameters()]]
        numbered = (name.split(".") for name, _ in self.decoder.named_modules() if name)
        shapes = [".".join("*" if part.isdigit() else part for part in parts) for parts in numbered]
        inner = [f"decoder.{name}" for name in dict.fromkeys(shapes) if self.config.fusion.is_of_images(name)]
        return whole + inner

    def parallel_plan(self) -> dict[str, Any]:
        """Return the parallel plan of this model as plain data; see `forge_parallel.plan`."""
        decoder = self.decoder.parallel_plan()
        stages = decoder["stages"]
        fusion = {} if self.fusion is None else tensor_roles(self.fusion)
        mounts: dict[str, Any] = {}
        if self.encoder is not None:
            mounts["encoder"] = {"blocks": "layers.*", "tensor": {"": "unsharded"}}
            mounts["connector"] = {"blocks": [], "units": [[""]], "tensor": {"": "unsharded"}}
        by_token = self.config.items().by_token
        return {
            "blocks": [],
            "mounts": mounts | {"decoder": decoder},
            "tensor": {joined("fusion", name): role for name, role in fusion.items()},
            "host_inputs": ["grids", *self.config.fusion.host],
            "fed_by": dict.fromkeys(self._of_images(), FED_BY[:2]),
            "sequence_inputs": list(dict.fromkeys([*decoder["sequence_inputs"], *by_token])),
            "stages": stages
            | {
                "blocks": "decoder.layers.*",
                "first": ["encoder", "connector", "fusion", *(f"decoder.{n}" for n in stages["first"])],
                "last": [f"decoder.{name}" for name in stages["last"]],
                "tied": [f"decoder.{name}" for name in stages["tied"]],
                "first_cost": 0.0,
                "first_inputs": FED_BY,
                "extra_tokens": self.config.extra_tokens,
            },
        }
