"""Between the parameters of our decoders and the tensors of Hugging Face checkpoints, in both directions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from forge_model.decoder_config import DecoderConfig
from forge_model.error import ModelError
from forge_model.families.family import Packed
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

    Stacked experts become one tensor each, sharing memory with them, or are packed as the family does.

    Args:
        tensors: from `tensors_of`.
        config: of the model.

    Raises:
        ModelError: a parameter has no counterpart.
    """
    family, renamed, packed = family_of(config), dict[str, Any](), dict[str, dict[int, Any]]()
    for name, tensor in tensors.items():
        if config.tie_embeddings and name == "head.weight":
            continue
        try:
            key = family.hf_key(name, config.num_layers)
        except KeyError:
            raise ModelError(f"{name} has no counterpart in a {family.model_type} checkpoint") from None
        if (place := family.packed(name)) is not None:
            packed.setdefault(key, {})[place.part] = tensor
        elif "{}" in key:
            renamed |= {key.format(index): one for index, one in enumerate(tensor)}  # type: ignore[arg-type]
        else:
            renamed[key] = tensor
    renamed |= {key: _pack([parts[index] for index in sorted(parts)]) for key, parts in packed.items()}
    return renamed


def _pack(parts: list[Tensor]) -> Tensor:
    """[E, O, I] each -> [E, I, parts * O], columns by turns; [E, O] each -> [E, parts * O]."""
    import torch

    return torch.stack([part.mT if part.ndim == 3 else part for part in parts], -1).flatten(-2)


def _unpack(tensor: Tensor, place: Packed) -> Tensor:
    """One of what `_pack` was given, sharing memory."""
    part = tensor[..., place.part :: place.parts]
    return part.mT if part.ndim == 3 else part


def _is_not_ours(key: str, config: DecoderConfig) -> bool:
    """Whether a tensor is of multi-token prediction, and of modules left out or shared with the model."""
    found = re.match(r"model\.layers\.(\d+)\.(.*)", key)
    if found is None or int(found[1]) < config.num_layers:
        return False
    return not config.mtp.num_modules or found[2] in ("embed_tokens.weight", "shared_head.head.weight")


class Stacked(Mapping[str, Any]):
    """The experts of a stacked parameter put together, or unpacked, when it is asked for; all else as it is.

    Args:
        entries: tensors by their names.
        experts: how many there are under a name with `{}` in it.
        packed: names of parts of tensors, the name of the tensor and the part.
    """

    def __init__(
        self,
        entries: Mapping[str, Tensor],
        experts: Mapping[str, int],
        packed: Mapping[str, tuple[str, Packed]],
    ) -> None:
        self._entries, self._experts, self._packed = entries, experts, packed

    def __getitem__(self, name: str) -> Tensor:
        if name in self._packed:
            key, place = self._packed[name]
            return _unpack(self._entries[key], place)
        if name not in self._experts:
            return self._entries[name]
        import torch

        return torch.stack([self._entries[name.format(index)] for index in range(self._experts[name])])

    def __iter__(self) -> Iterator[str]:
        yield from self._experts
        yield from self._packed
        yield from self._entries

    def __len__(self) -> int:
        return len(self._entries) + len(self._experts) + len(self._packed)


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
    keys = {name: family.hf_key(name, config.num_layers) for name in ours}
    experts = {key: len(ours[name]) for name, key in keys.items() if "{}" in key}
    packed = {name: (keys[name], place) for name in ours if (place := family.packed(name)) is not None}
    wanted = {*keys.values()} - experts.keys()
    wanted |= {key.format(index) for key, number in experts.items() for index in range(number)}
    ignorable = {"lm_head.weight"} if config.tie_embeddings else set()
    ignorable |= {key for key in tensors if family.mtp_keys and _is_not_ours(key, config)}
    missing = sorted(wanted - tensors.keys())
    extra = sorted(tensors.keys() - wanted - ignorable)
    if missing or extra:
        raise ModelError(
            f"not a checkpoint of this model: missing {missing or 'nothing'}, left over {extra or 'nothing'}"
        )
    whole = Stacked(tensors, experts, packed) if experts or packed else tensors  # type: ignore[arg-type]
    return Renamed(whole, keys | {name: name for name in packed})  # type: ignore[arg-type]
