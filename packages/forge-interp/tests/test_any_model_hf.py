"""Capture on more of `transformers` than the zoo has, and on what the zoo leaves open about its families."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers
from forge_interp import InterpError, ablate, capture, edit

from .zoo import FAMILIES, GROUPED, LENGTH, PADS, PIXELS, VOCAB, build, fits, hooked, value_of

ATTENTION = ("q", "k", "v", "raw", "scores", "pattern", "z")
TOLERANCE = {"rtol": 0, "atol": 1e-5}


def words(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB - 1, (rows, length), generator=torch.Generator().manual_seed(1))


def text() -> dict[str, Tensor]:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :PADS] = 0
    return {"input_ids": words(), "attention_mask": mask}


def image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))}


def speech() -> dict[str, Tensor]:
    sound = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(1))
    return {"input_features": sound, "decoder_input_ids": words(2, 5)}


@dataclass(frozen=True)
class Other:
    """A family beside those of the zoo.

    Attributes:
        config: what its config is built from.
        blocks: where its blocks are.
        model: the class, without the family's name.
        inputs: of a forward pass.
        weights: fields of the output that hold the eager attention weights; none where the family, or some of
            its layers, does not call SDPA. Those of cross-attention are second in their block.
    """

    config: dict[str, Any] = field(default_factory=dict)
    blocks: str = "model.layers.*"
    model: str = "ForCausalLM"
    inputs: Callable[[], dict[str, Tensor]] = text
    weights: tuple[str, ...] = ("attentions",)


LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
VISION = {"blocks": "encoder.layer.*", "model": "Model", "inputs": image}
OTHERS = {
    "Gemma": Other({"head_dim": 8}),
    "Mistral": Other({"sliding_window": 4, "head_dim": 8}),
    "Phi3": Other(),
    "Olmo2": Other(),
    "OPT": Other({"ffn_dim": 32, "word_embed_proj_dim": 32}, "model.decoder.layers.*"),
    "GPTNeoX": Other({}, "gpt_neox.layers.*"),
    "DeepseekV3": Other(LATENT),
    "Falcon": Other({"new_decoder_architecture": True, "num_kv_heads": 2}, "transformer.h.*"),
    "Bloom": Other({"n_layer": 2, "n_head": 4}, "transformer.h.*", weights=()),
    "Mamba2": Other(
        {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}, "backbone.layers.*", weights=()
    ),
    "RecurrentGemma": Other({"num_hidden_layers": 3, "attention_window_size": 4}, weights=()),
    "GptOss": Other({"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}, weights=()),
    "ViT": Other(PIXELS, "layers.*", "Model", image),
    "Dinov2": Other(PIXELS, **VISION),
    "Whisper": Other(
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "max_target_positions": 10,
            "decoder_start_token_id": 1,
        },
        "*coder.layers.*",
        "Model",
        speech,
        ("encoder_attentions", "decoder_attentions", "cross_attentions"),
    ),
}

EVERY = pytest.mark.parametrize("name", OTHERS)
CHECKPOINTING = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")


@pytest.fixture(autouse=True)
def no_gradients(request):
    with torch.set_grad_enabled("gradient" in request.node.name):
        yield


def made(name: str, attention: str | None = None) -> tuple[Other, nn.Module]:
    other = OTHERS[name]
    config = getattr(transformers, f"{name}Config")(**GROUPED | other.config)
    wanted = attention or ("sdpa" if other.weights or name == "RecurrentGemma" else "eager")
    return other, build(name + other.model, config, wanted)


def blocks_of(model: nn.Module, glob: str) -> list[str]:
    return [name for name, _ in model.named_modules() if fits(name, glob)]


def first(args: tuple, kwargs: dict, output: Any) -> Tensor:
    return args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))


@EVERY
def test_blocks_equal_plain_hooks_of_another_run_and_the_hidden_states(name):
    other, model = made(name)
    names = blocks_of(model, other.blocks)
    assert len(names) >= 2
    with hooked(model, names, first) as ins, hooked(model, names, lambda a, k, o: value_of(o)) as outs:
        output = model(**other.inputs(), output_hidden_states=True)
    with capture(model, [f"{other.blocks}:in", f"{other.blocks}:out"]) as acts:
        model(**other.inputs())
    assert len(acts) == 2 * len(names)
    for block in names:
        assert torch.equal(acts[f"{block}:in"], ins[block]) and torch.equal(acts[f"{block}:out"], outs[block])
    states = [state for key, tuple_ in output.items() if "hidden_states" in key for state in tuple_]
    found = sum(any(acts[f"{block}:in"].equal(state) for state in states) for block in names)
    assert found == len(names) or name == "Mamba2"  # whose states are the outputs


def expected_weights(model: nn.Module, other: Other) -> dict[str, Tensor]:
    """Eager attention weights by the site of their pattern."""
    output = model(**other.inputs(), output_attentions=True)
    expected = {}
    for key in other.weights:
        side = key.partition("_")[0].replace("cross", "decoder")
        blocks = [block for block in blocks_of(model, other.blocks) if side in (block.partition(".")[0], key)]
        call = "#1" if key.startswith("cross") else ""
        expected |= {f"{b}:attn.pattern{call}": w for b, w in zip(blocks, output[key], strict=True)}
    return expected


@pytest.mark.parametrize("name", [name for name, other in OTHERS.items() if other.weights])
def test_attention_equals_the_eager_weights(name):
    other, model = made(name)
    with capture(model, [f"{other.blocks}:attn.{part}" for part in ATTENTION]) as acts:
        model(**other.inputs())
    expected = expected_weights(made(name, "eager")[1], other)
    assert sorted(key for key in acts if "pattern" in key) == sorted(expected)
    for site, weights in expected.items():
        q, k, v, raw, scores, pattern, z = (acts[site.replace("pattern", part)] for part in ATTENTION)
        padded = PADS if "attention_mask" in other.inputs() else 0
        rows = [slice(None), slice(padded, None)]
        for row, queries in enumerate(rows):
            torch.testing.assert_close(pattern[row, :, queries], weights[row, :, queries], **TOLERANCE)
        groups = q.shape[1] // k.shape[1]
        seen = scores > -1e4
        torch.testing.assert_close(scores[seen], raw[seen], **TOLERANCE)
        torch.testing.assert_close(pattern @ v.repeat_interleave(groups, 1), z, **TOLERANCE)


def test_attention_of_a_family_that_does_not_call_sdpa_is_an_error():
    other, model = made("Mamba2")
    with pytest.raises(InterpError, match="scaled_dot_product_attention"), capture(model, ":attn.pattern"):
        model(**other.inputs())


def test_attention_of_a_hybrid_is_that_of_its_attention_layers():
    other, model = made("RecurrentGemma")
    with capture(
        model, ["model.layers.2:attn.pattern", "model.layers.2:attn.z", "model.layers.2:attn.v"]
    ) as acts:
        model(**other.inputs())
    pattern, z, v = (acts[f"model.layers.2:attn.{part}"] for part in ("pattern", "z", "v"))
    torch.testing.assert_close(pattern @ v.repeat_interleave(4 // v.shape[1], 1), z, **TOLERANCE)
    assert (pattern.triu(1) == 0).all() and (pattern[:, :, 8, :5] == 0).all()  # a window of four
    with (
        pytest.raises(InterpError, match="scaled_dot_product_attention"),
        capture(model, "model.layers.0:attn.z"),
    ):
        model(**other.inputs())


def test_vision_tower_of_llava_equals_the_hidden_states_of_the_tower_alone():
    family = FAMILIES["llava"]()
    model, inputs = family.build("sdpa"), family.inputs(False)
    with capture(model, ["**.encoder.layers.*:in", "**.encoder.layers.*:out"]) as acts:
        model(**inputs)
    states = model.model.vision_tower(inputs["pixel_values"], output_hidden_states=True).hidden_states
    block = "model.vision_tower.encoder.layers.{}:{}".format
    for i in range(2):
        assert torch.equal(acts[block(i, "in")], states[i]) and torch.equal(
            acts[block(i, "out")], states[i + 1]
        )


def test_pooling_head_of_siglip2_gives_its_weights_as_an_output():
    family = FAMILIES["siglip2"]()
    model, inputs = family.build("sdpa"), family.inputs(False)
    head = "vision_model.head.attention"
    with capture(model, [f"{head}:out.1", f"{head}:out.0", "vision_model.head.layernorm:in"]) as acts:
        model(**inputs)
    assert torch.equal(acts[f"{head}:out.0"], acts["vision_model.head.layernorm:in"])
    torch.testing.assert_close(acts[f"{head}:out.1"].sum(-1), torch.ones(2, 1))
    with pytest.raises(InterpError, match="need_weights=False"), capture(model, f"{head}:attn.pattern"):
        model(**inputs)


def without_dropout(model: nn.Module) -> nn.Module:
    """In training mode, in which transformers checkpoints; as deterministic as in eval mode."""
    for module in model.modules():
        for name in ("p", "attention_dropout", "attn_pdrop", "resid_pdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    model.config.attn_pdrop = 0.0
    return model.train()


def watched(name: str, sites: list[str], reentrant: bool | None) -> tuple[dict, dict, dict]:
    """Values, their gradients and those of the weights."""
    family = FAMILIES[name]()
    model = without_dropout(family.build("sdpa"))
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with capture(model, sites, grad=True) as acts:
        model(**family.inputs(False), use_cache=False).logits.square().mean().backward()
    return dict(acts), dict(acts.gradients), {n: p.grad for n, p in model.named_parameters()}


@CHECKPOINTING
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "qwen3"])
def test_gradients_under_checkpointing_are_those_without_it_and_each_is_seen_once(name, reentrant):
    family = FAMILIES[name]()
    sites = [f"{family.towers[0].blocks}:in", f"{family.towers[0].blocks}:out"]
    if not reentrant:
        sites += [f"{glob}:attn.{part}" for glob in family.attention for part in ("q", "z")]
    for got, expected in zip(watched(name, sites, reentrant), watched(name, sites, None), strict=True):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(got[key], value), key


@CHECKPOINTING
def test_gradients_inside_of_reentrant_checkpointing_are_an_error_with_the_remedy():
    with pytest.raises(InterpError, match="reentrant checkpointing"):
        watched("gpt2", ["transformer.h.*.attn:attn.z"], True)


def test_documents_packed_in_one_row_are_those_alone():
    family = FAMILIES["llama"]()
    model, tokens = family.build("sdpa"), words(1)
    parts = ("pattern", "entropy", "previous")
    sites = ["model.layers.*:out", *(f"**.self_attn:attn.{part}" for part in parts)]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with capture(model, sites) as packed:
        model(tokens, position_ids=positions, use_cache=False)
    for rows in (slice(0, 4), slice(4, LENGTH)):
        with capture(model, sites) as alone:
            model(tokens[:, rows])
        for key, value in alone.items():
            got = packed[key][:, rows] if key.endswith("out") else packed[key][:, :, rows]
            got = got[..., rows] if key.endswith("pattern") else got
            torch.testing.assert_close(got, value, **TOLERANCE, equal_nan=True)
    assert (packed["model.layers.1.self_attn:attn.pattern"][..., 4:, :4] == 0).all()


STEPS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


def test_generation_with_a_static_cache_sees_what_the_growing_one_shows():
    family = FAMILIES["llama"]()
    model, prompt = family.build("sdpa"), family.inputs(False)
    sites = ["model.layers.*:out", "**.self_attn:attn.pattern", "**.self_attn:attn.entropy"]
    with capture(model, sites) as grown:
        model.generate(**prompt, **STEPS)
    with capture(model, sites) as static:
        model.generate(**prompt, **STEPS, cache_implementation="static")
    assert list(static) == list(grown) and len(grown) == 4 * 2 * 3
    for key, value in grown.items():
        got = static[key].reshape(*value.shape[:-1], -1)
        torch.testing.assert_close(got[..., : value.shape[-1]], value, **TOLERANCE)
        assert not got[..., value.shape[-1] :].any()


def test_generation_with_an_encoder_shows_cross_attention_step_by_step():
    family = FAMILIES["t5"]()
    model, prompt = family.build("sdpa"), family.inputs(False)
    del prompt["decoder_input_ids"]
    site = "decoder.block.1.layer.1.EncDecAttention:attn.pattern"
    with capture(model, [site, "encoder.block.*"]) as acts:
        written = model.generate(**prompt, **STEPS)
    with capture(model, site) as whole:
        model(**prompt, decoder_input_ids=written[:, :-1])
    assert len([key for key in acts if key.startswith("encoder")]) == 2
    for step in range(4):
        row = whole[site][:, :, step : step + 1]
        torch.testing.assert_close(acts[f"{site}#{step}"], row, **TOLERANCE)


def test_edited_output_of_a_model_keeps_its_type():
    family = FAMILIES["bert"]()
    model, inputs = family.build("sdpa"), family.inputs(False)
    plain = model(**inputs)
    with edit(model, {"encoder:out.last_hidden_state": ablate("zero")}):
        changed = model(**inputs)
    assert type(changed) is type(plain) and changed.keys() == plain.keys()
    assert not changed.last_hidden_state.any() and plain.last_hidden_state.any()
