"""Between the parameters of our decoders and the tensors of Hugging Face checkpoints, in both directions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from forge_model.decoder_config import DecoderConfig
from forge_model.error import ModelError
from forge_model.hf_config import config_from_hf as config_from_hf
from forge_model.hf_config import config_to_hf as config_to_hf
from forge_model.hf_config import family_of

if TYPE_CHECKING:
    from torch import Tensor, nn

V = TypeVar("V")


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that a checkpoint has, tied ones once."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def to_hf(tensors: Mapping[str, V], config: DecoderConfig) -> dict[str, V]:
    """Our tensors under their names; a tied head is left out, as `save_pretrained` does.

    Stacked experts become one tensor each, sharing memory with them.

    Args:
        tensors: from `tensors_of`.
        config: of the model.

    Raises:
        ModelError: a parameter has no counterpart.
    """
    family, renamed = family_of(config), {}
    for name, tensor in tensors.items():
        if config.tie_embeddings and name == "head.weight":
            continue
        try:
            key = family.hf_key(name, config.num_layers)
        except KeyError:
            raise ModelError(f"{name} has no counterpart in a {family.model_type} checkpoint") from None
        if "{}" in key:
            renamed |= {key.format(index): one for index, one in enumerate(tensor)}  # type: ignore[arg-type]
        else:
            renamed[key] = tensor
    return renamed


def _is_not_ours(key: str, config: DecoderConfig) -> bool:
    """Whether a tensor is of multi-token prediction, and of modules left out or shared with the model."""
    found = re.match(r"model\.layers\.(\d+)\.(.*)", key)
    if found is None or int(found[1]) < config.num_layers:
        return False
    return not config.mtp.num_modules or found[2] in ("embed_tokens.weight", "shared_head.head.weight")


class Stacked(Mapping[str, Any]):
    """The experts of a stacked parameter put together when it is asked for; all else as it is.

    Args:
        entries: tensors by their names.
        experts: how many there are under a name with `{}` in it.
    """

    def __init__(self, entries: Mapping[str, Tensor], experts: Mapping[str, int]) -> None:
        self._entries, self._experts = entries, experts

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._experts:
            return self._entries[name]
        import torch

        return torch.stack([self._entries[name.format(index)] for index in range(self._experts[name])])

    def __iter__(self) -> Iterator[str]:
        yield from self._experts
        yield from self._entries

    def __len__(self) -> int:
        return len(self._entries) + len(self._experts)


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
        ours = tensors_of(config.build())
    family = family_of(config)
    keys = {family.hf_key(name, config.num_layers): name for name in ours}
    experts = {key: len(ours[name]) for key, name in keys.items() if "{}" in key}
    wanted = keys.keys() - experts.keys()
    wanted |= {key.format(index) for key, number in experts.items() for index in range(number)}
    ignorable = {"lm_head.weight"} if config.tie_embeddings else set()
    ignorable |= {key for key in tensors if family.mtp_keys and _is_not_ours(key, config)}
    missing = sorted(wanted - tensors.keys())
    extra = sorted(tensors.keys() - wanted - ignorable)
    if missing or extra:
        raise ModelError(
            f"not a checkpoint of this model: missing {missing or 'nothing'}, left over {extra or 'nothing'}"
        )
    whole = Stacked(tensors, experts) if experts else tensors  # type: ignore[arg-type]
    return Renamed(whole, {name: key for key, name in keys.items()})  # type: ignore[arg-type]
