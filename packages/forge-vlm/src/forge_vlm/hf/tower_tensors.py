"""Conversion between parameters of our towers and tensors of Hugging Face. D width, p size of a patch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from forge_model import ModelError
from forge_model.hf.tensors import Made, require_names, tensors_of
from torch import Tensor

from forge_vlm.encoders.config import TowerConfig
from forge_vlm.hf.towers import TowerFamily, tower_family


def their_name(family: TowerFamily, name: str, layers: int) -> str:
    """Return the Hugging Face name of our parameter: layers.3.ffn.w_up.bias -> encoder.layers.3.mlp.fc1.bias.

    Blocks from the number `layers` on are numbered from 0 again.
    """
    if name in family.names:
        return family.names[name]
    if not name.startswith("layers."):
        module, _, leaf = name.rpartition(".")
        return f"{family.names[module]}.{leaf}"
    _, index, inner = name.split(".", 2)
    module, _, leaf = inner.rpartition(".")
    theirs = family.names.get(inner) or f"{family.names[module]}.{leaf}"
    if (number := int(index)) >= layers:
        return f"{family.names['last layers']}.{number - layers}.{theirs}"
    return f"{family.names['layers']}.{index}.{theirs}"


class TowerTensors:
    """Converts the tensors of one tower, one at a time."""

    def __init__(self, config: TowerConfig) -> None:
        self.config, self.family = config, tower_family(config)
        with torch.device("meta"):
            self._ours = tensors_of(config.build())
        self._swiglu = getattr(config, "ffn_type", "mlp") == "swiglu"

    def theirs(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return our tensors under Hugging Face names."""
        makers: dict[str, Callable[[], Any]] = {}
        for name in self._ours:
            if self._swiglu and ".ffn." in name:
                makers |= self._fused(name, tensors)
            else:
                makers[their_name(self.family, name, self.config.num_layers)] = partial(
                    self._to_theirs, name, tensors
                )
        return Made(makers)

    def _fused(self, name: str, tensors: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
        """Return makers of Hugging Face tensors; DINOv2 stores gate and up projection as one matrix."""
        layer, leaf = name.split(".ffn.")[0], name.rpartition(".")[2]
        prefix = f"{self.family.names['layers']}.{layer.split('.')[1]}.mlp"
        if "w_down" in name:
            return {f"{prefix}.weights_out.{leaf}": partial(tensors.__getitem__, name)}
        parts = [f"{layer}.ffn.w_gate.{leaf}", f"{layer}.ffn.w_up.{leaf}"]
        return {f"{prefix}.weights_in.{leaf}": lambda: torch.cat([tensors[part] for part in parts])}

    def _to_theirs(self, name: str, tensors: Mapping[str, Any]) -> Tensor:
        tensor, size = tensors[name], self.config.patch_size
        if name == "patches.weight" and self.family.model_type != "siglip2_vision_model":
            return tensor.unflatten(1, (size, size, 3)).permute(0, 3, 1, 2).contiguous()
        if self.family.model_type == "dinov2" and name in ("positions.weight", "class_token.weight"):
            return tensor.view(1, -1, tensor.shape[-1])
        return tensor

    def ours(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return Hugging Face tensors under our names, without those of a text model and the tower's head.

        Raises:
            ModelError: a tensor is missing or unexpected; lists them all.
        """
        prefix, wanted = self._prefix(tensors), dict[str, str]()
        for name in self._ours:
            if self._swiglu and ".ffn." in name:
                (wanted[name],) = self._fused(name, {})
            else:
                wanted[name] = their_name(self.family, name, self.config.num_layers)
        there = {key.removeprefix(prefix) for key in tensors if key.startswith(prefix)}
        there = [key for key in there if key in wanted.values() or not key.startswith(self.family.ignored)]
        require_names(there, wanted.values(), f"the tower of a {self.family.model_type}")
        return Made(
            {name: partial(self._to_ours, name, f"{prefix}{key}", tensors) for name, key in wanted.items()}
        )

    def _prefix(self, tensors: Mapping[str, Any]) -> str:
        """Return the prefix of the names of a tower that is part of a model."""
        key = their_name(self.family, "patches.weight", 1)
        found = [name.removesuffix(key) for name in tensors if name.endswith(key)]
        if len(found) != 1:
            raise ModelError(f"expected one tensor {key}; found {len(found)}")
        return found[0]

    def _to_ours(self, name: str, key: str, tensors: Mapping[str, Any]) -> Tensor:
        tensor = tensors[key]
        if name == "patches.weight" and tensor.ndim == 4:
            return tensor.permute(0, 2, 3, 1).flatten(1)
        if name in ("positions.weight", "class_token.weight"):
            return tensor.reshape(self._ours[name].shape) if tensor.ndim == 3 else tensor
        if self._swiglu and ".ffn.w_" in name and "w_down" not in name:
            return tensor.chunk(2)["w_up" in name]
        return tensor
