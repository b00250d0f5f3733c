"""Connectors against transformers, loops and their own counts."""

import random

import pytest
import torch
import torch.nn.functional as F
from forge_model import initialize
from forge_model.model import Model
from forge_vlm.connectors.config import (
    AttentionalPoolConfig,
    AveragePoolConfig,
    LinearConfig,
    MLPConnectorConfig,
    PixelShuffleConfig,
    ResamplerConfig,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

ALL = {
    "linear": LinearConfig(bias=False),
    "mlp": MLPConnectorConfig(hidden=10, activation="silu"),
    "avgpool": AveragePoolConfig(window=3, hidden=10),
    "pixel-shuffle": PixelShuffleConfig(window=2),
    "attentional-pool": AttentionalPoolConfig(window=2, num_heads=3),
    "resampler": ResamplerConfig(latents=5, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, hidden=7),
}
WIDTH, DIM = 6, 8


class Holder(Model):
    def __init__(self, config, width=WIDTH, dim=DIM, extra=0):
        super().__init__()
        self.connector = config.build(width, dim, extra)


def built(config, **options):
    holder = Holder(config, **options)
    initialize(holder, 0)
    for name, parameter in holder.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return holder.connector.double()


def grids_of(*images):
    return torch.tensor([[1, rows, columns] for rows, columns in images])


def features_of(images, width=WIDTH, extra=0):
    torch.manual_seed(2)
    return [torch.randn(rows * columns + extra, width, dtype=torch.float64) for rows, columns in images]


@pytest.mark.parametrize("name", ALL)
def test_connector_makes_as_many_tokens_as_it_declares(name):
    config, draw = ALL[name], random.Random(0)
    connector = built(config)
    for _ in range(250):  # 1,000 images of random sizes
        images = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(4)]
        with torch.no_grad():
            made = connector(torch.cat(features_of(images)), grids_of(*images))
        assert made.shape == (sum(config.tokens(*image) for image in images), DIM)


@pytest.mark.parametrize("name", ALL)
def test_image_does_not_see_others_of_other_sizes(name):
    connector, images = built(ALL[name]), [(2, 5), (1, 1), (4, 3)]
    features = features_of(images)
    together = connector(torch.cat(features), grids_of(*images))
    alone = [connector(one, grids_of(image)) for one, image in zip(features, images, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["linear", "mlp", "resampler"])
def test_class_token_is_a_feature_like_others(name):
    config, images = ALL[name], [(2, 3), (4, 1)]
    connector = built(config, extra=1)
    with torch.no_grad():
        made = connector(torch.cat(features_of(images, extra=1)), grids_of(*images))
    assert made.shape == (sum(config.tokens(*image, 1) for image in images), DIM)


def test_windows_and_a_class_token_are_an_error():
    with pytest.raises(ValueError, match=r"the tower keeps 1 features that are no patch; use encoder"):
        AveragePoolConfig().tokens(4, 4, 1)
    with pytest.raises(ValueError, match="num_heads = 8 does not divide the width of the features, 6"):
        AttentionalPoolConfig().build(6, 8)
    with pytest.raises(ValueError, match="num_kv_heads = 3 does not divide num_heads = 16"):
        ResamplerConfig(num_kv_heads=3)


def test_average_pool_is_the_mean_of_what_is_in_the_image():
    config = AveragePoolConfig(window=2, bias=False)
    connector, (features,) = built(config), features_of([(3, 5)])
    image = features.unflatten(0, (3, 5))
    means = [image[r : r + 2, c : c + 2].flatten(0, 1).mean(0) for r in (0, 2) for c in (0, 2, 4)]
    expected = connector.projection(torch.stack(means))
    torch.testing.assert_close(connector(features, grids_of((3, 5))), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("side", "scale", "width"), [(4, 2, 6), (6, 3, 5), (8, 4, 3)])
def test_pixel_shuffle_is_that_of_idefics3(side, scale, width):
    pytest.importorskip("transformers")
    from transformers import Idefics3Config
    from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector

    text = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    vision = {"hidden_size": width, "num_attention_heads": 1}
    theirs = Idefics3Connector(Idefics3Config(text_config=text, vision_config=vision, scale_factor=scale))
    ours = built(PixelShuffleConfig(window=scale), width=width, dim=16)
    theirs.double().modality_projection.proj.weight.data = ours.projection.project.weight
    features = torch.stack(features_of([(side, side)] * 2, width))
    expected = theirs(features).flatten(0, 1)
    found = ours(features.flatten(0, 1), grids_of((side, side), (side, side)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


NAMES = {
    "down": "modality_projection.down_proj",
    "gate": "modality_projection.gate_proj",
    "up": "modality_projection.up_proj",
    "latents": "perceiver_resampler.latents",
    "layers": "perceiver_resampler.layers",
    "norm.weight": "perceiver_resampler.norm.weight",
    "latents_norm": "input_latents_norm",
    "features_norm": "input_context_norm",
    "ffn_norm": "post_attention_layernorm",
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "ffn.w_": "mlp.",
}


def resampler_key(name):
    if name.startswith("layers."):
        _, index, inner = name.split(".", 2)
        if inner.startswith("ffn.w_"):
            inner = inner.replace("ffn.w_", "mlp.").replace(".weight", "_proj.weight")
        else:
            inner = f"{NAMES[inner.removesuffix('.weight')]}.weight"
        return f"perceiver_resampler.layers.{index}.{inner}"
    return NAMES.get(name) or f"{NAMES[name.removesuffix('.weight')]}.weight"


@pytest.mark.parametrize(
    ("latents", "depth", "heads", "kv", "width", "dim"),
    [(3, 1, 2, 1, 7, 10), (5, 3, 6, 3, 6, 14), (4, 2, 3, 3, 9, 6)],
)
def test_resampler_is_that_of_idefics2(latents, depth, heads, kv, width, dim):
    pytest.importorskip("transformers")
    from transformers import Idefics2Config
    from transformers.models.idefics2.modeling_idefics2 import Idefics2Connector

    perceiver = {"resampler_n_latents": latents, "resampler_depth": depth, "resampler_n_heads": heads}
    perceiver |= {"resampler_head_dim": 4, "num_key_value_heads": kv, "hidden_size": dim}
    text = {"model_type": "mistral", "hidden_size": dim, "intermediate_size": 11}
    theirs = Idefics2Connector(
        Idefics2Config(text_config=text, vision_config={"hidden_size": width}, perceiver_config=perceiver)
    ).double()
    config = ResamplerConfig(
        latents=latents, num_layers=depth, num_heads=heads, num_kv_heads=kv, head_dim=4, hidden=11
    )
    ours = built(config, width=width, dim=dim)
    theirs.load_state_dict({resampler_key(name): tensor for name, tensor in ours.state_dict().items()})
    images = [(2, 3), (1, 4), (3, 3)]
    features = features_of(images, width)
    padded = torch.nn.utils.rnn.pad_sequence(features, batch_first=True)
    mask = torch.tensor([[True] * len(one) + [False] * (9 - len(one)) for one in features])
    expected = theirs(padded, mask).flatten(0, 1)
    found = ours(torch.cat(features), grids_of(*images))
    # its norms are computed in float32
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_attentional_pool_is_attention_over_each_window():
    connector, (features,) = built(ALL["attentional-pool"]), features_of([(3, 2)])
    image = features.unflatten(0, (3, 2))
    tokens = []
    for patch in (image[:2].flatten(0, 1), image[2:].flatten(0, 1)):
        heads = [
            part.unflatten(-1, (3, 2)).transpose(0, 1)
            for part in (connector.wq(patch.mean(0, keepdim=True)), connector.wk(patch), connector.wv(patch))
        ]
        tokens.append(connector.wo(F.scaled_dot_product_attention(*heads).transpose(0, 1).flatten()))
    expected = connector.projection(torch.stack(tokens))
    torch.testing.assert_close(connector(features, grids_of((3, 2))), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_flops_are_those_counted(name):
    config, connector = ALL[name], built(ALL[name])
    images = [(6, 6), (6, 6)]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        connector(torch.cat(features_of(images)), grids_of(*images))
    expected = sum(config.forward_flops(*image, WIDTH, DIM) for image in images)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)
