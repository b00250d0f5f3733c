"""Times parts of a step on the device by events in its queue, which are read after they have happened."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from forge_trainer.clock import STEP
from forge_trainer.hooks.base import Hook, RunView
from forge_trainer.progress import Progress
from forge_trainer.steps.base import StepOutput

OPTIMIZER = "optimizer"


class Stamp(Protocol):
    """An event in the queue of a device, such as `torch.cuda.Event`."""

    def record(self) -> None:
        """Put the event at the end of the queue."""
        ...

    def query(self) -> bool:
        """Return whether the device has reached the event."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds from this event to a later one."""
        ...


class HostStamp:
    """An event of the host, for a device that computes synchronously."""

    def record(self) -> None:
        """See `Stamp`."""
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        """See `Stamp`."""
        return True

    def elapsed_time(self, end_event: HostStamp, /) -> float:
        """See `Stamp`."""
        return (end_event.at_s - self.at_s) * 1e3


class Parts:
    """A sequence of parts, each from its beginning to the beginning of the next one.

    Args:
        make: makes a new event.

    Attributes:
        total_s: seconds of each part that the device has finished.
        begun: number of times that each finished part began.
    """

    def __init__(self, make: Callable[[], Stamp]) -> None:
        self._make, self._unused = make, list[Stamp]()
        self._queue: deque[tuple[str, Stamp]] = deque()
        self.total_s: defaultdict[str, float] = defaultdict(float)
        self.begun: defaultdict[str, int] = defaultdict(int)

    def enter(self, name: str) -> None:
        """Begin a part, and end the previous one."""
        if self._queue and self._queue[-1][0] == name:
            return
        stamp = self._unused.pop() if self._unused else self._make()
        stamp.record()
        self._queue.append((name, stamp))

    def read(self) -> None:
        """Add up the spans that the device has finished; never waits."""
        while len(self._queue) > 1 and self._queue[1][1].query():
            name, stamp = self._queue.popleft()
            self.total_s[name] += stamp.elapsed_time(self._queue[0][1]) / 1e3
            self.begun[name] += 1
            self._unused.append(stamp)

    def clear(self) -> None:
        """Reset the sums; unfinished spans count after the reset."""
        self.total_s.clear()
        self.begun.clear()


class DeviceTime(Hook):
    """The hook of `DeviceTimeConfig`.

    Args:
        run: the run.
        every: steps between log entries.
    """

    span = "device time"

    def __init__(self, run: RunView, every: int) -> None:
        self.every, self._run = every, run
        self._handles: list[RemovableHandle] = []
        cuda = run.mesh.device.type == "cuda"
        self._parts = Parts((lambda: torch.cuda.Event(enable_timing=True)) if cuda else HostStamp)
        self._is_first = run.env.rank == 0

    def on_start(self, progress: Progress) -> None:
        """See `Hook.on_start`."""
        if not self._is_first:
            return
        optimizer, enter = self._run.optimizer, self._parts.enter
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: enter(OPTIMIZER)),
            optimizer.register_step_post_hook(lambda *_: enter(STEP)),
        ]
        self._run.clock.watchers.append(enter)

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`."""
        if not self._is_first:
            return
        self._parts.read()
        # the optimizer cuts a step in two, unless it was not asked
        steps = max(1, self._parts.begun[STEP] - self._parts.begun[OPTIMIZER])
        self._run.log({f"device/{name}_s": s / steps for name, s in self._parts.total_s.items()})
        self._parts.clear()

    def close(self) -> None:
        """See `Hook.close`."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self._run.clock.watchers.remove(self._parts.enter)
            self._handles = []
