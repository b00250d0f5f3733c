"""Capture on more of `transformers` than the zoo has, and on what the zoo leaves open about its families."""

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from forge_interp import InterpError, ablate, capture, edit

from .families import made
from .zoo import FAMILIES, LENGTH, VOCAB, text

ATTENTION = ("q", "k", "v", "raw", "scores", "pattern", "z")
TOLERANCE = {"rtol": 0, "atol": 1e-5}


def words(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB - 1, (rows, length), generator=torch.Generator().manual_seed(1))


CHECKPOINTING = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")


@pytest.fixture(autouse=True)
def no_gradients(request):
    with torch.set_grad_enabled("gradient" in request.node.name):
        yield


def test_attention_of_a_hybrid_is_that_of_its_attention_layers():
    model, inputs = made("RecurrentGemma"), text(True)
    with capture(
        model, ["model.layers.2:attn.pattern", "model.layers.2:attn.z", "model.layers.2:attn.v"]
    ) as acts:
        model(**inputs)
    pattern, z, v = (acts[f"model.layers.2:attn.{part}"] for part in ("pattern", "z", "v"))
    torch.testing.assert_close(pattern @ v.repeat_interleave(4 // v.shape[1], 1), z, **TOLERANCE)
    assert (pattern.triu(1) == 0).all() and (pattern[:, :, 8, :5] == 0).all()  # a window of four
    with (
        pytest.raises(InterpError, match="scaled_dot_product_attention"),
        capture(model, "model.layers.0:attn.z"),
    ):
        model(**inputs)


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
