"""Layers that differ by index, and models of which only a part is held."""

import pytest
import torch
from forge_config import Config, ConfigError, load, to_toml
from forge_model import DecoderConfig, LossConfig, ModelError, Sampling, generate, initialize
from forge_model.config import (
    GroupedQueryConfig,
    LayerOverride,
    MLPConfig,
    ModelConfig,
    RopeConfig,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

VOCAB = 61
GLOBAL = GroupedQueryConfig(num_heads=2, head_dim=20)
LOCAL = GroupedQueryConfig(num_heads=4, num_kv_heads=2, sliding_window=3)
MIXED = DecoderConfig(
    vocab_size=VOCAB,
    dim=32,
    num_layers=4,
    max_tokens=64,
    init_std=0.2,
    attention=LOCAL,
    overrides=[
        LayerOverride(layers="1::2", attention=GLOBAL, rope=RopeConfig(theta=100.0)),
        LayerOverride(layers="-1", ffn=MLPConfig(dim=48)),
    ],
)


class Whole(Config):
    model: ModelConfig


def build(config: DecoderConfig):
    model = config.build().double()
    initialize(model, 0)
    return model


def uniform(index: int) -> DecoderConfig:
    """A model all of whose layers are as layer `index` of the mixed one."""
    parts = {name: getattr(MIXED.layer(index), name) for name in ("attention", "ffn", "norm", "rope")}
    return DecoderConfig(vocab_size=VOCAB, dim=32, num_layers=4, max_tokens=64, **parts)


def test_layers_are_those_of_models_that_have_only_such_layers():
    model = build(MIXED)
    tokens = torch.randint(VOCAB, (2, 20))
    doc_ids = torch.arange(20).div(9, rounding_mode="floor").expand(2, -1)
    expected = model.embed(tokens)
    for index in range(4):
        other = build(uniform(index))
        for name in ("embed", "norm", "head"):
            setattr(other, name, None)
        for name in set("0123") - {str(index)}:
            del other.layers[name]
        other.layers[str(index)].load_state_dict(model.layers[str(index)].state_dict())
        expected = other(tokens, doc_ids=doc_ids, hidden=expected)
    torch.testing.assert_close(model(tokens, doc_ids=doc_ids), model.read_out(expected), rtol=0, atol=0)


def test_mixed_layers_generate_what_full_forward_passes_choose():
    model = build(MIXED)
    tokens = [1, 2, 3, 4, 5]
    for _ in range(10):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert generate(model, [tokens[:5]], 10, Sampling(temperature=0)) == [tokens[5:]]


def test_flops_of_mixed_layers_equal_those_torch_counts():
    model = build(MIXED)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).logsumexp(-1).sum().backward()
    counted = counter.get_total_flops() / tokens.numel()
    assert MIXED.flops_per_token(32, causal=False) == pytest.approx(counted, rel=1e-6)


def test_costs_of_stages_add_up_to_the_flops_of_a_token():
    with torch.device("meta"):
        stages = MIXED.build().parallel_plan()["stages"]
    assert len(stages["costs"]) == MIXED.num_layers
    total = 3 * (sum(stages["costs"]) + stages["last_cost"])
    assert total == pytest.approx(MIXED.flops_per_token(MIXED.max_tokens))


def test_rotations_and_masks_are_made_once_for_all_layers_alike():
    model = build(MIXED)
    windows = []

    class Counting:
        def __init__(self, inner):
            self.inner = inner

        def resolve(self, mask, window):
            windows.append(window)
            return self.inner.resolve(mask, window)

        def __call__(self, *args):
            return self.inner(*args)

    tokens = torch.randint(VOCAB, (1, 9))
    before = model(tokens)
    counting = Counting(model.layers["0"].attention.attend)
    for block in model.layers.values():
        block.attention.attend = counting
    assert torch.equal(model(tokens), before)
    assert windows == [3, None]


@pytest.mark.parametrize("cut", [0, 1, 3, 4])
@pytest.mark.parametrize("documents", [False, True])
def test_stages_one_after_the_other_equal_the_model(cut, documents):
    model, first, last = (build(MIXED) for _ in range(3))
    first.norm = first.head = last.embed = None
    for index in range(4):
        del (first if index >= cut else last).layers[str(index)]
    names = [set(dict(stage.named_parameters())) for stage in (first, last)]
    assert names[0] | names[1] == set(dict(model.named_parameters())) and not names[0] & names[1]
    assert "embed" not in last.parallel_plan()["tensor"]
    tokens, labels = torch.randint(VOCAB, (2, 2, 12))
    batch = {"doc_ids": torch.arange(12).div(5, rounding_mode="floor").expand(2, -1)} if documents else {}
    loss_fn = LossConfig(chunk_tokens=5).build()
    split = last(tokens, hidden=first(tokens, **batch), labels=labels, loss_fn=loss_fn, **batch)
    assert torch.equal(split.total, model(tokens, labels=labels, loss_fn=loss_fn, **batch).total)
    initialize(first, 0)
    assert first.embed.weight.equal(model.embed.weight.float())


def test_a_stage_without_embedding_asks_for_the_hidden_state():
    model = build(MIXED)
    model.embed = None
    with pytest.raises(ModelError, match="hidden"):
        model(torch.zeros(1, 4, dtype=torch.int64))


def test_overrides_are_read_from_toml_and_written_back(tmp_path):
    path = tmp_path / "model.toml"
    path.write_text("""
        [model]
        vocab_size = 61
        dim = 32
        num_layers = 4
        attention = { num_heads = 4, sliding_window = 8 }
        [[model.overrides]]
        layers = "1::2"
        attention = { num_heads = 2 }
        rope = { type = "linear", theta = 1e6, factor = 2 }
        [[model.overrides]]
        layers = "-1"
        ffn = { type = "mlp", dim = 16 }
    """)
    config = load(Whole, path).value.model
    assert [config.layer(i).attention.window for i in range(4)] == [8, None, 8, None]
    assert [type(config.layer(i).ffn).__name__ for i in (2, 3)] == ["SwiGLUConfig", "MLPConfig"]
    assert config.layer(3).rope.factor == 2
    path.write_text(to_toml(load(Whole, path).value))
    assert load(Whole, path).value.model == config


@pytest.mark.parametrize(
    ("layers", "needle"), [("4", "names no layer"), ("7:9", "names no layer"), ("a", "layers"), ("::", None)]
)
def test_overrides_of_layers_that_do_not_exist_are_errors(tmp_path, layers, needle):
    path = tmp_path / "model.toml"
    path.write_text(
        "[model]\nvocab_size = 9\ndim = 32\nnum_layers = 4\n"
        f'[[model.overrides]]\nlayers = "{layers}"\nrope = {{ theta = 5.0 }}'
    )
    if needle is None:
        assert load(Whole, path).value.model.layer(0).rope.theta == 5
        return
    with pytest.raises(ConfigError, match=needle):
        load(Whole, path)


def test_heads_of_every_layer_must_fit_the_width():
    with pytest.raises(ValueError, match=r"num_heads = 5 \(layer 2\)"):
        DecoderConfig(
            vocab_size=9,
            dim=32,
            num_layers=3,
            overrides=[LayerOverride(layers="2", attention=GroupedQueryConfig(num_heads=5))],
        )


def test_given_positions_cost_no_copy_of_frequencies_to_the_device_each_forward(monkeypatch):
    made = []
    frequencies = RopeConfig.frequencies
    monkeypatch.setattr(
        RopeConfig, "frequencies", lambda rope, dim: made.append(rope) or frequencies(rope, dim)
    )
    model, tokens = build(uniform(0)), torch.randint(VOCAB, (2, 6))
    with torch.inference_mode():
        model(tokens, positions=torch.arange(6))
    for positions in (torch.arange(6) + 1, torch.randint(20, (2, 6))):
        model(tokens, positions=positions).sum().backward()
    assert len(made) == 1
