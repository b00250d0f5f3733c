"""Conversion between parameters of our decoders and tensors of Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from forge_model.decoder.config import DecoderConfig
from forge_model.error import ModelError
from forge_model.hf.config import config_from_hf as config_from_hf
from forge_model.hf.config import config_to_hf as config_to_hf
from forge_model.hf.config import families_of
from forge_model.hf.families.family import Family, Packed

if TYPE_CHECKING:
    from torch import Tensor, nn

V = TypeVar("V")


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers in a checkpoint, tied ones once."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def require_names(names: Iterable[str], wanted: Iterable[str], what: str) -> None:
    """Refuse missing and unexpected tensors.

    Raises:
        ModelError: a tensor is missing or unexpected; lists them all.
    """
    missing, left = sorted({*wanted} - {*names}), sorted({*names} - {*wanted})
    if missing or left:
        raise ModelError(f"not {what}: missing {missing or 'nothing'}, left over {left or 'nothing'}")


class Made(Mapping[str, V]):
    """A mapping whose entries are made by functions when they are accessed."""

    def __init__(self, makers: Mapping[str, Callable[[], V]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> V:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


class Read:
    """Reads entries of a mapping and keeps the last one, so that an entry used in parts is read once."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries
        self._last: dict[str, Any] = {}

    def __call__(self, name: str) -> Any:
        """Return one entry."""
        if name not in self._last:
            self._last.clear()  # before the next one is read
            self._last[name] = self._entries[name]
        return self._last[name]

    def expert(self, name: str, index: int) -> Any:
        """Return one expert of a stacked entry, sharing memory."""
        return self(name)[index]

    def packed(self, parts: Mapping[str, Packed], spread: Spread) -> Tensor:
        """Pack several of our parameters into one Hugging Face tensor."""
        import torch

        stacked = torch.empty(0)
        for name, place in parts.items():
            part, axis = self(name), _rows_of(name)
            if not place.part:
                shape = list(part.shape)
                shape[axis] = sum(spread.rows[other] for other in parts)
                shape = [*shape[:-2], shape[-1], shape[-2]] if place.transposed and axis == -2 else shape
                stacked = part.new_empty(shape)
            slot = spread.slot(stacked, name, place)
            slot.copy_(part.unflatten(axis, slot.shape[axis - 1 : slot.ndim + axis + 1]))
            del part, slot  # before the next one is read
        return stacked


def _rows_of(name: str) -> int:
    """Return the axis of the outputs: the second to last, of a bias the last."""
    return -1 if name.rpartition(".")[2].startswith("b") else -2


class Spread(NamedTuple):
    """Where our parameters are in fused parameters of a family.

    Attributes:
        rows: number of outputs of each of our parameters, by name.
        heads: number of query heads.
        starts: first row of each parameter, for parameters that do not alternate.
    """

    rows: Mapping[str, int]
    heads: int
    starts: Mapping[str, int]

    @classmethod
    def of(cls, ours: Mapping[str, Tensor], family: Family, config: DecoderConfig) -> Spread:
        """Return the layout of a family; `ours` may be on the meta device."""
        rows = {name: ours[name].shape[_rows_of(name)] for name in ours if family.packed(name) is not None}
        starts, ends = dict[str, int](), dict[str, int]()
        for name in sorted(rows, key=lambda name: family.packed(name).part):  # type: ignore[union-attr]
            key = family.hf_key(name, config.num_layers)
            starts[name] = ends.get(key, 0)
            ends[key] = starts[name] + rows[name]
        return cls(rows, getattr(config.layer(0).attention, "num_heads", 1), starts)

    def slot(self, stacked: Tensor, name: str, place: Packed) -> Tensor:
        """Return the view of one parameter, [..., blocks, rows of a block(, I)]."""
        axis, rows = _rows_of(name), self.rows[name]
        stacked = stacked.mT if place.transposed and axis == -2 else stacked
        if place.turns == "all":
            return stacked.narrow(axis, self.starts[name], rows).unflatten(axis, (1, rows))
        block = 1 if place.turns == "row" else rows // self.heads
        return stacked.unflatten(axis, (-1, place.parts, block)).select(axis - 1, place.part)


def to_hf(tensors: Mapping[str, Any], config: DecoderConfig) -> Mapping[str, Any]:
    """Return our tensors under Hugging Face names, without a tied head, as `save_pretrained` does.

    Stacked experts become one tensor each, sharing memory with them, or are packed as the family does.
    A tensor is read only when an entry made from it is accessed; at most one tensor is kept.

    Args:
        tensors: from `tensors_of`.
        config: configuration of the model.

    Raises:
        ModelError: a parameter has no counterpart.
    """
    (family, _), read = next(families_of(config)), Read(tensors)
    makers, packed = dict[str, Callable[[], Any]](), dict[str, dict[str, Packed]]()
    ours = _on_meta(config) if family.gathers() else {}
    for name in tensors:
        if config.tie_embeddings and name == "head.weight":
            continue
        try:
            key = family.hf_key(name, config.num_layers)
            experts = len(ours[name]) if "{}" in key else 0
        except KeyError:
            raise ModelError(f"{name} has no counterpart in a {family.model_type} checkpoint") from None
        if (place := family.packed(name)) is not None:
            packed.setdefault(key, {})[name] = place
        elif experts:
            makers |= {key.format(index): partial(read.expert, name, index) for index in range(experts)}
        else:
            makers[key] = partial(read, name)
    spread = Spread.of(ours, family, config)
    for key, parts in packed.items():
        in_turn = dict(sorted(parts.items(), key=lambda one: one[1].part))
        makers[key] = partial(read.packed, in_turn, spread)
    return Made(makers | {key: partial(_empty, shape) for key, shape in family.empty(config).items()})


def _empty(shape: tuple[int, int]) -> Tensor:
    import torch

    return torch.empty(shape)


def _on_meta(config: DecoderConfig) -> dict[str, Tensor]:
    """Return our tensors without values."""
    import torch

    with torch.device("meta"):
        return tensors_of(config.build())


def _layer(key: str) -> int:
    """Return the index of the layer in a Hugging Face name; -1 outside of layers."""
    found = re.match(r"model\.layers\.(\d+)\.", key)
    return -1 if found is None else int(found[1])


def _is_not_ours(key: str, config: DecoderConfig) -> bool:
    """Whether a tensor is in a multi-token prediction module that we leave out or share with the model."""
    if _layer(key) < config.num_layers:
        return False
    return not config.mtp.num_modules or key.endswith((".embed_tokens.weight", ".shared_head.head.weight"))


class Stacked(Mapping[str, Any]):
    """A mapping that stacks the tensors of experts, or unpacks parts of tensors, when they are accessed.

    Args:
        entries: tensors by Hugging Face names; all other entries stay as they are.
        experts: number of experts, by names with `{}` in place of the index.
        packed: for each name of a part, the name of the tensor and the place of the part.
        spread: layout of the parts in these tensors.
    """

    def __init__(
        self,
        entries: Mapping[str, Tensor],
        experts: Mapping[str, int],
        packed: Mapping[str, tuple[str, Packed]],
        spread: Spread,
    ) -> None:
        self._entries, self._experts, self._packed, self._spread = entries, experts, packed, spread

    def __getitem__(self, name: str) -> Tensor:
        if name in self._packed:
            key, place = self._packed[name]
            axis = _rows_of(name)
            return self._spread.slot(self._entries[key], name, place).flatten(axis - 1, axis)
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
    """A mapping with other names for the entries of another; each is read when it is accessed."""

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
    """Return Hugging Face tensors under our names; reads a tensor only when it is accessed.

    Of the families that can hold the model, the first one whose names match is taken.

    Raises:
        ModelError: tensors are missing or unexpected; lists them all, compared with the nearest family.
    """
    ours, problems = _on_meta(config), dict[str, int]()
    for family, _ in families_of(config):
        names, present = Names(family, config, ours), _based(tensors, family)
        missing, left = names.missing(present), names.left(present)
        if not missing and not left:
            return names.renamed(present)
        problems[names.problem(missing, left)] = len(missing) + len(left)
    raise ModelError(min(problems, key=lambda problem: problems[problem]))


def _based(tensors: Mapping[str, V], family: Family) -> Mapping[str, V]:
    """Add the prefix of a family to all names but the head's if no tensor has it."""
    if not family.base or any(key.startswith(family.base) for key in tensors):
        return tensors
    head = f"{family.outer_keys['head']}.weight"
    return Renamed(tensors, {key if key == head else family.base + key: key for key in tensors})


class Names:
    """The parameter names of a family.

    Args:
        family: a family that can hold the model.
        config: configuration of the model.
        ours: its parameters by our names; may be without values.
    """

    def __init__(self, family: Family, config: DecoderConfig, ours: Mapping[str, Tensor]) -> None:
        self._family, self._config = family, config
        self._keys = {name: family.hf_key(name, config.num_layers) for name in ours}
        self._experts = {key: len(ours[name]) for name, key in self._keys.items() if "{}" in key}
        places = {name: (key, family.packed(name)) for name, key in self._keys.items()}
        self._packed = {name: (key, place) for name, (key, place) in places.items() if place is not None}
        self._spread = Spread.of(ours, family, config)
        self._wanted = {*self._keys.values()} - self._experts.keys()
        self._wanted |= {key.format(i) for key, number in self._experts.items() for i in range(number)}

    def missing(self, present: Iterable[str]) -> list[str]:
        """Return the Hugging Face names that are expected and absent."""
        return sorted(self._wanted - {*present})

    def left(self, present: Iterable[str]) -> list[str]:
        """Return names that are present, unexpected, and not known to be redundant."""
        head = f"{self._family.outer_keys['head']}.weight" if self._config.tie_embeddings else None
        ahead = bool(self._family.mtp_keys)
        return sorted(
            key
            for key in {*present} - self._wanted - self._family.empty(self._config).keys()
            if key != head and not (ahead and _is_not_ours(key, self._config))
            if not re.search(self._family.unused, key)
        )

    def problem(self, missing: list[str], left: list[str]) -> str:
        """Return the message about missing and unexpected tensors."""
        message = (
            f"not a checkpoint of this model: missing {missing or 'nothing'}, left over {left or 'nothing'}"
        )
        first = f"{self._family.layers}.{self._config.num_layers}."
        if (
            missing
            and self._config.mtp.num_modules
            and all(_layer(key) >= self._config.num_layers for key in missing)
        ):
            message += (
                f"; these are its modules for multi-token prediction ({first}...), which `transformers` "
                "counts in config.json (num_nextn_predict_layers) and does not save: set "
                "model.mtp.num_modules = 0"
            )
        return message

    def renamed(self, tensors: Mapping[str, V]) -> Mapping[str, V]:
        """Return Hugging Face tensors by our names."""
        if not self._experts and not self._packed:
            return Renamed(tensors, self._keys)
        whole = Stacked(tensors, self._experts, self._packed, self._spread)  # type: ignore[arg-type]
        return Renamed(whole, self._keys | {name: name for name in self._packed})  # type: ignore[arg-type]
