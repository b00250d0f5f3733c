"""Which part of a tensor a rank holds, under random layouts and under FSDP2 over tensor parallelism."""

import random

import pytest
import torch
from forge_parallel.config import MeshConfig
from forge_parallel.env import Env
from forge_parallel.error import ParallelError
from forge_parallel.grads import global_norm
from forge_parallel.mesh import build_mesh
from forge_parallel.tensor import local_shard
from forge_parallel.testing import run_ranks
from torch import nn

GRIDS = [(2, (2,)), (4, (4,)), (4, (2, 2))]
SLOW = pytest.param(8, (2, 2, 2), marks=pytest.mark.slow)


class Grid:
    """A device mesh of any shape, and the grid of all its ranks."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))
        self.mesh = build_mesh(MeshConfig(), Env.detect())


def require_box(tensor: torch.Tensor, full: torch.Tensor, grid: Grid) -> None:
    """See that this rank holds what it says, and that all first copies together are the full tensor."""
    values, offsets, is_first_copy = local_shard(tensor, grid.mesh)
    box = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
    assert torch.equal(values, full[box]), (tensor.placements, offsets)  # pyright: ignore[reportAttributeAccessIssue]
    covered = torch.zeros(full.shape)
    covered[box] += is_first_copy
    torch.distributed.all_reduce(covered)
    assert (covered == 1).all(), (tensor.placements, covered)  # pyright: ignore[reportAttributeAccessIssue]


def random_layouts(shape: tuple[int, ...], draws: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    grid, draw = Grid(shape), random.Random(0)
    generator = torch.Generator().manual_seed(0)
    parameters, squares = [], 0.0
    for _ in range(draws):
        sizes = [draw.randint(1, 9) for _ in range(draw.randint(1, 3))]
        placements = [draw.choice([Replicate(), *(Shard(d) for d in range(len(sizes)))]) for _ in shape]
        full = torch.randn(sizes, dtype=torch.float64, generator=generator)
        tensor = distribute_tensor(full, grid.device_mesh, placements)
        assert torch.equal(tensor.full_tensor(), full)
        require_box(tensor, full, grid)
        parameters.append(nn.Parameter(torch.zeros_like(tensor)))
        parameters[-1].grad = tensor
        squares += full.square().sum().item()
    assert global_norm(parameters, grid.mesh).item() == pytest.approx(squares**0.5, rel=1e-13)


@pytest.mark.dist
@pytest.mark.parametrize(("world_size", "shape"), [*GRIDS, SLOW])
def test_local_shard_and_norm_equal_the_gathered_tensor_when_layouts_are_random(world_size, shape):
    run_ranks(random_layouts, world_size, shape, 40 if world_size < 8 else 12, timeout_s=200)


class Mlp(nn.Module):
    """Sizes that FSDP2 cannot divide after tensor parallelism has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 14), nn.LayerNorm(6), nn.Linear(14, 6)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu())


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return Mlp().double()


def tensor_parallel(shape: tuple[int, ...]) -> None:
    """Tensor parallelism along the last axis, FSDP2 or HSDP along the others, against the module itself."""
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    grid, plain, model = Grid(shape), mlp(), mlp()
    *data_axes, tensor_axis = "abc"[: len(shape)]
    data, tensor = grid.device_mesh[tuple(data_axes)], grid.device_mesh[tensor_axis]
    parallelize_module(model, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=data)
    assert isinstance(model, FSDPModule)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    x = torch.randn(8, 6, dtype=torch.float64)
    rank = torch.distributed.get_rank() // shape[-1]
    model(x.chunk(8 // 2)[rank]).square().sum().backward()
    plain(torch.cat(x.chunk(8 // 2)[: grid.device_mesh.size() // shape[-1]])).square().sum().backward()
    for (name, wanted), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        require_box(found, wanted.detach(), grid)
        shard = local_shard(found.grad)
        box = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.values.shape, strict=True))
        torch.testing.assert_close(shard.values, wanted.grad[box], msg=name)  # pyright: ignore[reportOptionalSubscript]
    norm = global_norm(model.parameters(), grid.mesh).item()
    wanted = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]).item()
    assert norm == pytest.approx(wanted, rel=1e-12)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world_size", "shape"), [(4, (2, 2)), pytest.param(8, (2, 2, 2), marks=pytest.mark.slow)]
)
def test_local_shard_and_norm_under_fsdp_over_tensor_parallelism_equal_one_process(world_size, shape):
    run_ranks(tensor_parallel, world_size, shape, timeout_s=200)


def odd_placements() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    grid = Grid((2, 2))
    partial = DTensor.from_local(torch.ones(2), grid.device_mesh, [Replicate(), Partial()])
    with pytest.raises(ParallelError, match="partial sum"):
        local_shard(partial)
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = partial
    with pytest.raises(ParallelError, match="partial sum"):
        global_norm([parameter], grid.mesh)
    # rows 0 and 2, or 1 and 3: what a view of a matrix cut by columns holds
    strided = distribute_tensor(torch.arange(4.0).view(2, 2), grid.device_mesh, [Replicate(), Shard(1)]).view(
        4
    )
    with pytest.raises(ParallelError, match="no box"):
        local_shard(strided)


@pytest.mark.dist
def test_local_shard_refuses_partial_sums_and_rows_apart():
    run_ranks(odd_placements, 4)


def norm_where_one_rank_has_nothing() -> float:
    from torch.distributed.tensor import Shard, distribute_tensor

    grid = Grid((2,))
    gradient = distribute_tensor(torch.ones(8), grid.device_mesh, [Shard(0)])
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient if grid.mesh.stage.first else None
    return global_norm([parameter], grid.mesh).item()


@pytest.mark.dist
def test_global_norm_ends_when_one_rank_has_no_gradient():
    assert run_ranks(norm_where_one_rank_has_nothing, 2, timeout_s=20) == [2.0, 2.0]
