"""The tensors of a checkpoint, whole, one by one. Imports torch when one is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from forge_ckpt import manifest as manifests
from forge_ckpt.layout import Entry, Shape

if TYPE_CHECKING:
    from torch import Tensor


class Checkpointed(Mapping[str, "Tensor"]):
    """The tensors of a checkpoint by name, whole; each is read and verified on access.

    Args:
        folder: the folder of the checkpoint.
        prefix: only names with this prefix, which is removed.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self._folder, self._prefix = folder, prefix
        self.manifest = manifests.read(folder)
        self._index = cache(partial(manifests.read_index, folder, self.manifest))

    def under(self, prefix: str) -> Checkpointed:
        """Return the tensors whose names have a prefix, which is removed."""
        return Checkpointed(self._folder, self._prefix + prefix)

    def __getitem__(self, name: str) -> Tensor:
        shape = self.entry(name).shape
        return self.part(name, (0,) * len(shape), shape)

    def entry(self, name: str) -> Entry:
        """Dtype and shape of a tensor."""
        return self.manifest.tensors[self._prefix + name]

    def part(self, name: str, start: Shape, size: Shape) -> Tensor:
        """Return a box of a tensor; reads and verifies only the blocks of the box.

        Args:
            name: name of the tensor.
            start: index of the first element.
            size: extents of the box.
        """
        from forge_ckpt.shards import Box, empty, read_verified

        name = self._prefix + name
        entry = self.manifest.tensors[name]
        box = Box(empty(Entry(entry.dtype, size)), start, None, entry)
        return read_verified(self._folder, self.manifest, {name: box}, self._index)[name]

    def on_meta(self) -> dict[str, Tensor]:
        """Return dtypes and shapes as tensors on the meta device."""
        import torch

        described = ((name, self.entry(name)) for name in self)
        return {
            name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
            for name, entry in described
        }

    def __iter__(self) -> Iterator[str]:
        skip = len(self._prefix)
        return (name[skip:] for name in self.manifest.tensors if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
