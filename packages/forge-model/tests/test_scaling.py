"""Learning rates that transfer: against explicit multipliers, and against the base itself."""

import pytest
import torch
from forge_model import DecoderConfig
from forge_model.attention.config import GroupedQueryConfig
from forge_model.decoder.block_config import ResidualBlockConfig
from forge_model.ffn.config import SwiGLUConfig
from forge_model.hf.config import config_to_hf
from forge_model.hf.tensors import to_hf
from forge_model.init import initialize
from forge_model.loss.config import LossConfig
from forge_model.moe.config import MoEConfig
from forge_model.scaling import Scaling, ScalingConfig


def config(dim=32, **options):
    parts = {
        "vocab_size": 61, "num_layers": 2, "max_tokens": 16, "dim": dim, "ffn": SwiGLUConfig(dim=2 * dim),
        "attention": GroupedQueryConfig(num_heads=dim // 8),
    }  # fmt: skip
    return DecoderConfig(**parts | options)


def made(of, seed=1):
    model = of.build()
    initialize(model, seed)
    return model.double()


def adamw(model, factors, lr=1e-2, decay=0.1):
    groups = [
        {"params": [p], "lr": lr * (f := factors.get(n, (1, 1, 1)))[1], "weight_decay": decay * f[2]}
        for n, p in model.named_parameters()
    ]
    return torch.optim.AdamW(groups, lr=lr, eps=1e-30)


def trained(model, factors, steps=4):
    torch.manual_seed(0)
    tokens = torch.randint(61, (4, 17))
    optimizer, loss = adamw(model, factors), LossConfig().build()
    for _ in range(steps):
        optimizer.zero_grad()
        model(tokens[:, :-1], labels=tokens[:, 1:], loss_fn=loss).total.backward()
        optimizer.step()
    return model(tokens[:, :-1]).detach()


def test_factors_are_those_of_the_published_tables():
    wide = Scaling(width=4.0)
    found = {
        role: wide.factors(role, False)[:2]
        for role in ("embedding", "matrix", "head", "router", "norm", "bias")
    }
    assert found == {
        "embedding": (1, 1), "matrix": (0.5, 0.25), "head": (0.25, 0.25), "router": (0.25, 0.25),
        "norm": (1, 1), "bias": (1, 1),
    }  # fmt: skip
    for role in found:
        for writes in (True, False):
            each = Scaling(4.0, 3.0).factors(role, writes)
            assert each.lr * each.decay == pytest.approx(1)


def test_the_base_is_trained_as_without_scaling():
    plain, base = (
        made(config()),
        made(config(scaling=ScalingConfig(base_dim=32, base_head_dim=8, base_layers=2))),
    )
    assert base.learning_factors() == {}
    for name, value in plain.state_dict().items():
        assert torch.equal(value, base.state_dict()[name]), name
    assert torch.equal(trained(plain, {}), trained(base, {}))


def test_initial_values_shrink_as_the_tables_say():
    base, wide = made(config(64)), made(config(64, scaling=ScalingConfig(base_dim=16)))
    for name, value in base.named_parameters():
        factor = 0.25 if name == "head.weight" else 0.5 if "layers" in name and value.ndim > 1 else 1.0
        assert torch.allclose(wide.get_parameter(name), value * factor), name


def test_the_head_equals_one_with_a_multiplier_of_the_logits():
    ours = made(config(64, scaling=ScalingConfig(base_dim=16)))
    table_8 = made(config(64, logit_divisor=4.0))
    table_8.load_state_dict(ours.state_dict())
    with torch.no_grad():
        table_8.head.weight *= 4
    factors = {n: (1, 0.25, 4) for n, p in ours.named_parameters() if "layers" in n and p.ndim > 1}
    expected = trained(table_8, factors)
    assert (trained(ours, ours.learning_factors()) - expected).abs().max() < 1e-8
    assert (trained(made(config(64)), {}) - expected).abs().max() > 1e-2


def test_the_depth_rule_equals_multipliers_of_residual_branches():
    bias = {"attention": GroupedQueryConfig(num_heads=4, output_bias=True)}
    ours = made(config(num_layers=6, scaling=ScalingConfig(base_dim=32, base_layers=2), **bias))
    explicit = made(config(num_layers=6, block=ResidualBlockConfig(scale=1 / 3), **bias))
    explicit.load_state_dict(ours.state_dict())
    writers = [n for n, f in ours.learning_factors().items() if f.lr != 1]
    assert len(writers) == 6 * 3, "the outputs of attention and feed-forward, and a bias"
    with torch.no_grad():
        for name in writers:
            explicit.get_parameter(name).mul_(3)
    assert (trained(ours, ours.learning_factors()) - trained(explicit, {})).abs().max() < 1e-8
    shallow = made(config(num_layers=2)).initial_values()["layers.0.ffn.w_down.weight"].value
    assert ours.initial_values()["layers.0.ffn.w_down.weight"].value == pytest.approx(shallow / 3)


def test_a_tied_head_divides_its_logits_and_learns_as_an_embedding():
    tied = made(config(64, tie_embeddings=True, scaling=ScalingConfig(base_dim=16)))
    plain = made(config(64, tie_embeddings=True))
    plain.load_state_dict(tied.state_dict())
    tokens = torch.randint(61, (2, 8))
    assert torch.allclose(tied(tokens), plain(tokens) / 4)
    assert "embed.weight" not in tied.learning_factors()


def test_scores_of_wider_heads_are_scaled_by_their_width():
    wide = config(
        64, attention=GroupedQueryConfig(num_heads=2), scaling=ScalingConfig(base_dim=16, base_head_dim=8)
    )
    assert wide.layer(0).attention.scale == pytest.approx(8**0.5 / 32)


def test_routers_and_experts_are_scaled():
    ffn = MoEConfig(num_experts=4, top_k=2, dim=32)
    moe = config(64, ffn=ffn, scaling=ScalingConfig(base_dim=16))
    by_role = {made(moe).parameter_roles()[n]: f for n, f in made(moe).learning_factors().items()}
    assert by_role["router"][:2] == (0.25, 0.25) and by_role["expert"][:2] == (0.5, 0.25)


def test_a_scaled_model_is_exported_where_its_multipliers_are_in_its_weights():
    scaled = config(64, scaling=ScalingConfig(base_dim=16))
    assert config_to_hf(scaled)["model_type"] == "llama"
    model = made(scaled)
    assert torch.equal(to_hf(dict(model.state_dict()), scaled)["lm_head.weight"], model.head.weight)
    tied = config(64, tie_embeddings=True, scaling=ScalingConfig(base_dim=16))
    written = config_to_hf(tied)
    assert (written["model_type"], written["logits_scaling"]) == ("granite", 4.0), "the family that has one"


def test_depth_of_reordered_norms_is_refused():
    with pytest.raises(ValueError, match="norms undo the size of residual branches"):
        config(norm_order="sandwich", scaling=ScalingConfig(base_dim=16, base_layers=1))
