"""Offloaded activations: equal gradients, and streams that never touch the same memory out of order.

Streams are played on a CPU: what runs beside what is noted, and any two uses of one memory that no mark and
no wait puts in order are a race, as is memory that its stream takes again while another one may still use it.
"""

import weakref
from contextlib import contextmanager

import pytest
import torch
from forge_parallel.offload import LEAVING, Offload, Saved, Streams
from torch import nn
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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(self.up(x).sigmoid() * self.up(x).tanh())


def run(model: nn.Sequential, streams: Played, passes: int, again: bool) -> list[torch.Tensor]:
    """Gradients, of several forward passes before the first backward pass."""
    inputs = [torch.full((32, 16), 0.1 * (n + 1), requires_grad=True) for n in range(passes)]
    with streams:
        losses = [model(x).square().sum() for x in inputs]
        for loss in losses:
            if again:
                loss.backward(retain_graph=True)
            loss.backward()
    found = [*(x.grad for x in inputs), *(p.grad for p in model.parameters())]
    model.zero_grad()
    return found


def offloaded(streams: Played) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(5)))
    way = Offload(lambda device: streams)
    for index, block in enumerate(model):
        way.apply(block, index == 0)
    return model


@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_are_equal_and_nothing_is_out_of_order(passes, again):
    torch.manual_seed(0)
    plain = run(nn.Sequential(*(Block() for _ in range(5))), Played(), passes, again)
    streams = Played()
    model = offloaded(streams)
    for _ in range(2):  # steps
        found = run(model, streams, passes, again)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert streams.copied > 0 and not streams.races


@pytest.mark.parametrize(
    ("place", "name"), [(Saved, "free"), (Played, "wait"), (Played, "mark")], ids=["free", "wait", "mark"]
)
def test_played_streams_see_a_race(place, name, monkeypatch):
    """Memory that is freed without waiting, and streams that do not wait for each other."""
    streams = Played()
    if place is Saved:
        monkeypatch.setattr(Saved, "free", lambda self: self._sources.clear())
    elif name == "wait":
        monkeypatch.setattr(Played, "wait", lambda self, mark: None)
    else:
        monkeypatch.setattr(Played, "mark", lambda self: {})
    run(offloaded(streams), streams, 1, False)
    assert streams.races


def test_device_holds_what_two_blocks_save_and_nothing_after_the_backward_pass(monkeypatch):
    groups, held = [], []

    class Counted(Saved):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            groups.append(self)

        def add(self, tensor):
            number = super().add(tensor)
            held.append(sum(bool(one._sources) for one in groups))
            return number

    monkeypatch.setattr("forge_parallel.offload.Saved", Counted)
    streams = Played()
    run(offloaded(streams), streams, 1, False)
    assert len(groups) == 5 and max(held) == LEAVING + 1
    assert not any(one._sources or one._back for one in groups)
