"""How a model and a Hugging Face checkpoint become one another. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from forge_model.hf.config import config_to_hf, require_weights_of

if TYPE_CHECKING:
    from forge_model.decoder.config import DecoderConfig
    from forge_model.model_config import ModelConfig


class HuggingFace(Protocol):
    """The result of `ModelConfig.hugging_face`: one model in the format of `transformers`.

    All methods raise `ModelError` where no class of `transformers` computes what the model does.
    """

    def config(self) -> dict[str, Any]:
        """The `config.json` of the model, whose tokens that begin, end and pad a text are not known here."""
        ...

    def files(self, spell: Callable[[int | None], str]) -> Mapping[str, str]:
        """The text of further files by name, such as those of an image processor.

        Args:
            spell: what a tokenizer calls a token, and with None the one that begins a text; empty where it
                has none.
        """
        return {}

    def lacks(self, spell: Callable[[int | None], str]) -> str:
        """Which files `files` does not make, and why; empty if none is missing."""
        return ""

    def theirs(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Our tensors by their names; each is read when it is taken out."""
        ...

    def ours(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Their tensors by our names; each is read when it is taken out."""
        ...

    def require(self, hf: Mapping[str, Any], place: str) -> ModelConfig:
        """See that the weights beside a `config.json` were made for this model; `place` is for the error."""
        ...


class DecoderCheckpoint(HuggingFace):
    """The checkpoint of a decoder, in the first family that can hold it. See `HuggingFace`."""

    def __init__(self, model: DecoderConfig) -> None:
        self._model = model

    def config(self) -> dict[str, Any]:
        """See `HuggingFace.config`."""
        return config_to_hf(self._model)

    def theirs(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `HuggingFace.theirs`."""
        from forge_model.hf.tensors import to_hf

        return to_hf(tensors, self._model)

    def ours(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `HuggingFace.ours`."""
        from forge_model.hf.tensors import from_hf

        return from_hf(tensors, self._model)

    def require(self, hf: Mapping[str, Any], place: str) -> ModelConfig:
        """See `HuggingFace.require`."""
        return require_weights_of(self._model, hf, place)
