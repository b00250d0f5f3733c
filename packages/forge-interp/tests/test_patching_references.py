"""Patching of a random tiny GPT-2 against nnsight and TransformerLens, where they are installed."""

from functools import partial

import numpy as np
import pytest
import torch
from forge_interp.causal.attribution import attribution_patching
from forge_interp.causal.patching import activation_patching
from forge_interp.causal.path_patching import path_patching
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore")

LAYERS, HEADS, TOKENS = 3, 2, 6
CLEAN = torch.tensor([[1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4]])
CORRUPTED = torch.tensor([[1, 2, 13, 4, 15, 6], [9, 8, 7, 16, 5, 14]])


@pytest.fixture(autouse=True, scope="module")
def double():
    """TransformerLens makes its tables in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=24, n_positions=16, n_embd=16, n_layer=LAYERS, n_head=HEADS, initializer_range=0.4
    )
    return transformers.GPT2LMHeadModel(config).eval()


def difference(logits: Tensor) -> Tensor:
    return (logits[:, -1, 3] - logits[:, -1, 7]).mean()


def metric(output) -> Tensor:
    return difference(output.logits)


@pytest.fixture(scope="module")
def bridge():
    pytest.importorskip("transformer_lens")
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    model = gpt2()
    return build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=model.config)


@pytest.fixture(scope="module")
def caches(bridge):
    return [bridge.run_with_cache(tokens)[1] for tokens in (CLEAN, CORRUPTED)]


def close(ours: np.ndarray, theirs: Tensor) -> None:
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=0, atol=1e-10)
    assert np.ptp(ours) > 0.1


@torch.no_grad()
def test_activation_patching_equals_transformer_lens(bridge, caches):
    from transformer_lens import patching

    ours = partial(activation_patching, gpt2(), CLEAN, CORRUPTED, metric=metric)
    theirs = {
        "transformer.h.*:in": ("positions", patching.get_act_patch_resid_pre),
        "transformer.h.*.attn:out": ("positions", patching.get_act_patch_attn_out),
        "transformer.h.*.mlp:out": ("positions", patching.get_act_patch_mlp_out),
        "transformer.h.*.attn:attn.z": ("heads", patching.get_act_patch_attn_head_out_all_pos),
        "transformer.h.*.attn:attn.q": ("heads", patching.get_act_patch_attn_head_q_all_pos),
        "transformer.h.*.attn:attn.v": ("heads", patching.get_act_patch_attn_head_v_all_pos),
        "transformer.h.*.attn:attn.pattern": ("heads", patching.get_act_patch_attn_head_pattern_all_pos),
    }
    for site, (where, reference) in theirs.items():
        close(ours(sites=site, where=where).values, reference(bridge, CORRUPTED, caches[0], difference))
    by_pos = ours(sites="transformer.h.*.attn:attn.z", where=("positions", "heads"))
    close(
        by_pos.values, patching.get_act_patch_attn_head_out_by_pos(bridge, CORRUPTED, caches[0], difference)
    )


@torch.no_grad()
@pytest.mark.parametrize("component", ["q", "k", "v"])
def test_path_patching_equals_transformer_lens(bridge, caches, component):
    from transformer_lens import patching

    expected = patching.get_act_patch_direct_path_all_sources(
        bridge, CORRUPTED, *caches, difference, component=component, verbose=False
    )
    block = "transformer.h.{}.attn"
    for head in range(HEADS):
        ours = path_patching(
            gpt2(),
            CLEAN,
            CORRUPTED,
            block.format("*") + ":attn.z",
            block.format("*") + f":attn.{component}",
            metric,
            frozen=["transformer.h.*.attn:out", "transformer.h.*.mlp:out"],
            where="heads",
            receiver_where=(slice(None), head),
        )
        for sender in range(LAYERS):
            later = slice(sender + 1, None)
            np.testing.assert_allclose(
                ours.values[sender, :, later], expected[sender, :, later, head], rtol=0, atol=1e-10
            )
            np.testing.assert_allclose(ours.effect[sender, :, : sender + 1], 0, atol=1e-12)
        assert np.abs(ours.effect).max() > 1e-2


def test_attribution_patching_equals_transformer_lens(bridge):
    from transformer_lens.tools.analysis.attribution_patching import attribution_patch

    theirs = attribution_patch(bridge, CLEAN[:1], CORRUPTED[:1], difference).node_scores
    ours = partial(attribution_patching, gpt2(), CLEAN[:1], CORRUPTED[:1], metric=metric)
    heads = ours(sites="transformer.h.*.attn:attn.z", where=("heads", "positions")).effect
    mlps = ours(sites="transformer.h.*.mlp:out", where="positions").effect
    found = {"attn_head_out": 0, "mlp_out": 0}
    for node, effect in theirs.items():
        if node.kind in found:
            found[node.kind] += 1
            at = (
                (node.layer, node.head, node.position)
                if node.kind != "mlp_out"
                else (node.layer, node.position)
            )
            assert (heads if node.kind != "mlp_out" else mlps)[at] == pytest.approx(effect, rel=0, abs=1e-10)
    assert found == {"attn_head_out": heads.size, "mlp_out": mlps.size}
    assert np.ptp(heads) > 1e-2 < np.ptp(mlps)


def test_activation_patching_equals_nnsight(monkeypatch):
    monkeypatch.setattr(
        Tensor, "backward", Tensor.backward
    )  # nnsight puts its own there, for all tests to come
    nnsight = pytest.importorskip("nnsight")
    traced = nnsight.NNsight(gpt2())
    with torch.no_grad():
        with traced.trace(CLEAN):
            clean = nnsight.save([layer.output for layer in traced.transformer.h])
        expected = torch.zeros(LAYERS, TOKENS)
        for layer in range(LAYERS):
            for position in range(TOKENS):
                with traced.trace(CORRUPTED):
                    traced.transformer.h[layer].output[:, position] = clean[layer][:, position]
                    value = nnsight.save(difference(traced.lm_head.output))
                expected[layer, position] = value
    ours = activation_patching(gpt2(), CLEAN, CORRUPTED, "transformer.h.*", metric, where="positions")
    close(ours.values, expected)
