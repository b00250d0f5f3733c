import pytest
import torch
from forge_parallel.apply import materialize, parallelize
from forge_parallel.config import MeshConfig
from forge_parallel.env import Env
from forge_parallel.mesh import build_mesh
from forge_parallel.plan import Plan
from forge_parallel.tensor import local_shard
from forge_parallel.testing import run_ranks
from torch import nn


class Odd(nn.Module):
    """Row counts that no number of ranks divides; the bias of `tiny` is shorter than a mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 7), nn.Linear(2, 1)])


def chunks(sizes: dict) -> dict[str, tuple]:
    with torch.device("meta"):
        model = Odd()
    mesh = build_mesh(MeshConfig(**sizes), Env.detect())
    materialize(parallelize(model, mesh, Plan.of({"blocks": "blocks.*"})), torch.device("cpu"))
    found = {}
    for name, parameter in model.named_parameters():
        local, offsets, _ = local_shard(parameter)
        local.fill_(1.0)  # must write through to the parameter
        assert (parameter.to_local() == 1).all()  # pyright: ignore[reportAttributeAccessIssue]
        found[name] = (tuple(parameter.shape), tuple(local.shape), offsets)
    return found


def rows(of_ranks: list[dict], name: str) -> list[list[int]]:
    """The rows that each rank holds."""
    return [list(range(r[name][2][0], r[name][2][0] + r[name][1][0])) for r in of_ranks]


@pytest.mark.dist
def test_local_shard_covers_uneven_and_empty_shards_once():
    ranks = run_ranks(chunks, 4, {})
    assert rows(ranks, "blocks.0.weight") == [[0, 1], [2, 3], [4, 5], [6]]
    assert rows(ranks, "blocks.0.bias") == [[0, 1], [2, 3], [4, 5], [6]]
    assert rows(ranks, "blocks.1.bias") == [[0], [], [], []]


@pytest.mark.dist
def test_local_shard_is_the_same_in_all_replicas_of_hsdp():
    ranks = run_ranks(chunks, 4, {"dp_replicate": 2})
    assert rows(ranks, "blocks.0.weight") == [[0, 1, 2, 3], [4, 5, 6]] * 2
