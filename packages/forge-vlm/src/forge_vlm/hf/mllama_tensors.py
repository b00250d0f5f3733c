"""Conversion between our decoder with gated layers and the tensors of Mllama's text model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from forge_model import ModelError
from forge_model.config import DecoderConfig
from forge_model.hf.tensors import Made, Renamed, from_hf, require_names, tensors_of, to_hf
from torch import Tensor

from forge_vlm.config import VisionLanguageConfig
from forge_vlm.fusion.cross_attention_config import RESERVED, CrossAttentionConfig

CROSS = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "cross_attn.q_proj.weight",
    "attention.wk.weight": "cross_attn.k_proj.weight",
    "attention.wv.weight": "cross_attn.v_proj.weight",
    "attention.wo.weight": "cross_attn.o_proj.weight",
    "attention.q_norm.weight": "cross_attn.q_norm.weight",
    "attention.k_norm.weight": "cross_attn.k_norm.weight",
    "attention_gate.weight": "cross_attn_attn_gate",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.w_gate.weight": "mlp.gate_proj.weight",
    "ffn.w_up.weight": "mlp.up_proj.weight",
    "ffn.w_down.weight": "mlp.down_proj.weight",
    "ffn_gate.weight": "cross_attn_mlp_gate",
}
"""Names inside a gated layer, ours to theirs."""

EMBED, PLACE = "model.embed_tokens.weight", "place.weight"


class GatedTensors:
    """Converts the tensors of a decoder with gated layers, and the embedding of image places."""

    def __init__(self, config: VisionLanguageConfig) -> None:
        decoder, fusion = config.decoder, config.fusion
        assert isinstance(decoder, DecoderConfig) and isinstance(fusion, CrossAttentionConfig)
        self._decoder, self._image = decoder, (config.image_token_id or 0) - decoder.vocab_size
        blocks, kinds = fusion.blocks(decoder.num_layers), list[str]()
        for block in range(decoder.num_layers):
            kinds += [f"layers.{block}.cross."] * (block in blocks) + [f"model.layers.{block}."]
        self._layers = {ours: f"model.layers.{place}." for place, ours in enumerate(kinds)}
        with torch.device("meta"):
            ours = tensors_of(config.fused_decoder().build())
        self._gated = {name: self._their_name(name) for name in ours if ".cross." in name}

    def _their_name(self, name: str) -> str:
        layer, _, inner = name.partition(".cross.")
        if inner not in CROSS:
            raise ModelError(f"{name} has no counterpart in a checkpoint of Mllama")
        return f"{self._layers[f'{layer}.cross.']}{CROSS[inner]}"

    def theirs(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return our tensors under Hugging Face names."""
        own = {name: name for name in tensors if name != PLACE and name not in self._gated}
        text = to_hf(Renamed(tensors, own), self._decoder)
        makers: dict[str, Callable[[], Any]] = {
            self._moved(key): partial(text.__getitem__, key) for key in text
        }
        makers |= {theirs: partial(tensors.__getitem__, name) for name, theirs in self._gated.items()}
        return Made(makers | {EMBED: lambda: self._extended(text[EMBED], tensors[PLACE])})

    def _moved(self, key: str) -> str:
        """Return the name of a tensor with the layer number that counts gated layers, too."""
        for ours, theirs in self._layers.items():
            if key.startswith(ours):
                return theirs + key.removeprefix(ours)
        return key

    def _extended(self, embed: Tensor, place: Tensor) -> Tensor:
        """[V, D] -> [V + 8, D]: appends the image token, and zeros for tokens that are never trained."""
        reserved = embed.new_zeros(RESERVED, embed.shape[1])
        reserved[self._image] = place
        return torch.cat([embed, reserved])

    def ours(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return Hugging Face tensors under our names.

        Raises:
            ModelError: a tensor is missing or unexpected; lists them all.
        """
        back = {theirs: ours for ours, theirs in self._layers.items()}
        text = dict[str, str]()
        for name in tensors:
            layer = ".".join(name.split(".")[:3]) + "."
            if (ours := back.get(layer)) is None:
                text[name] = name
            elif not ours.endswith(".cross."):
                text[ours + name.removeprefix(layer)] = name
        found = from_hf(Renamed(tensors, text), self._decoder)
        require_names(tensors, {*text.values(), *self._gated.values()}, "a checkpoint of this model")
        vocabulary = self._decoder.vocab_size
        makers: dict[str, Callable[[], Any]] = {key: partial(found.__getitem__, key) for key in found}
        makers |= {ours: partial(tensors.__getitem__, theirs) for ours, theirs in self._gated.items()}
        makers["embed.weight"] = lambda: tensors[EMBED][:vocabulary]
        return Made(makers | {PLACE: lambda: tensors[EMBED][vocabulary + self._image]})
