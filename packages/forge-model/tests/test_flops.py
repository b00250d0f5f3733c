import pytest
import torch
from forge_config import Config, load
from forge_model import DecoderConfig, initialize
from forge_model.config import GroupedQueryConfig, LatentConfig, MLPConfig, ModelConfig, SwiGLUConfig
from forge_model.hf.families import FAMILIES, preset
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

T = 32


@pytest.mark.parametrize("ffn", [SwiGLUConfig(dim=96), MLPConfig(dim=100)])
@pytest.mark.parametrize("heads", [(4, 4, None), (4, 1, 24)])
def test_flops_per_token_equal_those_torch_counts(ffn, heads):
    attention = GroupedQueryConfig(num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2])
    config = DecoderConfig(vocab_size=200, dim=64, num_layers=3, max_tokens=T, attention=attention, ffn=ffn)
    model = config.build()
    initialize(model, 0)
    tokens = torch.zeros(2, T, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).logsumexp(-1).sum().backward()
    counted = counter.get_total_flops() / tokens.numel()
    assert config.flops_per_token(T, causal=False) == pytest.approx(counted, rel=1e-6)


@pytest.mark.parametrize("q_rank", [None, 24])
def test_flops_of_latent_attention_equal_those_torch_counts(q_rank):
    attention = LatentConfig(num_heads=3, kv_rank=20, q_rank=q_rank, nope_dim=10, rope_dim=6, value_dim=14)
    config = DecoderConfig(vocab_size=200, dim=64, num_layers=2, max_tokens=T, attention=attention)
    model = config.build()
    initialize(model, 0)
    tokens = torch.zeros(2, T, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).logsumexp(-1).sum().backward()
    counted = counter.get_total_flops() / tokens.numel()
    assert config.flops_per_token(T, causal=False) == pytest.approx(counted, rel=1e-6)
    gap = attention.forward_flops(64, T, False) - attention.forward_flops(64, T, True)
    assert gap == pytest.approx(2 * 3 * (10 + 6 + 14) * (T - (T + 1) / 2))


def test_causal_flops_count_the_visible_pairs():
    attention = GroupedQueryConfig(num_heads=2, sliding_window=5)
    visible = sum(min(t + 1, 5) for t in range(T)) / T
    projections = attention.forward_flops(16, T, causal=False) - 4 * 16 * T
    assert attention.forward_flops(16, T, causal=True) == pytest.approx(projections + 4 * 16 * visible)


@pytest.mark.parametrize("name", [name for family in FAMILIES for name in family.presets])
def test_preset_has_about_the_parameters_of_its_name(name, tmp_path):
    class Whole(Config):
        model: ModelConfig

    path = tmp_path / "model.toml"
    path.write_text(f'[model]\npreset = "{name}"\n')
    with torch.device("meta"):
        parameters = sum(p.numel() for p in load(Whole, path).value.model.build().parameters())
    number, unit = name.split("-")[-1][:-1], name[-1]
    assert parameters == pytest.approx(float(number) * {"m": 1e6, "b": 1e9}[unit], rel=0.3)


def test_preset_names_the_nearest_ones():
    with pytest.raises(ValueError, match="llama-8b"):
        preset("llama-9b")
