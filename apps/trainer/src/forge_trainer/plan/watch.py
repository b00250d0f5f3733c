"""Watches operations in torch's dispatcher: memory, FLOPs, bytes and collectives."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forge_trainer.plan.collectives import is_collective
from forge_trainer.plan.flops import flops_of
from forge_trainer.plan.places import Place, Places

NO_KERNELS = {
    "_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty",
    "promote_types",
}  # fmt: skip
"""Operations that compute nothing. Operations outside `SPACES` are queries, such as for a device."""

SPACES = ("aten", "fsdp", "torchao", "higher_order")
"""Namespaces of operations that compute."""

OVERWRITES = {"copy_", "fill_", "zero_", "zeros_like", "ones_like", "full_like"}
"""Operations that do not read their first argument."""


COPIES = {"split_with_sizes_copy", "chunk_cat", "_chunk_cat", "all_gather_copy_in"}
"""Operations of FSDP2 before and after it communicates."""


MATMULS = {"mm": 0, "addmm": 1, "_grouped_mm": 0, "_scaled_mm": 0}
"""Products with a weight, and the index of the argument with the rows."""


class Storage:
    """One allocation of memory.

    Attributes:
        kind: kind of its use; None as long as it is unknown.
        place: place of the allocation.
        op: operation that allocated it.
        resized: whether it was freed and allocated again, as FSDP2 does with gathered parameters.
        ended: place at which it was freed; None if it is still alive.
        in_loss: whether the loss allocated it.
        sent: whether it was sent to another pipeline stage.
        width: size of the last dim of its tensor.
    """

    __slots__ = ("ended", "in_loss", "kind", "op", "place", "resized", "sent", "width")

    def __init__(self, place: Place, op: str, in_loss: bool, width: int) -> None:
        self.place, self.op, self.in_loss, self.width = place, op, in_loss, width
        self.kind: str | None = None
        self.resized = self.sent = False
        self.ended: Place | None = None


class Watch(TorchDispatchMode):
    """A mode that follows the memory of tensors, counts FLOPs and bytes, and records collectives.

    Tensors made before the mode count from the moment that `known` names them. Shards of a DTensor on other
    ranks do not count.

    Attributes:
        places: the places of the step.
        live: bytes of living tensors.
        flops: FLOPs by micro-batch and kind.
        moved: bytes that operations without FLOPs read and wrote, by micro-batch and phase; bytes of FSDP2
            are separate, as `gather`.
        kernels: number of operations that compute or copy, by micro-batch.
        on_operation: called with each collective: (operation, arguments, results); None ignores them.
        fakes: the fake-tensor mode whose tensors count, unlike tensors in trials of DTensor; None counts all.

    Args:
        rounding: granularity of the allocator, in bytes.
    """

    def __init__(self, places: Places, rounding: int = 1) -> None:
        super().__init__()
        self.places, self.live = places, 0
        self.on_operation: Callable[[str, Any, Any], None] | None = None
        self.fakes: Any = None
        self._rounding = rounding
        self._seen: dict[int, tuple[Any, int, Storage]] = {}
        self.start()

    def start(self) -> None:
        """Reset the counts; living tensors stay known."""
        self.begun, self.begun_live = [entry[1:] for entry in self._seen.values()], self.live
        self.events: list[tuple[Storage, int, Place]] = []
        self.flops: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.moved: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.kernels: defaultdict[str, int] = defaultdict(int)

    def add_flops(self, kind: str, number: float) -> None:
        """Count FLOPs that no operation reports."""
        self.flops[self.places.now.micro, kind] += number

    def known(self, kind: str, tensors: Iterable[Any]) -> None:
        """Assign a kind to tensors; begin to follow tensors that are not followed yet."""
        for tensor in tensors:
            for part in plain_parts(tensor):
                self._note(part, "")
                if (seen := self._seen.get(part.untyped_storage()._cdata)) is not None:
                    seen[2].kind = kind

    def _note(self, tensor: Tensor, op: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen or tensor.device.type == "meta" or self._is_foreign(tensor):
            return

        def gone(_: Any) -> None:
            _, size, made = self._seen.pop(key)
            made.ended = self.places.now
            self._changed(made, -size)

        width = tensor.shape[-1] if tensor.ndim else 1
        made = Storage(self.places.now, op, self.places.loss, width)
        self._seen[key] = (weakref.ref(storage, gone), 0, made)
        self._resized(storage)

    def _is_foreign(self, tensor: Any) -> bool:
        return self.fakes is not None and getattr(tensor, "fake_mode", self.fakes) is not self.fakes

    def _resized(self, storage: Any) -> None:
        """Update the size of a followed storage; FSDP2 frees gathered parameters by a size of 0."""
        if (seen := self._seen.get(storage._cdata)) is None:
            return
        reference, before, made = seen
        size = -(-storage.nbytes() // self._rounding) * self._rounding
        if size != before:
            made.resized = made.resized or before > 0
            self._seen[storage._cdata] = (reference, size, made)
            self._changed(made, size - before)

    def _changed(self, made: Storage, change: int) -> None:
        if change:
            self.live += change
            self.events.append((made, change, self.places.now))

    def __enter__(self) -> Any:
        """Enter the mode, and watch changes of storage sizes."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            resize(storage, size)
            self._resized(storage)

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Leave the mode, and stop to watch storage sizes."""
        del torch.UntypedStorage.resize_
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record its inputs and outputs."""
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # of all calls more than half
        if any(hasattr(one, "__tensor_flatten__") for one in types):
            return NotImplemented  # it is made of plain tensors, whose operations come here
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as real ones do: fake ones would take memory
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if is_collective(func):
            if name == "send":
                self._sent(args)
            if self.on_operation is not None:
                self.on_operation(func._schema.name, (*args, *kwargs.values()), out)
        elif not func.is_view and name not in NO_KERNELS and func.namespace in SPACES:
            self._count(func, name, args, kwargs, out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor, name)
        return out

    def _sent(self, args: Any) -> None:
        for tensor in tree_leaves(args):
            if isinstance(tensor, Tensor) and (seen := self._seen.get(tensor.untyped_storage()._cdata)):
                seen[2].sent = True

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        leaves = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        if any(map(self._is_foreign, leaves)):
            return
        place = self.places.now
        self.kernels[place.micro] += 1
        if found := flops_of(func, args, kwargs, out):
            self.flops[place.micro, "attention" if "attention" in name else "matmul"] += found
            if self.places.compiled is not None and place.phase == "forward" and name in MATMULS:
                self.places.compiled.took(place.module, args[MATMULS[name]])
            return
        size = sum(x.numel() * x.element_size() for x in leaves)
        if name in OVERWRITES:
            size -= args[0].numel() * args[0].element_size()
        own = func.namespace == "fsdp" or name in COPIES
        self.moved[place.micro, "gather" if own else place.phase] += size


def plain_parts(tensor: Any) -> list[Tensor]:
    """Return the plain tensors on this rank of which a tensor consists."""
    if not isinstance(tensor, Tensor):
        return []
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return [tensor]
    names = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return [part for name in names for part in plain_parts(getattr(tensor, name))]
