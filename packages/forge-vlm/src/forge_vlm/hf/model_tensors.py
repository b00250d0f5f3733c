"""Conversion between parameters of our vision-language models and tensors of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from forge_model import ModelError
from forge_model.config import DecoderConfig
from forge_model.hf.tensors import Made, Renamed, from_hf, require_names, tensors_of, to_hf

from forge_vlm.config import VisionLanguageConfig
from forge_vlm.encoders.config import TowerConfig
from forge_vlm.fusion.cross_attention_config import CrossAttentionConfig
from forge_vlm.hf.mllama_tensors import PLACE, GatedTensors
from forge_vlm.hf.models import WholeFamily
from forge_vlm.hf.tower_tensors import TowerTensors

Tensors = Mapping[str, Any]


class ModelTensors:
    """Converts the tensors of one model, one at a time.

    Each part of the model has its own names; a checkpoint adds a prefix to them.
    """

    def __init__(self, config: VisionLanguageConfig, family: WholeFamily) -> None:
        decoder = config.decoder
        assert isinstance(config.encoder, TowerConfig) and isinstance(decoder, DecoderConfig)
        self.family, tower = family, TowerTensors(config.encoder)
        with torch.device("meta"):
            connector = config.connector.build(config.encoder.width, decoder.dim, config.encoder.extra)
        names = {name: self._their_name(name) for name in tensors_of(connector)}
        back = {theirs: ours for ours, theirs in names.items()}
        self._theirs: dict[str, Callable[[Tensors], Tensors]] = {
            "encoder": tower.theirs,
            "connector": lambda tensors: Renamed(tensors, back),
            "decoder": lambda tensors: to_hf(tensors, decoder),
        }
        self._ours: dict[str, Callable[[Tensors], Tensors]] = {
            "encoder": tower.ours,
            "connector": lambda tensors: self._connected(tensors, names),
            "decoder": lambda tensors: from_hf(tensors, decoder),
        }
        if isinstance(config.fusion, CrossAttentionConfig):
            gated = GatedTensors(config)
            self._theirs["decoder"], self._ours["decoder"] = gated.theirs, gated.ours

    def _their_name(self, name: str) -> str:
        module, _, leaf = name.rpartition(".")
        return f"{self.family.connector[module]}.{leaf}".lstrip(".")

    def _connected(self, tensors: Tensors, names: Mapping[str, str]) -> Tensors:
        require_names(tensors, names.values(), f"the connector of this {self.family.kind}")
        return Renamed(tensors, names)

    def theirs(self, tensors: Tensors) -> Tensors:
        """Return our tensors under Hugging Face names.

        Raises:
            ModelError: a parameter has no counterpart.
        """
        parts: dict[str, dict[str, str]] = {part: {} for part in self._theirs}
        for name in tensors:
            part, _, inner = name.partition(".")
            part = "decoder" if name == f"fusion.{PLACE}" else part
            if part not in parts:
                raise ModelError(f"{name} has no counterpart in a {self.family.kind} checkpoint")
            parts[part][inner] = name
        found = {part: self._theirs[part](Renamed(tensors, names)) for part, names in parts.items()}
        return Made(
            {self._whole(part, key): partial(of.__getitem__, key) for part, of in found.items() for key in of}
        )

    def _whole(self, part: str, key: str) -> str:
        """Return the name in the checkpoint of a key of a part."""
        tower, connector, text, head = self.family.prefixes[0]
        if part == "decoder":
            inner = key.removeprefix("model.")
            return f"{head}{key}" if inner == key else f"{text}{inner}"
        return f"{tower if part == 'encoder' else connector}{key}"

    def ours(self, tensors: Tensors) -> Tensors:
        """Return Hugging Face tensors under our names.

        Raises:
            ModelError: a tensor is missing or unexpected; lists them all.
        """
        tower, connector, text, head = self._prefixes(tensors)
        parts: dict[str, dict[str, str]] = {part: {} for part in self._ours}
        for name in tensors:
            if name.startswith(tower):
                parts["encoder"][name.removeprefix(tower)] = name
            elif name.startswith(connector):
                parts["connector"][name.removeprefix(connector)] = name
            elif name.startswith(text):
                parts["decoder"][f"model.{name.removeprefix(text)}"] = name
            elif name == f"{head}lm_head.weight":
                parts["decoder"]["lm_head.weight"] = name
            else:
                raise ModelError(f"a checkpoint of a {self.family.kind} with {name}, which is of no part")
        found = {part: self._ours[part](Renamed(tensors, names)) for part, names in parts.items()}
        makers = {(part, key): partial(of.__getitem__, key) for part, of in found.items() for key in of}
        return Made(
            {f"{'fusion' if key == PLACE else part}.{key}": make for (part, key), make in makers.items()}
        )

    def _prefixes(self, tensors: Tensors) -> tuple[str, str, str, str]:
        """Return the prefixes of `PREFIXES` that a checkpoint uses."""
        for prefixes in self.family.prefixes:
            if any(name.startswith(prefixes[1]) for name in tensors):
                return prefixes
        known = " or ".join(prefixes[1] for prefixes in self.family.prefixes)
        raise ModelError(f"not a checkpoint of a {self.family.kind}: no tensor begins with {known}")
