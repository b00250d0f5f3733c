"""Attention of DTensors, and its statistics over gloo ranks, against one process.

N heads, T tokens, H head dim.
"""

import pytest
import torch
import torch.nn.functional as F
from forge_interp import AttentionCall, InterpError
from forge_parallel.testing import run_ranks
from torch import Tensor

pytestmark = pytest.mark.dist

T, HEADS, HEAD_DIM = 6, 4, 4
READ = ("q", "k", "z", "raw", "scores", "pattern", "entropy", "sink", "previous")
STATISTICS = ("entropy", "sink", "previous", "lag.2")


def one_call(flat: bool = False, mask_shape: tuple[int, ...] = (T, T), seed: int = 0) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(HEADS, T, HEAD_DIM, generator=generator, dtype=torch.float64) for _ in range(3))
    if not flat:
        q, k, v = (torch.stack([x, -x.flip(0)]) for x in (q, k, v))
    mask = torch.rand(mask_shape, generator=generator) > 0.3
    mask[..., 0] = True
    return AttentionCall.of((q, k, v, mask), {}, F.scaled_dot_product_attention(q, k, v, mask))


def of_dtensors(dim: int, flat: bool, mask_shape: tuple[int, ...]) -> dict[str, Tensor] | str:
    """All that can be read of one call whose tensors are split at a dim."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, given = init_device_mesh("cpu", (2,)), one_call(flat, mask_shape)
    spread = [
        distribute_tensor(x, mesh, [Shard(dim)]) for x in (given.query, given.key, given.value, given.output)
    ]
    mask = distribute_tensor(given.mask, mesh, [Replicate()])
    call = AttentionCall.of((*spread[:3], mask), {}, spread[3])
    try:
        call.check()
    except InterpError as error:
        return str(error)
    return {name: call.read(name, 1 << 20).full_tensor() for name in READ}


@pytest.mark.parametrize(
    ("dim", "flat", "mask_shape"),
    [
        (0, False, (2, 1, T, T)),
        (0, False, (2, HEADS, T, T)),
        (1, False, (1, HEADS, 1, T)),
        (1, False, (T, T)),
        (1, False, (HEADS, T, T)),
        (0, True, (HEADS, T, T)),
        (0, True, (1, T, T)),
    ],
    ids=str,
)
def test_attention_of_dtensors_is_read_as_a_whole(dim, flat, mask_shape):
    call = one_call(flat, mask_shape)
    for found in run_ranks(of_dtensors, 2, dim, flat, mask_shape):
        for name in READ:
            torch.testing.assert_close(
                found[name], call.read(name, 1 << 20), rtol=0, atol=1e-12, equal_nan=True
            )


def of_unlike_placements() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, given = init_device_mesh("cpu", (2,)), one_call()
    query, value, output = (
        distribute_tensor(x, mesh, [Shard(1)]) for x in (given.query, given.value, given.output)
    )
    call = AttentionCall.of((query, distribute_tensor(given.key, mesh, [Replicate()]), value), {}, output)
    with pytest.raises(InterpError) as caught:
        call.read("entropy", 0)
    return str(caught.value)


def test_attention_of_dtensors_placed_otherwise_is_an_error():
    for said in run_ranks(of_unlike_placements, 2):
        assert "key (Replicate(),)" in said and "expected all placed alike" in said


@pytest.mark.parametrize("dim", [2, 3])
def test_attention_whose_heads_are_spread_is_an_error(dim):
    for said in run_ranks(of_dtensors, 2, dim, False, (T, T)):
        assert "expected all placed alike, split by sequences and heads at most" in said
