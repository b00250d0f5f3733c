import pytest
import torch
from forge_parallel.config import MeshConfig
from forge_parallel.env import Env
from forge_parallel.grads import clip_, global_norm
from forge_parallel.mesh import Mesh, build_mesh
from forge_parallel.testing import run_ranks

LONE = Mesh(torch.device("cpu"))


def parameter(gradient: torch.Tensor | None) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.zeros(3) if gradient is None else torch.zeros_like(gradient))
    p.grad = gradient
    return p


def test_global_norm_equals_torch_and_counts_no_gradient_as_zero():
    parameters = [parameter(torch.randn(4, 3)), parameter(None), parameter(torch.randn(5))]
    wanted = torch.nn.utils.clip_grad_norm_(parameters, 1e9)
    assert global_norm(parameters, LONE).item() == pytest.approx(wanted.item(), rel=1e-6)
    assert global_norm([parameter(None)], LONE) == 0


def test_global_norm_of_float64_is_float64():
    assert global_norm([parameter(torch.ones(3, dtype=torch.float64))], LONE).dtype == torch.float64


def test_global_norm_of_bfloat16_is_taken_in_float32():
    gradient = torch.full((4096,), 1 + 2**-7, dtype=torch.bfloat16)
    assert global_norm([parameter(gradient)], LONE).item() == pytest.approx(64 * (1 + 2**-7), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clip_scales_down_and_never_up(dtype):
    big, small = parameter(torch.tensor([3.0, 4.0], dtype=dtype)), parameter(torch.tensor([0.3, 0.4]))
    clip_([big], 1.0, global_norm([big], LONE))
    clip_([small], 1.0, global_norm([small], LONE))
    assert big.grad.tolist() == pytest.approx([0.6, 0.8], rel=5e-3)  # pyright: ignore[reportOptionalMemberAccess]
    assert small.grad.tolist() == pytest.approx([0.3, 0.4])  # pyright: ignore[reportOptionalMemberAccess]


def mixed_layouts() -> tuple[float, float]:
    """Gradients cut over one axis, the other, both, and none, in one norm."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    generator = torch.Generator().manual_seed(0)
    layouts = [
        (mesh, [Replicate(), Shard(0)]),
        (mesh, [Shard(1), Replicate()]),
        (mesh, [Shard(0), Shard(1)]),
        (mesh["a"], [Shard(0)]),
        (mesh, [Replicate(), Replicate()]),
        None,
    ]
    parameters, whole = [], []
    for layout in layouts:
        gradient = torch.randn(5, 3, generator=generator)
        whole.append(gradient.clone())
        cut = gradient if layout is None else distribute_tensor(gradient, layout[0], layout[1])
        p = torch.nn.Parameter(torch.zeros_like(cut))
        p.grad = cut
        parameters.append(p)
    grid = build_mesh(MeshConfig(), Env.detect())
    norm = global_norm(parameters, grid)
    clip_(parameters, 0.5, norm)
    wanted = torch.cat([g.flatten() for g in whole]).norm()
    assert norm.item() == pytest.approx(wanted.item(), rel=1e-6)
    return norm.item(), global_norm(parameters, grid).item()


@pytest.mark.dist
def test_global_norm_and_clip_combine_any_mix_of_layouts():
    ranks = run_ranks(mixed_layouts, 4)
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0][1] == pytest.approx(0.5, rel=1e-4)
