"""Two streams of a device, played on a CPU: tells races.

What runs beside what is noted, and any two uses of one memory that no mark and no wait puts in order are a
race, as is memory that its stream takes again while another one may still use it.
"""

import weakref
from contextlib import contextmanager

import torch
from forge_parallel.offload import Streams
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[str, int]
"""How far each stream is."""


class Memory:
    """One storage: of which stream, and when each stream has last read and written it."""

    def __init__(self, home: str | None) -> None:
        self.home, self.read, self.written = home, Clock(), Clock()


class Played(TorchDispatchMode, Streams):
    """Two streams; each operation is of the one that is current when it is said."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.clocks = "main", {"main": Clock(), "copies": Clock()}
        self.memory: dict[int, Memory] = {}
        self.freed = {"main": Clock(), "copies": Clock()}
        self.copied, self.races = 0, []

    @contextmanager
    def beside(self):
        self.now = "copies"
        try:
            yield
        finally:
            self.now = "main"

    def mark(self):
        return dict(self.clocks[self.now])

    def wait(self, mark):
        later(self.clocks[self.now], mark)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        mine = self.clocks[self.now]
        mine[self.now] = mine.get(self.now, 0) + 1
        name = func.name()
        self.copied += name == "aten::copy_"
        writes = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        reads = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if func.is_view or "empty" in name:
            reads, takes, writes = [], writes, []
        else:
            takes = writes
            reads = [x for x in reads if all(x is not one for one in writes)]
        for tensor in takes:
            # what is taken by `empty` itself is memory of the host, whose allocator knows of copies
            self.take(tensor, None if name == "aten::empty.memory_format" else self.now)
        for tensor in reads:
            self.use(tensor, name, "read", ("written",))
        for tensor in writes:
            self.use(tensor, name, "written", ("read", "written"))
        return out

    def take(self, tensor, home):
        storage = tensor.untyped_storage()
        if (key := storage._cdata) in self.memory:
            return
        self.memory[key] = Memory(home)
        weakref.finalize(storage, self.free, key)
        if home is not None and self.unordered(self.freed[home]):
            self.races.append(f"{home} takes memory that another stream may still use")

    def use(self, tensor, name, kind, against):
        self.take(tensor, self.now)
        memory = self.memory[tensor.untyped_storage()._cdata]
        if any(self.unordered(getattr(memory, one)) for one in against):
            self.races.append(f"{name} of {self.now}")
        later(getattr(memory, kind), {self.now: self.clocks[self.now][self.now]})

    def unordered(self, uses):
        mine = self.clocks[self.now]
        return any(mine.get(stream, 0) < time for stream, time in uses.items())

    def free(self, key):
        """What was freed, its own stream may take again."""
        memory = self.memory.pop(key)
        if memory.home is not None:
            later(self.freed[memory.home], memory.read)
            later(self.freed[memory.home], memory.written)


def later(clock, other):
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)
