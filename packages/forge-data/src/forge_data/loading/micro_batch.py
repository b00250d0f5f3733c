"""Sequences as tensors, and how they reach a device. B sequences, T tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forge_data.loading.batches import Group
from forge_data.packing.packing import Ragged


class Packed(NamedTuple):
    """Inputs and statistics of a micro-batch in one piece of memory, so that they travel in one copy.

    Attributes:
        rows: [B, W] int64, pinned.
        columns: for each tensor that is a view of `rows`, by name, its first and last column, and its shape.
        views: these tensors.
    """

    rows: Tensor
    columns: dict[str, tuple[int, int, tuple[int, ...]]]
    views: dict[str, Tensor]

    @classmethod
    def of(cls, rows: Tensor, columns: dict[str, tuple[int, int, tuple[int, ...]]]) -> Packed:
        """Make it with its views."""
        return cls(rows, columns, {name: rows[:, a:b].view(shape) for name, (a, b, shape) in columns.items()})

    def to(self, device: torch.device | str) -> Packed:
        """Return the same on a device, by one asynchronous copy."""
        return Packed.of(self.rows.to(device, non_blocking=True), self.columns)


class MicroBatch(NamedTuple):
    """Sequences that a rank holds at once.

    Attributes:
        inputs: inputs of the model: `tokens` and `labels` [B, T] int64; with `mask_documents` also `doc_ids`
            and `positions` [B, T] int64; the further inputs of sources: `extra` [B, ...], and of `ragged` the
            rows of all sequences in order, [rows, ...], perhaps none.
        statistics: not for the model: `source` [B] int64, the index of the source of each sequence, -1 for
            padding; `targets` [] int64, number of labels that are not ignored; in an evaluation also `bytes`
            [B] int64, bytes of the targets' text, if the tokenizer knows them.
        sources: the name of each source.
        host: names of inputs that stay in host memory.
        packed: the memory that inputs share if they go to a GPU.
    """

    inputs: dict[str, Tensor]
    statistics: dict[str, Tensor]
    sources: tuple[str, ...] = ()
    host: frozenset[str] = frozenset()
    packed: Packed | None = None

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return the same on a device, except `host`; the copy is asynchronous where the memory allows it."""
        here = {} if self.packed is None else self.packed.views
        there = {} if self.packed is None else self.packed.to(device).views

        def moved(name: str, tensor: Tensor) -> Tensor:
            return there[name] if here.get(name) is tensor else tensor.to(device, non_blocking=True)

        inputs = {name: x if name in self.host else moved(name, x) for name, x in self.inputs.items()}
        statistics = {name: moved(name, x) for name, x in self.statistics.items()}
        return MicroBatch(inputs, statistics, self.sources, self.host)


def micro_batches(
    group: Group, sources: tuple[str, ...], host: frozenset[str], pinned: bool = False
) -> list[MicroBatch]:
    """Return the micro-batches of a group: views, cut by few calls.

    Args:
        group: the group as it was read.
        sources: the name of each source.
        host: names of inputs that stay in host memory.
        pinned: put them into pinned memory, with the int64 tensors of each micro-batch next to one another.
    """
    labels = group.rows[..., 1:] if group.labels is None else group.labels
    inputs = {"tokens": group.rows[..., :-1], "labels": labels, **group.extra}
    statistics = {"source": group.source, "targets": group.targets}
    packed = _packed(group, host) if pinned else None
    packed_names = set() if packed is None else {*packed[0].columns}

    def unbound(arrays: Mapping[str, np.ndarray]) -> dict[str, Sequence[Tensor]]:
        return {n: _unbind(a, pinned and n not in packed_names and n not in host) for n, a in arrays.items()}

    several = unbound(inputs) | {
        name: _cut(x, pinned and name not in host) for name, x in group.ragged.items()
    }
    reported, found = unbound(statistics), []
    for index in range(len(group.rows)):
        one = None if packed is None else packed[index]
        views = {} if one is None else one.views
        of_inputs, of_statistics = (
            {name: views.get(name, tensors[index]) for name, tensors in of.items()}
            for of in (several, reported)
        )
        found.append(MicroBatch(of_inputs, of_statistics, sources, host, one))
    return found


def _packed(group: Group, host: frozenset[str]) -> list[Packed]:
    """Pack the int64 tensors of each micro-batch. Labels that are the next tokens share their columns."""
    rows, width = group.rows.shape[1], group.rows.shape[2]
    parts, columns = [group.rows], {"tokens": (0, width - 1, (rows, width - 1))}
    more = {**group.extra, "source": group.source}
    if group.labels is None:
        columns["labels"] = (1, width, (rows, width - 1))
    else:
        more["labels"] = group.labels
    for name, array in more.items():
        if array.dtype == np.int64 and name not in host:
            parts.append(array.reshape(*group.rows.shape[:2], -1))
            begin, width = width, width + parts[-1].shape[-1]
            columns[name] = (begin, width, array.shape[1:])
    packed = torch.from_numpy(np.concatenate(parts, -1)).pin_memory()
    return [Packed.of(one, columns) for one in packed.unbind()]


def _unbind(array: np.ndarray, pinned: bool) -> Sequence[Tensor]:
    if len(array) == 1 and not pinned:
        return [torch.from_numpy(array[0, ...])]
    return _pinned(torch.from_numpy(array), pinned).unbind()


def _cut(ragged: Ragged, pinned: bool) -> Sequence[Tensor]:
    """Return the rows of each micro-batch."""
    return _pinned(torch.from_numpy(ragged.values), pinned).split(ragged.counts.sum(1).tolist())


def _pinned(tensor: Tensor, pinned: bool) -> Tensor:
    return tensor.pin_memory() if pinned else tensor
