import pytest
import torch
from forge_parallel.apply import load_full, materialize, parallelize
from forge_parallel.config import ParallelConfig, PrecisionConfig
from forge_parallel.error import ParallelError
from forge_parallel.mesh import Mesh
from forge_parallel.plan import Plan
from forge_parallel.tensor import local_shard
from forge_parallel.units import find_units
from torch import nn

CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def test_find_units_resolves_groups_in_the_order_of_the_model():
    model = Tied()
    units = find_units(model, Plan.of({"blocks": "layers.*", "units": [["head", "embed"]]}), Mesh(CPU))
    assert units.block_modules == list(model.layers)
    assert [unit.modules for unit in units.groups] == [[model.head, model.embed]]


def test_find_units_refuses_a_parameter_shared_by_two_units():
    plan = Plan.of({"blocks": "layers.*", "units": [["embed"], ["head"]]})
    with pytest.raises(ParallelError, match=r"embed\.weight .*head\.weight .* one parameter"):
        find_units(Tied(), plan, Mesh(CPU))


def test_find_units_refuses_a_parameter_shared_with_the_root():
    with pytest.raises(ParallelError, match="the root"):
        find_units(Tied(), Plan.of({"blocks": "layers.*", "units": [["head"]]}), Mesh(CPU))


def test_find_units_refuses_a_module_in_two_units():
    plan = Plan.of({"blocks": "layers.*", "units": [["layers.1"]]})
    with pytest.raises(ParallelError, match=r"block layers\.1 and in unit"):
        find_units(Tied(), plan, Mesh(CPU))


def test_materialize_keeps_tied_parameters_tied():
    with torch.device("meta"):
        model = Tied()
    materialize(parallelize(model, Mesh(CPU), Plan.of({"blocks": "layers.*"})), CPU)
    assert model.head.weight is model.embed.weight


def test_load_full_takes_one_or_both_names_of_a_tied_parameter():
    full = {**Tied().state_dict(), "table": torch.ones(3)}
    both, one = Tied(), Tied()
    load_full(both, full)
    load_full(one, {name: tensor for name, tensor in full.items() if name != "embed.weight"})
    assert torch.equal(both.embed.weight, full["head.weight"])
    assert torch.equal(one.embed.weight, full["head.weight"])


def test_parallelize_refuses_bf16_compute_without_a_group():
    config = ParallelConfig(precision=PrecisionConfig(compute="bfloat16"))
    with pytest.raises(ParallelError, match="process group"):
        parallelize(Tied(), Mesh(CPU), Plan.of({"blocks": "layers.*"}), config)


def test_parallelize_in_pure_bf16_leaves_buffers_alone():
    model = parallelize(
        Tied(),
        Mesh(CPU),
        Plan.of({"blocks": "layers.*"}),
        ParallelConfig(precision=PrecisionConfig(pure_bf16=True)),
    )
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.get_buffer("table").dtype == torch.float32


def test_local_shard_of_a_plain_tensor_is_the_tensor():
    weight = torch.randn(3, 2)
    shard = local_shard(weight)
    assert shard.values.data_ptr() == weight.data_ptr() and shard.offsets == (0, 0) and shard.is_first_copy
