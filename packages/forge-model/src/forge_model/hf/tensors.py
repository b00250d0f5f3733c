"""Between the parameters of our decoders and the tensors of Hugging Face checkpoints, in both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from forge_model.decoder.config import DecoderConfig
from forge_model.error import ModelError
from forge_model.hf.config import config_from_hf as config_from_hf
from forge_model.hf.config import config_to_hf as config_to_hf
from forge_model.hf.config import family_of
from forge_model.hf.families.family import Packed

if TYPE_CHECKING:
    from torch import Tensor, nn

V = TypeVar("V")


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that a checkpoint has, tied ones once."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def require_names(there: Iterable[str], wanted: Iterable[str], what: str) -> None:
    """See that tensors are those that are wanted, no more and no fewer.

    Raises:
        ModelError: one is missing, or left over; lists them all.
    """
    missing, left = sorted({*wanted} - {*there}), sorted({*there} - {*wanted})
    if missing or left:
        raise ModelError(f"not {what}: missing {missing or 'nothing'}, left over {left or 'nothing'}")


class Made(Mapping[str, V]):
    """Entries that are made when they are asked for, each by a function."""

    def __init__(self, makers: Mapping[str, Callable[[], V]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> V:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


class Read:
    """Entries of a mapping; the last one is kept, so that one which is asked for in parts is read once."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries
        self._last: dict[str, Any] = {}

    def __call__(self, name: str) -> Any:
        """One of them."""
        if name not in self._last:
            self._last.clear()  # before the next one is read
            self._last[name] = self._entries[name]
        return self._last[name]

    def expert(self, name: str, index: int) -> Any:
        """One of the stacked ones, sharing memory."""
        return self(name)[index]

    def packed(self, names: Sequence[str]) -> Tensor:
        """[E, O, I] each -> [E, I, parts * O], columns by turns; [E, O] each -> [E, parts * O]."""
        import torch

        packed = torch.empty(0)
        for index, name in enumerate(names):
            part = self(name)
            part = part.mT if part.ndim == 3 else part
            if not index:
                packed = part.new_empty(*part.shape[:-1], part.shape[-1] * len(names))
            packed[..., index :: len(names)] = part
            del part  # before the next one is read
        return packed


def to_hf(tensors: Mapping[str, Any], config: DecoderConfig) -> Mapping[str, Any]:
    """Our tensors under their names; a tied head is left out, as `save_pretrained` does.

    Stacked experts become one tensor each, sharing memory with them, or are packed as the family does.
    A tensor is read only when what is made of it is taken out of the result; at most one of them is kept.

    Args:
        tensors: from `tensors_of`.
        config: of the model.

    Raises:
        ModelError: a parameter has no counterpart.
    """
    family, read = family_of(config), Read(tensors)
    makers, packed = dict[str, Callable[[], Any]](), dict[str, dict[int, str]]()
    ours = _on_meta(config) if family.expert_keys else {}
    for name in tensors:
        if config.tie_embeddings and name == "head.weight":
            continue
        try:
            key = family.hf_key(name, config.num_layers)
            experts = len(ours[name]) if "{}" in key else 0
        except KeyError:
            raise ModelError(f"{name} has no counterpart in a {family.model_type} checkpoint") from None
        if (place := family.packed(name)) is not None:
            packed.setdefault(key, {})[place.part] = name
        elif experts:
            makers |= {key.format(index): partial(read.expert, name, index) for index in range(experts)}
        else:
            makers[key] = partial(read, name)
    for key, parts in packed.items():
        makers[key] = partial(read.packed, [parts[index] for index in sorted(parts)])
    return Made(makers)


def _on_meta(config: DecoderConfig) -> dict[str, Tensor]:
    """Our tensors, without values."""
    import torch

    with torch.device("meta"):
        return tensors_of(config.build())


def _unpack(tensor: Tensor, place: Packed) -> Tensor:
    """One of what `Read.packed` was given, sharing memory."""
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
    family, ours = family_of(config), _on_meta(config)
    keys = {name: family.hf_key(name, config.num_layers) for name in ours}
    experts = {key: len(ours[name]) for name, key in keys.items() if "{}" in key}
    packed = {name: (keys[name], place) for name in ours if (place := family.packed(name)) is not None}
    wanted = {*keys.values()} - experts.keys()
    wanted |= {key.format(index) for key, number in experts.items() for index in range(number)}
    ignorable = {"lm_head.weight"} if config.tie_embeddings else set()
    ignorable |= {key for key in tensors if family.mtp_keys and _is_not_ours(key, config)}
    require_names(tensors.keys() - (ignorable - wanted), wanted, "a checkpoint of this model")
    whole = Stacked(tensors, experts, packed) if experts or packed else tensors  # type: ignore[arg-type]
    return Renamed(whole, keys | {name: name for name in packed})  # type: ignore[arg-type]
