"""How does a dataset become numbered batches?

The batches depend on the dataset and the batch size alone; processes share out whole batches. So every
value is computed in the same batch, and has the same bits, whatever the number of processes and wherever a
run was interrupted. Letters: B samples, T tokens.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from forge_interp.errors import InterpError, kind_of
from forge_interp.extraction.run.parts import as_bytes

_PROBES = 256
_MOST_PARTS = 1024


@dataclass(frozen=True)
class Names:
    """Names of the entries of a batch: ids [B, T] (None when no row is a token), and the mask.

    The mask [B, T] is nonzero at tokens and 0 at padding; `pad_id` fills the padding of ids.
    """

    tokens: str | None = "input_ids"
    mask: str | None = "attention_mask"
    pad_id: int = 0


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward pass: a tensor, a mapping or a tuple."""

    number: int  # in the order of the dataset, from 0
    first: int  # sample id of the first
    size: int
    inputs: Any
    tokens: Tensor | None  # [B, T] ids
    mask: Tensor | None  # [B, T] bool; None when there is no padding

    @classmethod
    def of(cls, inputs: Any, names: Names, number: int, first: int) -> Batch:
        """Find ids, mask and size in inputs; InterpError: no tensor [B, ...], or a mask unlike the ids."""
        if isinstance(inputs, list | tuple) and len(inputs) == 1:
            inputs = inputs[0]
        tokens = mask = None
        if isinstance(inputs, Mapping):
            tokens = inputs.get(names.tokens) if names.tokens else None
            mask = inputs.get(names.mask) if names.tokens and names.mask else None
        elif names.tokens and isinstance(inputs, Tensor) and _is_ids(inputs) and inputs.ndim == 2:
            tokens = inputs
        for name, found in ((names.tokens, tokens), (names.mask, mask)):
            if found is not None and (not isinstance(found, Tensor) or found.ndim != 2):
                raise InterpError(
                    f"batch {number}: {name!r} is {kind_of(found)}; expected a tensor [samples, tokens]: an "
                    "iterable must give ready batches, e.g. a DataLoader"
                )
        if mask is not None and names.mask == "attention_mask" and names.tokens == "decoder_input_ids":
            raise InterpError(
                f"batch {number}: 'attention_mask' is that of the encoder, and rows are {names.tokens!r}; "
                "expected theirs: give mask='decoder_attention_mask', or mask=None where nothing is padded"
            )
        if mask is not None and tokens is not None and mask.shape != tokens.shape:
            raise InterpError(
                f"batch {number}: {names.mask!r} is {list(mask.shape)}, {names.tokens!r} {list(tokens.shape)}"
                "; expected the same shape: name the mask that belongs to the tokens with mask="
            )
        whole = inputs if tokens is None else tokens
        first_tensor = next((x for x in leaves(whole) if isinstance(x, Tensor) and x.ndim), None)
        if first_tensor is None:
            raise InterpError(
                f"batch {number} is a {type(inputs).__name__} without a tensor; expected one [samples, ...]"
            )
        mask = None if mask is None or bool((mask != 0).all()) else mask.cpu() != 0
        return cls(number, first, len(first_tensor), inputs, None if tokens is None else tokens.cpu(), mask)

    def checksum(self, crc: int = 0) -> int:
        """CRC-32 of all numbers and texts in the inputs, continued from `crc`."""
        return _checksum(self.inputs, crc)

    def cut(self, start: int, stop: int) -> Any:
        """Return the inputs of samples [start, stop); None where it is unclear how to cut them."""
        return _cut(self.inputs, self.size, slice(start, stop))


class _Source:
    """Source of batches; several batches become one part on disk, so that there are at most 1024 parts."""

    num_batches: Any  # None where it is not known; then each batch is a part

    @property
    def batches_per_part(self) -> int:
        """The number of batches in each part but the last."""
        return max(1, -(-(self.num_batches or 1) // _MOST_PARTS))

    @property
    def num_parts(self) -> int | None:
        """The number of parts; None where it is unknown."""
        return None if self.num_batches is None else -(-self.num_batches // self.batches_per_part)


class Samples(_Source):
    """Batches of a dataset whose samples can be read by index; InterpError if it is empty.

    A sample is ids (tensor, array or list), or a mapping or tuple of tensors, arrays, lists and numbers. The
    dataset may also be a tensor [samples, ...], or a mapping of such columns.
    """

    def __init__(self, dataset: Any, batch_size: int, names: Names) -> None:
        self._dataset, self._size, self._names = dataset, batch_size, names
        self._is_columns = isinstance(dataset, Mapping)
        lengths = {key: len(column) for key, column in dataset.items()} if self._is_columns else {}
        if len(set(lengths.values())) > 1:
            raise InterpError(f"the columns of the dataset have lengths {lengths}; expected one length")
        self.num_samples = next(iter(lengths.values()), 0) if self._is_columns else len(dataset)
        if not self.num_samples:
            raise InterpError("the dataset has no samples; expected at least one")
        if batch_size < 1:
            raise InterpError(f"batch_size is {batch_size}; expected at least 1")
        self.num_batches = -(-self.num_samples // batch_size)

    def batches(self, start: int, stop: int | None) -> Iterator[Batch]:
        """Yield batches [start, stop)."""
        for number in range(start, self.num_batches if stop is None else stop):
            first = number * self._size
            picked = range(first, min(first + self._size, self.num_samples))
            yield Batch.of(self._collated(picked), self._names, number, first)

    def probes(self) -> Iterator[Batch]:
        """Yield the first and the last batch."""
        for number in sorted({0, self.num_batches - 1}):
            yield from self.batches(number, number + 1)

    def fingerprint(self) -> dict[str, Any]:
        """Return the number of samples and a CRC-32 of up to 256; a run that continues compares all."""
        crc, probes = 0, min(_PROBES, self.num_samples)
        for probe in range(probes):
            crc = _checksum(self._collated([probe * self.num_samples // probes]), crc)
        return {"samples": self.num_samples, "crc": f"{crc:08x}"}

    def _collated(self, indices: Iterable[int]) -> Any:
        data = self._dataset
        if self._is_columns:
            samples = [{key: column[i] for key, column in data.items()} for i in indices]
        else:
            samples = [data[i] for i in indices]
        return collate([_numbers(sample) for sample in samples], self._names)


class ReadyBatches(_Source):
    """Batches of an iterable such as a DataLoader, which must yield the same batches each time."""

    def __init__(self, batches: Iterable[Any], names: Names) -> None:
        self._batches, self._names = batches, names
        try:
            self.num_batches = len(batches)  # type: ignore[arg-type]
        except TypeError:
            self.num_batches = None
        self._begun: Iterator[Any] | None = iter(batches)
        self._head = list(islice(self._begun, 1))
        if not self._head:
            raise InterpError("the dataset has no batches; expected at least one: give a new iterator")

    def batches(self, start: int, stop: int | None) -> Iterator[Batch]:
        """Yield batches [start, stop); earlier batches are read, too, to count their samples."""
        first = 0
        begun, self._begun = self._begun, None
        for number, inputs in enumerate(self._batches if begun is None else chain(self._head, begun)):
            if stop is not None and number >= stop != self.num_batches:
                return  # behind the last there may be more than len() says
            batch = Batch.of(_numbers(inputs), self._names, number, first)
            first += batch.size
            if number >= start:
                yield batch

    def probes(self) -> Iterator[Batch]:
        """Yield the first batch, which is already read."""
        yield Batch.of(_numbers(self._head[0]), self._names, 0, 0)

    def fingerprint(self) -> dict[str, Any]:
        """Return the number of batches and a CRC-32 of the first; a run that continues compares all."""
        return {"batches": self.num_batches, "crc": f"{_checksum(_numbers(self._head[0])):08x}"}


def open_dataset(dataset: Any, batch_size: int, names: Names) -> Samples | ReadyBatches:
    """Return the batches of samples, or of an iterable of ready batches; InterpError for anything else."""
    is_stream = isinstance(dataset, torch.utils.data.IterableDataset)
    if not is_stream and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        if isinstance(dataset, str | bytes):
            raise InterpError("the dataset is a text; expected samples of numbers: tokenize it first")
        return Samples(dataset, batch_size, names)
    if hasattr(dataset, "__iter__") and not is_stream:
        return ReadyBatches(dataset, names)
    raise InterpError(
        f"the dataset is a {type(dataset).__name__}; expected a sequence of samples, or an iterable of "
        "batches: wrap a stream of samples in a DataLoader with a batch_size"
    )


def collate(samples: Sequence[Any], names: Names) -> Any:
    """Stack samples; ids of different lengths are padded on the right and get a mask.

    Entries as long as the ids of their sample are padded with them (labels with -100, all others with 0).
    Values without numbers stay a list. InterpError where shapes differ otherwise (encoder and decoder).
    """
    if isinstance(samples[0], Mapping):
        return _collate_mappings(samples, names)
    if isinstance(samples[0], tuple):
        if len(lengths := {len(sample) if isinstance(sample, tuple) else None for sample in samples}) > 1:
            raise InterpError(f"samples are tuples of lengths {lengths}; expected one length")
        return tuple(_stack(list(column), f"item {i}") for i, column in enumerate(zip(*samples, strict=True)))
    if not isinstance(samples[0], Tensor):
        raise InterpError(
            f"a sample is a {type(samples[0]).__name__}; expected numbers, or a mapping or tuple of them: "
            "tokenize texts first"
        )
    if samples[0].ndim == 1 and _is_ids(samples[0]) and names.tokens and not _are_even(samples):
        padded = _collate_mappings([{names.tokens: sample} for sample in samples], names)
        return padded if names.mask else padded[names.tokens]
    return _stack(samples, "a sample")


def _collate_mappings(samples: Sequence[Mapping[str, Any]], names: Names) -> dict[str, Any]:
    keys = list(samples[0])
    if different := next((list(sample) for sample in samples if sample.keys() != samples[0].keys()), None):
        raise InterpError(f"samples have entries {keys} and {different}; expected the same in all")
    columns = {key: [sample[key] for sample in samples] for key in keys}
    ids = columns.get(names.tokens or "", [])
    lengths = _lengths(ids)
    if not lengths or _are_even(ids):
        return {key: _stack(column, repr(key)) for key, column in columns.items()}
    if names.mask and names.mask not in columns:
        columns[names.mask] = [torch.ones(length, dtype=torch.int64) for length in lengths]
    fills, collated = {names.tokens: names.pad_id, "labels": -100}, {}
    for key, column in columns.items():
        is_along = key == names.tokens or not key.endswith("input_ids")  # others need a mask of their own
        is_padded = is_along and _lengths(column) == lengths
        collated[key] = _pad(column, fills.get(key, 0)) if is_padded else _stack(column, repr(key))
    return collated


def _are_even(ids: Sequence[Tensor]) -> bool:
    """Whether samples need no padding: they have one length, which is not 0 (few models can run 0 tokens)."""
    return len({len(sample) for sample in ids}) == 1 and len(ids[0]) > 0


def _lengths(column: Sequence[Any]) -> list[int]:
    """Return each T if all values are [T], else nothing."""
    is_flat = all(isinstance(value, Tensor) and value.ndim == 1 for value in column)
    return [len(value) for value in column] if is_flat else []


def _pad(column: list[Tensor], fill: int) -> Tensor:
    """Stack values [T] into [B, the largest T, at least 1]."""
    padded = pad_sequence(column, batch_first=True, padding_value=fill)
    return padded if padded.shape[1] else padded.new_full((len(column), 1), fill)


def _stack(values: Sequence[Any], name: str) -> Any:
    if not all(isinstance(value, Tensor) for value in values):
        return list(values)
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) != 1:
        raise InterpError(
            f"{name} has shapes {', '.join(str(list(shape)) for shape in sorted(shapes)[:3])} in one batch; "
            "expected one: resize or pad it, or give ready batches from a DataLoader"
        )
    return torch.stack(list(values))


def _is_ids(value: Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool


def _numbers(value: Any) -> Any:
    """Turn arrays, lists of numbers and numbers into tensors, at any depth of mappings and tuples."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_numbers(item) for item in value)
    if isinstance(value, list) and value and isinstance(value[0], Tensor | Mapping):
        return tuple(_numbers(item) for item in value)
    if isinstance(value, str | bytes) or value is None:
        return value
    if isinstance(value, list) and not value:
        return torch.empty(0, dtype=torch.int64)
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return value
    if array.dtype.kind == "u" and array.itemsize > 1:  # torch looks up no ids of 16 bits
        return torch.from_numpy(array.astype(np.int64))
    return torch.from_numpy(array.copy()) if array.dtype.kind in "biuf" else value


def _checksum(inputs: Any, crc: int = 0) -> int:
    """CRC-32 of all numbers and texts in nested inputs; InterpError where something has no known value."""
    return zlib.crc32(json.dumps(inputs, sort_keys=True, default=_plain).encode(), crc)


def _plain(value: Any) -> Any:
    """Turn a value into JSON data that is the same in each process."""
    if isinstance(value, Tensor):
        return ["tensor", str(value.dtype), list(value.shape), zlib.crc32(as_bytes(value))]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return ["set", *sorted(json.dumps(item, sort_keys=True, default=_plain) for item in value)]
    if isinstance(value, bytes | complex):
        return [type(value).__name__, repr(value)]
    raise InterpError(
        f"a sample holds a {type(value).__name__}, which cannot be compared with that of another call; "
        "expected texts, numbers, and sets, lists and mappings of them: leave it out, or give out=None"
    )


def leaves(inputs: Any) -> Iterator[Any]:
    """Yield the leaves of nested mappings, tuples and lists."""
    if isinstance(inputs, Mapping | tuple | list):
        for item in inputs.values() if isinstance(inputs, Mapping) else inputs:
            yield from leaves(item)
    else:
        yield inputs


def _cut(inputs: Any, size: int, samples: slice) -> Any:
    """Return some samples of a batch's inputs; None where a tensor in it is not [size, ...]."""
    if isinstance(inputs, Tensor):
        return inputs[samples] if inputs.ndim and len(inputs) == size else None
    if isinstance(inputs, Mapping | tuple):
        values = inputs.values() if isinstance(inputs, Mapping) else inputs
        cut = [_cut(value, size, samples) for value in values]
        if any(value is None for value in cut):
            return None
        return dict(zip(inputs, cut, strict=True)) if isinstance(inputs, Mapping) else tuple(cut)
    return inputs[samples] if isinstance(inputs, list) and len(inputs) == size else None
