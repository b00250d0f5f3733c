"""Every way to the experts of other ranks against all experts on one rank: outputs and gradients."""

import pytest
import torch
import torch.distributed as dist
from forge_parallel import (
    Env,
    MeshConfig,
    ParallelConfig,
    ParallelError,
    Plan,
    build_mesh,
    dispatch,
    parallelize,
)
from forge_parallel.dispatch_config import AllToAllConfig, DispatcherConfig, TwoLevelConfig, dispatchers
from forge_parallel.testing import run_ranks
from torch import nn

RANKS, EXPERTS, DIM = 4, 16, 5
WAYS: dict[str, DispatcherConfig] = {
    "flat": AllToAllConfig(),
    "chunked": AllToAllConfig(chunks=4),
    "two-level": TwoLevelConfig(node_ranks=2),
    "two-level chunked": TwoLevelConfig(node_ranks=2, chunks=2),
}


class Experts(nn.Module):
    """Tanh of a matrix each, in a loop."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, DIM, DIM))

    def forward(self, rows, ends):
        return made(rows, self.weight, ends)


def made(rows, weight, ends):
    parts = torch.tensor_split(rows, ends.cpu().tolist())
    return torch.cat([*(torch.tanh(part @ w) for part, w in zip(parts, weight, strict=False)), parts[-1]])


class Model(nn.Module):
    """A block that is a layer of experts, as anybody may write it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].experts, self.layers[0].dispatch = Experts(), None


def weights():
    return torch.randn(EXPERTS, DIM, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def routed(rank, case):
    """Rows of a rank and where they end: at random, some experts without; none at all; all to one expert."""
    generator = torch.Generator().manual_seed(7 * rank + 1)
    counts = torch.randint(0, 4, (EXPERTS,), generator=generator) * (
        torch.rand(EXPERTS, generator=generator) < 0.6
    )
    counts = {"random": counts, "none": counts * (rank == 1), "one": torch.eye(EXPERTS).int()[9] * 6}[case]
    rows = torch.randn(int(counts.sum()) + rank, DIM, generator=generator, dtype=torch.float64)
    return rows, counts.cumsum(0).int()


def compared(way, case):
    """What is left of differences to all experts on one rank, and how often `meanwhile` was called."""
    mesh = build_mesh(MeshConfig(ep=RANKS), Env.detect())
    whole = weights().requires_grad_()
    expected = []
    for rank in range(RANKS):
        rows, ends = routed(rank, case)
        out = made(rows.requires_grad_(), whole, ends)
        (out * torch.arange(1, DIM + 1)).sum().backward()
        expected.append((out.detach(), rows.grad))
    served = WAYS[way].build(mesh.ep)
    rank, each = dist.get_rank(), EXPERTS // RANKS
    mine = weights()[rank * each : (rank + 1) * each].clone().requires_grad_()
    rows, ends = routed(rank, case)
    called = []
    out = served(
        lambda rows, ends: made(rows, mine, ends),
        rows.requires_grad_(),
        ends,
        meanwhile=lambda: called.append(1),
    )
    (out * torch.arange(1, DIM + 1)).sum().backward()
    reference = [*expected[rank], whole.grad[rank * each : (rank + 1) * each]]
    found = [out, rows.grad, mine.grad]
    assert all(a.shape == b.shape for a, b in zip(found, reference, strict=True))
    return [
        (a - b).abs().max().item() if a.numel() else 0.0 for a, b in zip(found, reference, strict=True)
    ], called


@pytest.mark.dist
@pytest.mark.parametrize("case", ["random", "none", "one"])
@pytest.mark.parametrize("way", WAYS)
def test_rows_come_back_from_the_experts_of_other_ranks(way, case):
    for differences, called in run_ranks(compared, RANKS, way, case):
        assert max(differences) < 1e-13
        assert called == [1]


def logged(chunks):
    """What happens in which order, forward and backward."""
    mesh, said, x = build_mesh(MeshConfig(ep=2), Env.detect()), [], torch.ones(4, DIM, requires_grad=True)
    begin, wait = dispatch.functional.all_to_all_single, dispatch.functional.wait_tensor

    def noted(name, tensor):
        tensor.register_hook(lambda _: said.append(f"{name} back"))
        said.append(name)
        return tensor

    def experts(rows, ends):
        return noted("experts", rows * 2) * 3

    beside = []
    with pytest.MonkeyPatch.context() as patch:
        for name, does, word in (("all_to_all_single", begin, "begin"), ("wait_tensor", wait, "wait")):
            patch.setattr(dispatch.functional, name, lambda *a, f=does, w=word: (said.append(w), f(*a))[1])
        ends = torch.arange(1, 5, dtype=torch.int32)
        made = AllToAllConfig(chunks=chunks).build(mesh.ep)(
            experts, x, ends, lambda: beside.append(noted("beside", x * 2) * 3)
        )
        (made + beside[0]).sum().backward()
    return said[said.index("begin", 1) :]  # after the counts


@pytest.mark.dist
def test_rows_travel_while_others_are_computed_forward_and_backward():
    forward = ["begin", "beside", "wait", "experts", "begin", "wait"]
    backward = ["begin", "wait", "experts back", "begin", "beside back", "wait"]
    assert run_ranks(logged, 2, 1) == [[*forward, *backward]] * 2
    assert run_ranks(logged, 2, 2)[0][:6] == ["begin", "beside", "begin", "wait", "experts", "begin"]


def registered():
    @dispatchers.register("loop")
    class LoopConfig(DispatcherConfig):
        def build(self, mesh):
            return lambda experts, rows, ends, meanwhile=None: ("served by", mesh.size())

    mesh = build_mesh(MeshConfig(ep=2), Env.detect())
    model, plan = Model(), Plan.of({"blocks": "layers.*", "experts": ["layers.*"]})
    parallelize(model, mesh, plan, ParallelConfig(expert_parallel=LoopConfig()))
    return model.layers[0].dispatch(None, None, None)


@pytest.mark.dist
def test_dispatcher_of_others_takes_the_place_of_ours():
    assert run_ranks(registered, 2) == [("served by", 2)] * 2


@pytest.mark.parametrize(
    ("config", "groups", "said"),
    [
        (AllToAllConfig(chunks=3), 1, "chunks = 3 does not divide the 4 experts"),
        (AllToAllConfig(), 3, "groups = 3 and mesh.ep = 4"),
        (TwoLevelConfig(node_ranks=4), 1, "node_ranks = 4 does not cut mesh.ep = 4"),
        (TwoLevelConfig(node_ranks=3), 1, "node_ranks = 3 does not cut"),
        (TwoLevelConfig(node_ranks=1), 2, "groups = 2 on 4 nodes"),
    ],
)
def test_refuses_what_does_not_divide(config, groups, said):
    with pytest.raises(ValueError, match=said):
        config.require(RANKS, EXPERTS, groups)
    for way in WAYS.values():
        way.require(RANKS, EXPERTS, 4)


def refused():
    mesh = build_mesh(MeshConfig(ep=2), Env.detect())
    plan = Plan.of({"blocks": "layers.*", "experts": ["layers.*"]})
    with pytest.raises(ParallelError, match=r"layers.0: expert_parallel.chunks = 3"):
        parallelize(Model(), mesh, plan, ParallelConfig(expert_parallel=AllToAllConfig(chunks=3)))


@pytest.mark.dist
def test_refuses_chunks_that_do_not_divide_a_layer_of_the_model():
    run_ranks(refused, 2)
