"""Offloaded activations: equal gradients, and streams that never touch the same memory out of order."""

from unittest.mock import patch

import pytest
import torch
from forge_parallel.offload import LEAVING, Offload, Saved, Streams, offload
from forge_parallel.testing import run_ranks
from played_streams import Played
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard


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


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_each_tensor_comes_back_to_its_own_device(monkeypatch):
    """A block may save numbers of the host beside tensors of a GPU, which are played."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: False))  # nothing can be pinned here
    way, block, devices = Offload(lambda device: Streams()), nn.Identity(), []

    def forward(*tensors):
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        devices.extend(hooks[1](hooks[0](tensor)).device.type for tensor in tensors)

    block.forward = forward
    way.apply(block, True)
    with FakeTensorMode():
        block(torch.ones(3, device="cuda"), torch.ones(()), torch.ones(2, device="cuda"))
    assert devices == ["cuda", "cpu", "cuda"]


class Shared(nn.Module):
    """Saves its input for two products, as projections of queries and keys do, and another view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(8, 16)

    def forward(self, x):
        return self.a(x) + self.b(x) + self.c(x[:, :8])


@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_a_tensor_that_is_saved_twice_is_copied_once(again):
    torch.manual_seed(0)
    model, streams, numbers, sent = nn.Sequential(*(Shared() for _ in range(3))), Played(), [], []
    wanted = run(model, Played(), 1, again)
    way, add = Offload(lambda device: streams), Saved.add
    for index, block in enumerate(model):
        way.apply(block, index == 0)

    def counted(self, tensor):
        before = streams.copied
        numbers.append(number := add(self, tensor))
        sent.append(streams.copied - before)
        return number

    with patch.object(Saved, "add", counted):
        found = run(model, streams, 1, again)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)) and not streams.races
    assert numbers == [0, 0, 1] * 3 and sent == [1, 0, 1] * 3


def test_a_tensor_that_was_written_meanwhile_is_another_one():
    saved, x = Saved(torch.device("cpu"), Streams(), None), torch.ones(4)
    numbers = [saved.add(x), saved.add(x), saved.add(x.mul_(2)), saved.add(x)]
    assert numbers == [0, 0, 1, 1]
    saved.free()
    assert [saved.take(number).sum().item() for number in numbers] == [4, 4, 8, 8]


@pytest.mark.parametrize("freed", [False, True], ids=["still-there", "back"])
def test_tensors_come_back_with_their_strides(freed):
    """Compiled code checks them: heads that were transposed, parts of a wider tensor, what is expanded."""
    saved, whole = Saved(torch.device("cpu"), Streams(), None), torch.arange(2.0 * 6 * 4 * 8).view(2, 6, 4, 8)
    given = [whole.transpose(1, 2), whole[..., 3:5], whole[1, 2:3].expand(5, 4, 8), whole[:0], whole.sum()]
    numbers = [saved.add(tensor) for tensor in given]
    assert [kept.numel() for kept in saved._kept] == [384, 96, 32, 0, 1], "gaps and repeats stay here"
    if freed:
        saved.free()
    for number, tensor in zip(numbers, given, strict=True):
        found = saved.take(number)
        assert torch.equal(found, tensor) and found.stride() == tensor.stride()


class Nested(Block):
    """With a part that is sharded on its own, as experts are."""

    def forward(self, x):
        return x + self.down(self.up(x).sigmoid())


def sent_to_the_host() -> list[int]:
    """Sizes of the tensors of a pass whose weights are gathered for it, the inner ones last."""
    mesh, model, sizes = init_device_mesh("cpu", (2,)), nn.Sequential(*(Nested() for _ in range(3))), []
    offload(model)
    for block in model:
        for module in (block.up, block):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    add = Saved.add
    with patch.object(Saved, "add", lambda self, tensor: sizes.append(tensor.numel()) or add(self, tensor)):
        model(torch.ones(3, 16, requires_grad=True)).sum().backward()
    return sizes


@pytest.mark.dist
def test_weights_stay_also_where_a_part_of_a_block_is_gathered_while_it_runs():
    """A copy of them would outlast their memory, which FSDP2 frees when the part is done."""
    for sizes in run_ranks(sent_to_the_host, 2):
        assert sizes and max(sizes) == 3 * 64
