"""Activations that wait for the backward pass in host memory.

They are copied on a stream of their own, parallel to the computation: the activations of a block leave while
the next block computes, and return while the block after it computes its backward pass. So the device holds
the activations of two blocks at a time.

Streams and their allocators do not know of each other, so three things must be ordered here. A copy starts
after its source is computed. Memory is freed after all its readers are done. Memory that the copy stream
allocates may have been freed before, so the copy stream waits for all earlier computation.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from forge_parallel.tensor import local_part

LEAVING = 1
"""Blocks whose activations may still be on their way to the host while another one computes."""


class Streams:
    """The streams of a device that computes and copies in one order: nothing ever waits."""

    def beside(self) -> AbstractContextManager[Any]:
        """Run the block's operations on the copy stream, beside the computation."""
        return nullcontext()

    def mark(self) -> Any:
        """Return a mark of all operations so far, for `wait`."""

    def wait(self, mark: Any) -> None:
        """Make later operations wait for a mark."""


class CudaStreams(Streams):
    """The streams of a GPU, with one for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._copies = device, torch.cuda.Stream(device)

    def beside(self) -> AbstractContextManager[Any]:
        """See `Streams`."""
        return torch.cuda.stream(self._copies)

    def mark(self) -> Any:
        """See `Streams`."""
        return torch.cuda.current_stream(self._device).record_event()

    def wait(self, mark: Any) -> None:
        """See `Streams`."""
        torch.cuda.current_stream(self._device).wait_event(mark)


class Saved:
    """The tensors that one forward pass of one block saves.

    Args:
        device: the device of these tensors; a pass that saves on several devices has one `Saved` for each.
        streams: the streams of the device.
        before: the tensors that the block before saved in the same pass; None for the first.
    """

    def __init__(self, device: torch.device, streams: Streams, before: Saved | None) -> None:
        self._device, self._streams, self._before = device, streams, before
        self._sources: dict[int, Tensor] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._layouts: list[tuple[Sequence[int], Sequence[int]]] = []
        self._kept: list[Tensor] = []
        self._uses: list[int] = []
        self._back: dict[int, Tensor] | None = None
        self._left: Any = None
        self._arrived: Any = None

    def add(self, tensor: Tensor) -> int:
        """Send a tensor to the host, once if several operations save it; returns its number."""
        memory = tensor.untyped_storage()._cdata, tensor.storage_offset()
        which = (*memory, tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if (known := self._numbers.get(which)) is not None:
            self._uses[known] += 1
            return known
        made = self._streams.mark()
        source = tensor.detach()
        sent = _in_a_line(source)
        kept = torch.empty(sent.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        with self._streams.beside():
            self._streams.wait(made)
            kept.copy_(sent, non_blocking=True)
            self._left = self._streams.mark()
        self._kept.append(kept)
        self._layouts.append((source.shape, source.stride()))
        self._uses.append(1)
        number = len(self._kept) - 1
        self._sources[number], self._numbers[which] = source, number
        return number

    def free(self) -> None:
        """Free the device memory of tensors whose copies have ended."""
        self._streams.wait(self._left)
        self._sources.clear()
        self._numbers.clear()

    def take(self, number: int) -> Tensor:
        """Return a tensor on its device again; starts to copy back the tensors of the block before."""
        self._uses[number] -= 1
        found = self._found(self._sources, number)
        if found is not None:  # of the last block: still here, and on its way as well
            self._streams.wait(self._left)
        else:
            self._bring()
            assert self._back is not None
            self._streams.wait(self._arrived)
            found = self._found(self._back, number)
        before, self._before = self._before, None
        if before is not None and not before._sources:
            before._bring()
        # not there in a second backward pass over the same graph
        return self._on_device(number) if found is None else found

    def _on_device(self, number: int) -> Tensor:
        """Return a tensor with the strides it was saved with, on which compiled code relies."""
        kept, (shape, strides) = self._kept[number], self._layouts[number]
        if kept.shape != shape:
            line = torch.empty_like(kept, device=self._device)
            return line.copy_(kept, non_blocking=True).as_strided(shape, strides)
        found = torch.empty_strided(shape, strides, dtype=kept.dtype, device=self._device)
        return found.copy_(kept, non_blocking=True)

    def _found(self, tensors: dict[int, Tensor], number: int) -> Tensor | None:
        """Return a tensor that is on its device; keep it until every operation that saved it has taken it."""
        return tensors.get(number) if self._uses[number] > 0 else tensors.pop(number, None)

    def _bring(self) -> None:
        if self._back is not None:
            return
        computed = self._streams.mark()
        with self._streams.beside():
            self._streams.wait(computed)
            self._back = {number: self._on_device(number) for number in range(len(self._kept))}
            self._arrived = self._streams.mark()


class Offload:
    """Keeps the tensors that blocks save for their backward passes on the host, except their parameters.

    Args:
        streams_of: returns the streams of a device; called when the device is first used.
    """

    def __init__(self, streams_of: Callable[[torch.device], Streams]) -> None:
        self._streams_of = cache(streams_of)
        self._last: dict[torch.device, Saved] = {}
        self._leaving: defaultdict[torch.device, deque[Saved]] = defaultdict(deque)

    def apply(self, block: nn.Module, is_first: bool) -> None:
        """Treat a block, in place.

        Args:
            block: of a model.
            is_first: whether no other block comes before it in a pass.
        """
        from torch.distributed.fsdp import FSDPModule  # only who offloads loads it

        forward = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            own = _memory_of([block])
            # experts may be units of their own, which gather their weights later and free them on their own
            units = [m for m in block.modules() if m is not block and isinstance(m, FSDPModule)]
            saved: dict[torch.device, Saved] = {}

            def pack(tensor: Tensor) -> tuple[Saved, int] | Tensor:
                if (memory := tensor.untyped_storage().data_ptr()) in own or memory in _memory_of(units):
                    return tensor
                if (device := tensor.device) not in saved:
                    before = None if is_first else self._last.get(device)
                    saved[device] = Saved(device, self._streams_of(device), before)
                return saved[device], saved[device].add(tensor)

            def unpack(packed: tuple[Saved, int] | Tensor) -> Tensor:
                return packed if isinstance(packed, Tensor) else packed[0].take(packed[1])

            with saved_tensors_hooks(pack, unpack):
                out = forward(*args, **kwargs)
            self._leave(saved)
            return out

        block.forward = run

    def _leave(self, saved: dict[torch.device, Saved]) -> None:
        """Note the saved tensors of a block, and free those of earlier blocks."""
        self._last = saved
        for device, one in saved.items():
            leaving = self._leaving[device]
            leaving.append(one)
            while len(leaving) > LEAVING:
                leaving.popleft().free()


def _in_a_line(tensor: Tensor) -> Tensor:
    """Return the memory that a tensor spans, to be copied as it lies; the tensor itself if that has gaps."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else 0
    return tensor if span > tensor.numel() else tensor.as_strided((span,), (1,))


def _memory_of(modules: Sequence[nn.Module]) -> set[int]:
    """Return the addresses of the parameters' memory, gathered ones included."""
    parameters = (parameter for module in modules for parameter in module.parameters())
    return {local_part(parameter).untyped_storage().data_ptr() for parameter in parameters}


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else Streams()


def offload(blocks: Iterable[nn.Module]) -> None:
    """Keep on the host the tensors that these blocks save for their backward passes; in place.

    The blocks are given in the order in which they run.
    """
    way = Offload(streams_of)
    for index, block in enumerate(blocks):
        way.apply(block, index == 0)
