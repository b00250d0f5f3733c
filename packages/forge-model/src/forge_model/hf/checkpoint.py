"""Conversion between a model and a Hugging Face checkpoint. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from forge_model.hf.config import config_to_hf, require_weights_of

if TYPE_CHECKING:
    from forge_model.decoder.config import DecoderConfig
    from forge_model.model_config import ModelConfig


class HuggingFace(Protocol):
    """The result of `ModelConfig.hugging_face`: one model in the format of `transformers`.

    All methods raise `ModelError` if no class of `transformers` computes the same as the model.
    """

    def config(self) -> dict[str, Any]:
        """Return the `config.json` of the model, without the tokens that begin, end and pad a text."""
        ...

    def files(self, spell: Callable[[int | None], str]) -> Mapping[str, str]:
        """Return the text of further files by name, such as those of an image processor.

        Args:
            spell: returns the text of a token id, or for None that of the token that begins a text; empty if
                the tokenizer has no such token.
        """
        return {}

    def lacks(self, spell: Callable[[int | None], str]) -> str:
        """Return which files `files` cannot make, and why; empty if none is missing."""
        return ""

    def theirs(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return our tensors by the names of Hugging Face; each is read when it is taken out."""
        ...

    def ours(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the tensors of Hugging Face by our names; each is read when it is taken out."""
        ...

    def require(self, hf: Mapping[str, Any], place: str) -> ModelConfig:
        """Check that the weights beside a `config.json` belong to this model; errors name `place`."""
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
