"""Between the parameters of our decoders and the tensors of Hugging Face checkpoints, in both directions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from forge_model.decoder_config import DecoderConfig
from forge_model.error import ModelError
from forge_model.hf_config import config_from_hf as config_from_hf
from forge_model.hf_config import config_to_hf as config_to_hf
from forge_model.hf_config import family_of

V = TypeVar("V")


def to_hf(tensors: Mapping[str, V], config: DecoderConfig) -> dict[str, V]:
    """Our parameters under their names; a tied head is left out, as `save_pretrained` does.

    Raises:
        ModelError: a parameter has no counterpart.
    """
    family, renamed = family_of(config), {}
    for name, tensor in tensors.items():
        if config.tie_embeddings and name == "head.weight":
            continue
        try:
            renamed[family.hf_key(name)] = tensor
        except KeyError:
            raise ModelError(f"{name} has no counterpart in a {family.model_type} checkpoint") from None
    return renamed


class Renamed(Mapping[str, V]):
    """Other names for the entries of a mapping; each is fetched when it is asked for."""

    def __init__(self, entries: Mapping[str, V], keys: Mapping[str, str]) -> None:
        self._entries = entries
        self._keys = keys

    def __getitem__(self, name: str) -> V:
        return self._entries[self._keys[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def from_hf(tensors: Mapping[str, V], config: DecoderConfig) -> Mapping[str, V]:
    """Their parameters under our names; reads a tensor of `tensors` only when it is taken out of the result.

    Raises:
        ModelError: a tensor is missing, or one is left over; lists them all.
    """
    import torch

    with torch.device("meta"):
        ours = list(dict(config.build().named_parameters()))
    family = family_of(config)
    wanted = {family.hf_key(name): name for name in ours}
    ignorable = {"lm_head.weight"} if config.tie_embeddings else set()
    missing = sorted(wanted.keys() - tensors.keys())
    extra = sorted(tensors.keys() - wanted.keys() - ignorable)
    if missing or extra:
        raise ModelError(
            f"not a checkpoint of this model: missing {missing or 'nothing'}, left over {extra or 'nothing'}"
        )
    return Renamed(tensors, {name: key for key, name in wanted.items()})
