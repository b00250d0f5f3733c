"""How are captured values copied once, to the device where they are wanted?"""

from collections.abc import Callable

import torch
from torch import Tensor


class Offload:
    """Copies values to a device; with None the copies stay on the device of the values.

    From a GPU to the CPU values go into pinned memory, without waiting: a copy is valid after `wait`.
    """

    def __init__(self, device: torch.device | str | None) -> None:
        self._device = None if device is None else torch.device(device)
        self._sources: set[torch.device] = set()  # GPUs from which copies may still be on their way

    def copy(self, value: Tensor) -> Tensor:
        """Return a copy that later operations do not change, for use in any mode; valid after `wait`."""
        if value.is_inference() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.copy(value)
        if not self._is_there(value):
            return self._moved(value)
        is_dense = value.layout == torch.strided
        return value.clone(memory_format=torch.contiguous_format) if is_dense else value.clone()

    def kept(self, value: Tensor) -> Tensor:
        """Move a value that nobody else uses to the device; valid after `wait`."""
        return value if self._is_there(value) else self._moved(value)

    def send(self, value: Tensor, deliver: Callable[[Tensor], None]) -> None:
        """Pass a value on: the value itself if it is on the device, else its copy after it has arrived."""
        if not self._is_there(value):
            value = self._moved(value)
            self.wait()
        deliver(value)

    def wait(self) -> None:
        """Wait until all copies have arrived."""
        for device in self._sources:
            torch.cuda.synchronize(device)
        self._sources.clear()

    def _is_there(self, value: Tensor) -> bool:
        """Whether a value is on the target device; a target without an index is any device of its type."""
        target, device = self._device, value.device
        return target is None or (target.type == device.type and target.index in (None, device.index))

    def _moved(self, value: Tensor) -> Tensor:
        if self._device != torch.device("cpu") or value.device.type != "cuda":
            return value.to(self._device)
        # On the model's own stream, so that what it does to the value in place comes later.
        target = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._sources.add(value.device)
        return target.copy_(value, non_blocking=True)
