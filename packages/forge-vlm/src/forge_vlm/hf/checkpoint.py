"""Conversion between a vision-language model, or its tower, and a Hugging Face checkpoint. No torch."""

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
from forge_vlm.encoders.config import EncoderConfig
from forge_vlm.hf.models import model_differences, model_from_hf, model_to_hf, whole_family
from forge_vlm.hf.processor import no_processor, processed, processor_files
from forge_vlm.hf.towers import tower_differences, tower_from_hf, tower_to_hf

if TYPE_CHECKING:
    from torch import nn


class Form(HuggingFace):
    """A full model, or a tower, in the format of `transformers`.

    Args:
        written: returns its `config.json`.
        tensors: returns an object with `theirs` and `ours`.
        unlike: returns the differences between `made_for` and the model of another `config.json`.
        made_for: the result of `require`.
        files: see `HuggingFace.files`; takes the texts of the token at places and of the first token.
        lacks: see `HuggingFace.lacks`; takes the same texts.
    """

    def __init__(
        self,
        written: Callable[[], dict[str, Any]],
        tensors: Callable[[], Any],
        unlike: Callable[[Mapping[str, Any]], list[str]],
        made_for: ModelConfig,
        files: Callable[[str, str], dict[str, str]] = lambda token, first: {},
        lacks: Callable[[str, str], str] = lambda token, first: "",
    ) -> None:
        self._written, self._tensors, self._unlike = written, tensors, unlike
        self._made_for, self._files, self._lacks = made_for, files, lacks

    def config(self) -> dict[str, Any]:
        """See `HuggingFace.config`."""
        return self._written()

    def files(self, spell: Callable[[int | None], str]) -> dict[str, str]:
        """See `HuggingFace.files`; returns the files of the processor."""
        return self._files(*self._spelled(spell))

    def lacks(self, spell: Callable[[int | None], str]) -> str:
        """See `HuggingFace.lacks`."""
        return self._lacks(*self._spelled(spell))

    def _spelled(self, spell: Callable[[int | None], str]) -> tuple[str, str]:
        token = getattr(self._made_for, "image_token_id", None)
        return "" if token is None else spell(token), spell(None)

    def theirs(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `HuggingFace.theirs`."""
        return self._tensors().theirs(tensors)

    def ours(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `HuggingFace.ours`."""
        return self._tensors().ours(tensors)

    def require(self, hf: Mapping[str, Any], place: str) -> ModelConfig:
        """See `HuggingFace.require`."""
        if found := self._unlike(hf):
            listed = "".join(f"\n  {line}" for line in found)
            raise ModelError(
                f"{place} holds the weights of another model than [model] describes:{listed}\nChange these "
                "keys."
            )
        return self._made_for


def form_of_model(model: VisionLanguageConfig) -> Form:
    """Return the checkpoint form of a full model."""

    def tensors() -> Any:
        from forge_vlm.hf.model_tensors import ModelTensors

        return ModelTensors(model, model_to_hf(model)[0])

    return Form(
        lambda: model_to_hf(model)[1],
        tensors,
        lambda hf: model_differences(model, model_from_hf(hf)),
        model,
        lambda *spelled: processor_files(model, model_to_hf(model)[0].kind, *spelled),
        lambda *spelled: no_processor(model_to_hf(model)[0].kind, *spelled),
    )


class TowerPart(ModelConfig):
    """A tower as a part that can be initialized from weights, such as `encoder` of `train.init_from`.

    Attributes:
        encoder: the tower.
    """

    encoder: EncoderConfig

    def build(self) -> nn.Module:
        """See `ModelConfig.build`."""
        return self.encoder.build()

    def hugging_face(self) -> Form:
        """See `ModelConfig.hugging_face`."""
        from forge_vlm.hf.tower_tensors import TowerTensors

        encoder = self.encoder
        return Form(
            lambda: tower_to_hf(encoder),
            lambda: TowerTensors(encoder),  # type: ignore[arg-type]
            lambda hf: tower_differences(encoder, tower_from_hf(hf)),
            self,
        )


def model_tree(folder: str, with_images: bool) -> dict[str, Any]:
    """Return the keys of `[model]` for the model in a folder, with all defaults filled in.

    Args:
        folder: a Hugging Face folder.
        with_images: whether `images`, and the colours of the tower, are read from its image processor.

    Raises:
        ValueError: there is no `config.json`, or that or the image processor cannot be read.
    """
    try:
        hf = read_config(folder)
        kind = whole_family(hf.get("model_type")).kind
        model = model_from_hf(hf)
        tree = plain(processed(model, Path(folder), kind) if with_images else model)
        return {key: value for key, value in tree.items() if key != "type"}
    except ModelError as error:
        raise ModelError(f"from = {folder!r}: {error}") from None
