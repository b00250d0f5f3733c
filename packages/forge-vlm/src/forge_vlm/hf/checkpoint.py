"""How a vision-language model, or its tower, and a checkpoint of Hugging Face become another. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_config import plain
from forge_model import ModelError
from forge_model.hf.checkpoint import HuggingFace
from forge_model.hf.config import read_config
from forge_model.model_config import ModelConfig

from forge_vlm.config import VisionLanguageConfig
from forge_vlm.encoders.config import EncoderConfig, TowerConfig
from forge_vlm.hf.models import model_differences, model_from_hf, model_to_hf, whole_family
from forge_vlm.hf.processor import processed, processor_files
from forge_vlm.hf.towers import tower_differences, tower_from_hf, tower_to_hf

if TYPE_CHECKING:
    from torch import nn


class VisionLanguageCheckpoint(HuggingFace):
    """That of a whole model. See `forge_model.hf.checkpoint.HuggingFace`."""

    def __init__(self, model: VisionLanguageConfig) -> None:
        self._model = model

    def config(
        self,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
    ) -> dict[str, Any]:
        """See `HuggingFace.config`."""
        ids = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        written = model_to_hf(self._model)[1]
        known = {name: token for name, token in ids.items() if token is not None}
        return written | ids | {"text_config": written["text_config"] | known}

    def files(self, spell: Callable[[int], str]) -> dict[str, str]:
        """See `HuggingFace.files`: those of the processor."""
        token = spell(self._model.image_token_id or 0)
        return processor_files(self._model, model_to_hf(self._model)[0].kind, token)

    def theirs(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `HuggingFace.theirs`."""
        from forge_vlm.hf.model_tensors import ModelTensors

        return ModelTensors(self._model, model_to_hf(self._model)[0]).theirs(tensors)

    def ours(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `HuggingFace.ours`."""
        from forge_vlm.hf.model_tensors import ModelTensors

        return ModelTensors(self._model, model_to_hf(self._model)[0]).ours(tensors)

    def require(self, hf: Mapping[str, Any], place: str) -> ModelConfig:
        """See `HuggingFace.require`."""
        _require_none(model_differences(self._model, model_from_hf(hf)), place)
        return self._model


def _require_none(found: list[str], place: str) -> None:
    if found:
        listed = "".join(f"\n  {line}" for line in found)
        raise ModelError(
            f"{place} holds the weights of another model than [model] describes:{listed}\nChange these keys."
        )


class TowerPart(ModelConfig):
    """A tower as a part of which weights are asked for, such as `encoder` of `train.init_from`.

    Attributes:
        encoder: the tower.
    """

    encoder: EncoderConfig

    def build(self) -> nn.Module:
        """See `ModelConfig.build`."""
        return self.encoder.build()

    def hugging_face(self) -> TowerCheckpoint:
        """See `ModelConfig.hugging_face`."""
        return TowerCheckpoint(self)


class TowerCheckpoint(HuggingFace):
    """That of a tower, alone or beside a text tower. See `forge_model.hf.checkpoint.HuggingFace`."""

    def __init__(self, part: TowerPart) -> None:
        self._part = part

    def config(
        self,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
    ) -> dict[str, Any]:
        """See `HuggingFace.config`; a tower has no tokens."""
        return tower_to_hf(self._part.encoder)

    def theirs(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `HuggingFace.theirs`."""
        return self._tensors().theirs(tensors)

    def ours(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `HuggingFace.ours`."""
        return self._tensors().ours(tensors)

    def _tensors(self) -> Any:
        from forge_vlm.hf.tower_tensors import TowerTensors

        tower_to_hf(self._part.encoder)
        assert isinstance(self._part.encoder, TowerConfig)
        return TowerTensors(self._part.encoder)

    def require(self, hf: Mapping[str, Any], place: str) -> ModelConfig:
        """See `HuggingFace.require`."""
        _require_none(tower_differences(self._part.encoder, tower_from_hf(hf)), place)
        return self._part


def model_tree(folder: str, with_images: bool) -> dict[str, Any]:
    """The keys of `[model]` for the model in a folder, every default filled in.

    Args:
        folder: of Hugging Face.
        with_images: whether `images`, and the colours of the tower, are read from its image processor.

    Raises:
        ValueError: there is no `config.json`, or it, or the image processor, cannot be followed.
    """
    try:
        hf = read_config(folder)
        kind = whole_family(hf.get("model_type")).kind
        model = model_from_hf(hf)
        tree = plain(processed(model, Path(folder), kind) if with_images else model)
        return {key: value for key, value in tree.items() if key != "type"}
    except ModelError as error:
        raise ModelError(f"from = {folder!r}: {error}") from None
