"""How captured values are copied: once, to where they are wanted, without holding the model up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


class Offload:
    """Copies values to a device; None leaves copies where the values are.

    From a GPU to the CPU the copy runs on a stream of its own, one for each GPU, into pinned memory. Once
    more than `max_inflight_bytes` are on their way, the next copy waits for the oldest, so that a fast model
    cannot fill the memory.
    """

    def __init__(self, device: torch.device | str | None, max_inflight_bytes: int) -> None:
        self._device = None if device is None else torch.device(device)
        self._budget = max_inflight_bytes
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._inflight: deque[tuple[torch.cuda.Event, int, Callable[[], None]]] = deque()
        self._bytes = 0

    def copy(self, value: Tensor) -> Tensor:
        """A copy that no later operation of the model changes, to be used in any mode; valid after `wait`."""
        if value.is_inference() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.copy(value)
        if not self._is_there(value):
            return self._moved(value, lambda copied: None)
        is_dense = value.layout == torch.strided
        return value.clone(memory_format=torch.contiguous_format) if is_dense else value.clone()

    def kept(self, value: Tensor) -> Tensor:
        """A value that nobody else has, where it belongs; valid after `wait`."""
        return value if self._is_there(value) else self._moved(value, lambda copied: None)

    def send(self, value: Tensor, deliver: Callable[[Tensor], None]) -> None:
        """Hand a value over: itself and at once if it is there already, else its copy once arrived."""
        if self._is_there(value):
            deliver(value)
        else:
            self._moved(value, deliver)

    def _is_there(self, value: Tensor) -> bool:
        """Whether a value needs no move; a target without a number is any device of its kind."""
        target, device = self._device, value.device
        return target is None or (target.type == device.type and target.index in (None, device.index))

    def _moved(self, value: Tensor, deliver: Callable[[Tensor], None]) -> Tensor:
        if self._device != torch.device("cpu") or value.device.type != "cuda":
            moved = value.to(self._device)
            deliver(moved)
            return moved
        size = value.numel() * value.element_size()
        self.wait(max(0, self._budget - size))
        stream = self._streams.get(value.device) or torch.cuda.Stream(value.device)
        self._streams[value.device] = stream
        # The producer's stream makes the copy that is safe from in-place operations; the other only moves it.
        source = value.clone(memory_format=torch.contiguous_format)
        target = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(value.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            source.record_stream(stream)
            arrived = torch.cuda.Event()
            arrived.record(stream)
        self._inflight.append((arrived, size, partial(deliver, target)))
        self._bytes += size
        return target

    def wait(self, until_bytes: int = 0) -> None:
        """Return when all copies, but so many bytes, have arrived and are delivered."""
        while self._inflight and self._bytes > until_bytes:
            arrived, size, deliver = self._inflight.popleft()
            arrived.synchronize()
            self._bytes -= size
            deliver()
