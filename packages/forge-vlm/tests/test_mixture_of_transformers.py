"""A mixture of transformers against the dense decoder, a loop over tokens, and itself stored otherwise."""

import re

import pytest
import torch
from forge_model import DecoderConfig, initialize
from forge_model.attention.rope import rotate
from forge_model.config import (
    GroupedQueryConfig,
    LatentConfig,
    LayerNormConfig,
    LayerOverride,
    MLPConfig,
    MoEConfig,
    RMSNormConfig,
)
from forge_model.decoder.mtp_config import MTPConfig
from forge_vlm import VisionLanguageConfig
from forge_vlm.fusion.mixture_of_transformers_config import MixtureOfTransformersConfig
from forge_vlm.fusion.modalities import Sorted

SHAPES = {
    "plain": {},
    "sandwich-norms-and-windows": {
        "norm_order": "sandwich",
        "norm": LayerNormConfig(bias=True),
        "ffn": MLPConfig(bias=True),
        "attention": GroupedQueryConfig(
            num_heads=2, sliding_window=4, bias=True, output_bias=True, softcap=5.0
        ),
    },
    "reordered-norms-over-projections": {
        "norm_order": "reordered",
        "attention": GroupedQueryConfig(num_heads=4, num_kv_heads=2, qk_norm=True, qk_norm_over="projection"),
    },
    "head-norms-and-overrides": {
        "attention": GroupedQueryConfig(num_heads=4, num_kv_heads=1, qk_norm=True),
        "overrides": [
            LayerOverride(layers="0", norm=RMSNormConfig(zero_centered=True), ffn=MLPConfig(dim=24))
        ],
    },
}
MODALITY = torch.tensor([[0, 1, 1, 0, 0, 1, 0, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0, 2, 2], [0] * 10])
"""Interleaved; a row with padding; a row of text."""
GIVEN = {"modality": MODALITY, "modality_sizes": torch.stack([(n == MODALITY).sum(1) for n in (1, 2)], 1)}
TOKENS = torch.arange(30).view(3, 10) * 7 % 31


def text(**options):
    defaults = {"vocab_size": 31, "dim": 16, "num_layers": 2, "max_tokens": 16, "init_std": 0.2}
    return DecoderConfig(**defaults | {"attention": GroupedQueryConfig(num_heads=2)} | options)


def built(seed=1, **options):
    model = MixtureOfTransformersConfig().decoder(text(**options)).build()
    initialize(model, seed)
    return model.double()


def sides(given=GIVEN, tokens=TOKENS):
    return MixtureOfTransformersConfig().side_inputs(tokens, given)


def dense_name(name):
    return re.sub(r"\.(text|image)(?=\.|$)", "", name)


@pytest.mark.parametrize("shape", SHAPES)
def test_tied_copies_are_the_dense_decoder(shape):
    model, dense = built(**SHAPES[shape]), text(**SHAPES[shape]).build()
    initialize(dense, 2)
    dense.double()
    weights = dense.state_dict()
    names = [dense_name(name) for name in model.state_dict()]
    assert sorted(set(names)) == sorted(weights)
    outside = [name for name in names if names.count(name) == 1]
    assert sorted(outside) == ["embed.weight", "head.weight"], "embeddings and head alone are shared"
    model.load_state_dict({name: weights[dense_name(name)] for name in model.state_dict()})
    torch.testing.assert_close(model(TOKENS, **sides()), dense(TOKENS), rtol=0, atol=1e-12)


def by_token(model, modality):
    """Logits by a loop: one token at a time, with the weights of its modality."""
    config, names = model.config, ("text", "image", "text")
    rope = model._rope_tables(config.rope, config.attention.rotary_dim(16), TOKENS, None, torch.float64)
    rows = []
    for row, ids in enumerate(TOKENS):
        x = [model.embedded(ids[None])[0, t] for t in range(10)]
        kinds = [names[m] for m in modality[row].tolist()]
        for block in model.layers.values():
            attention, heads = block.attention, []
            for t, kind in enumerate(kinds):
                normed = getattr(block.attention_norm, kind)(x[t])
                made = [getattr(getattr(attention, w), kind)(normed).view(2, 8) for w in ("wq", "wk", "wv")]
                turned = [
                    rotate(one[None, :, None], *(table[t : t + 1] for table in rope))[0, :, 0]
                    for one in made[:2]
                ]
                heads.append((*turned, made[2]))
            for t, kind in enumerate(kinds):
                keys = torch.stack([heads[s][1] for s in range(t + 1)], 1)
                values = torch.stack([heads[s][2] for s in range(t + 1)], 1)
                weights = (keys @ heads[t][0][:, :, None] / 8**0.5).softmax(1)
                out = getattr(attention.wo, kind)((weights * values).sum(1).flatten())
                x[t] = x[t] + out
                x[t] = x[t] + getattr(block.ffn, kind)(getattr(block.ffn_norm, kind)(x[t]))
        last = torch.stack([getattr(model.norm, kind)(one) for kind, one in zip(kinds, x, strict=True)])
        rows.append(last @ model.head.weight.T)
    return torch.stack(rows)


def test_every_token_has_the_weights_of_its_modality_and_sees_both():
    model = built()
    torch.testing.assert_close(model(TOKENS, **sides()), by_token(model, MODALITY), rtol=0, atol=1e-12)


def test_the_order_of_storage_changes_nothing():
    model = built()
    first, made = model(TOKENS, **sides()), sides()
    counts = made["modality_counts"].shape[:2]
    mixed = [part[torch.randperm(len(part))] for part in made["modality_order"].split(counts)]
    order = torch.cat(mixed)
    other = made | {"modality_order": order, "modality_inverse": order.argsort()}
    torch.testing.assert_close(model(TOKENS, **other), first, rtol=0, atol=1e-12)
    swapped = {
        re.sub(
            r"\.(text|image)(?=\.|$)", lambda m: ".image" if m[1] == "text" else ".text", name
        ): value.clone()
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(swapped)
    flipped = torch.where(MODALITY == 1, 0, 1)
    sizes = torch.stack([flipped.sum(1), torch.zeros(3, dtype=torch.int64)], 1)
    turned = sides({"modality": flipped, "modality_sizes": sizes})
    torch.testing.assert_close(model(TOKENS, **turned), first, rtol=0, atol=1e-12)


def test_counts_unlike_the_modalities_are_an_error():
    with pytest.raises(RuntimeError, match="modality_sizes are not those of modality"):
        Sorted.of(TOKENS, MODALITY, GIVEN["modality_sizes"] + 1, True)


def test_gradients_of_permutations_are_right():
    made = Sorted.of(TOKENS, MODALITY, GIVEN["modality_sizes"], True)
    x = torch.randn(3, 10, 2, dtype=torch.float64, requires_grad=True)
    assert made.sizes == [22, 6, 2]
    assert torch.equal(made.restore(made.sort(x), (3, 10)), x)
    assert torch.autograd.gradcheck(lambda y: made.restore(made.sort(y).cumsum(0), (3, 10)), x)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mtp": MTPConfig(num_modules=1)}, "mtp.num_modules = 1"),
        ({"ffn": MoEConfig()}, "layer 0 has a MoEConfig"),
        ({"attention": LatentConfig(num_heads=2, kv_rank=8)}, "layer 0 has a LatentConfig or sinks"),
        ({"attention": GroupedQueryConfig(num_heads=2, sinks=True)}, "or sinks"),
    ],
)
def test_what_cannot_be_is_refused(options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        MixtureOfTransformersConfig().decoder(text(**options))


def test_cut_sequences_are_refused():
    config = VisionLanguageConfig(decoder=text(max_tokens=32), fusion=MixtureOfTransformersConfig())
    for axes, said in (
        ((1, 2, False, "ulysses"), "mesh.cp = 1"),
        ((2, 1, True, "gather"), "sequence = false"),
    ):
        with pytest.raises(ValueError, match=said):
            config.require_axes(*axes)
    config.require_axes(2, 1, False, "gather")
