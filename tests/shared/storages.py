"""Follows the memory that operations take, on any device: also of fake tensors, which have none."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SYNCS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::equal", "aten::masked_select"}
"""Operations after which the host waits for the device."""

KERNELS = ("aten::", "torchao::", "_c10d_functional::", "c10d::", "fsdp::", "higher_order::")
"""Namespaces of operations that compute."""

NO_KERNELS = {
    "aten::detach",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::promote_types",
}


class Storages(TorchDispatchMode):
    """While it is active, counts operations, the bytes of living results, and where the host would wait.

    What existed before counts from the moment that `known` names it.

    Attributes:
        live: bytes of what lives, by device.
        peak: the most of it on `device`, since `start`.
        operations: how often each ran.
        kernels: how many of them compute or copy: no views, nothing that only takes memory.
        moved: bytes of all that operations read and wrote.
        syncs: what made the host wait, and how often: copies of memory that is not pinned among them.
        device: whose memory is followed.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device, self.live, self.peak, self.moved = device, 0, 0, 0
        self.operations: Counter[str] = Counter()
        self.kernels = 0
        self.syncs: Counter[str] = Counter()
        self._seen: dict[int, Any] = {}

    def known(self, *values: Any) -> None:
        """Count the storages of these tensors as living."""
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor):
                self._note(tensor)

    def start(self) -> None:
        """Forget peak and counts, not what lives."""
        self.peak, self.moved, self.kernels = self.live, 0, 0
        self.operations.clear()
        self.syncs.clear()

    def _note(self, tensor: Tensor) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor.device.type != self.device:
            return
        storage = tensor.untyped_storage()
        if (key := storage._cdata) in self._seen:
            return

        def gone(_: Any) -> None:
            self.live -= self._seen.pop(key)[1]

        self._seen[key] = (weakref.ref(storage, gone), 0)
        self._resized(storage)

    def _resized(self, storage: Any) -> None:
        """The size of a storage that is followed is known; FSDP2 frees what it gathers by a size of 0."""
        if (seen := self._seen.get(storage._cdata)) is None:
            return
        self._seen[storage._cdata] = (seen[0], storage.nbytes())
        self.live += storage.nbytes() - seen[1]
        self.peak = max(self.peak, self.live)

    def __enter__(self) -> Any:
        """Look at sizes too."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            resize(storage, size)
            self._resized(storage)

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Look no more."""
        del torch.UntypedStorage.resize_
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at what it gives."""
        out = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        if not name.startswith(KERNELS):
            return out
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.operations[name] += 1
        if not func.is_view and name not in NO_KERNELS:
            self.kernels += 1
            self.moved += sum(x.numel() * x.element_size() for x in [*given, *made])
        if name in SYNCS and any(x.device.type == self.device for x in given):
            self.syncs[name] += 1
        if name in ("aten::_to_copy", "aten::copy_") and _waits(name, given, made, args, kwargs or {}):
            self.syncs[f"{name} between host and device"] += 1
        self.known(out)
        return out


def _waits(name: str, given: list[Tensor], made: list[Tensor], args: Any, options: dict[str, Any]) -> bool:
    """Whether a copy between host and device is one that the host waits for."""
    source, target = (given[0], made[0]) if name == "aten::_to_copy" else (given[1], given[0])
    if (source.device.type == "cpu") == (target.device.type == "cpu"):
        return False
    direct = options.get("non_blocking", args[2] if name == "aten::copy_" and len(args) > 2 else False)
    return not direct
