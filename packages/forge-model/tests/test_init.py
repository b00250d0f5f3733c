import pytest
import torch
from forge_model import DecoderConfig, ModelError, initialize
from forge_model.config import GroupedQueryConfig
from forge_model.init import BLOCK_ELEMENTS, FullShard, full_shard


def build(**options):
    config = DecoderConfig(
        vocab_size=3000,
        dim=128,
        num_layers=2,
        attention=GroupedQueryConfig(num_heads=4, qk_norm=True),
        **options,
    )
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(float("nan"))
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_initialize_writes_everything_that_was_poisoned(tied):
    model = build(tie_embeddings=tied)
    initialize(model, 0)
    assert all(t.isfinite().all() for t in [*model.parameters(), *model.buffers()])
    assert model.norm.weight.eq(1).all()
    assert model.layers["0"].attention.q_norm.weight.eq(1).all()
    assert model.embed.weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert model.layers["1"].ffn.w_down.weight.std().item() == pytest.approx(0.01, rel=0.02)


def test_initialize_is_a_function_of_seed_and_name():
    first, second, other = build(), build(), build()
    initialize(first, 7)
    torch.randn(5)
    initialize(second, 7)
    initialize(other, 8)
    for (name, a), (_, b), (_, c) in zip(
        *(m.named_parameters() for m in (first, second, other)), strict=True
    ):
        assert torch.equal(a, b), name
        assert a.ndim == 1 or not torch.equal(a, c), name
    layers = first.layers
    assert not torch.equal(layers["0"].ffn.w_up.weight, layers["1"].ffn.w_up.weight)
    assert not torch.equal(layers["0"].ffn.w_up.weight, layers["0"].ffn.w_gate.weight)


@pytest.mark.parametrize("rows", [(0, 1000), (1000, 2999), (2047, 2049), (3000, 3000)])
@pytest.mark.parametrize("columns", [(0, 128), (32, 96)])
def test_initialize_of_a_shard_is_the_shard_of_the_whole(rows, columns):
    whole, sharded = build(), build()
    initialize(whole, 3)
    assert whole.embed.weight.numel() > BLOCK_ELEMENTS
    part = torch.full((rows[1] - rows[0], columns[1] - columns[0]), float("nan"))

    def shard(parameter):
        if parameter is sharded.embed.weight:
            return FullShard(part, (rows[0], columns[0]))
        return full_shard(parameter)

    initialize(sharded, 3, shard)
    assert torch.equal(part, whole.embed.weight[slice(*rows), slice(*columns)])


def test_initialize_refuses_a_parameter_without_a_rule():
    model = build()
    model.extra = torch.nn.Parameter(torch.zeros(2))
    model.initial_values = lambda: {}
    with pytest.raises(ModelError, match="no initial value"):
        initialize(model, 0)


def test_initialize_finds_a_buffer_that_nobody_wrote():
    model = build()
    model.register_buffer("forgotten", torch.full((2,), float("nan")))
    with pytest.raises(ModelError, match="forgotten"):
        initialize(model, 0)
