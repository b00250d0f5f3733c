"""Weights of heads against matrices of the models, composition against its definition with full matrices."""

import numpy as np
import pytest
import torch
from forge_interp import InterpError
from forge_interp.circuits.weights import composition_scores, head_weights

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
}
HEADS = {"num_attention_heads": 4, "max_position_embeddings": 32}
TOKENS = torch.arange(12).view(2, 6)


def build(family: str, **options):
    torch.manual_seed(0)
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_weights_of_shared_keys_are_those_of_the_projections():
    model = build("Llama", **SMALL, **HEADS, num_key_value_heads=2, attention_bias=True)
    found = head_weights(model, TOKENS)
    assert list(found) == ["blocks.0", "blocks.1", "blocks.2"]
    for number, of in enumerate(found.values()):
        attention = model.model.layers[number].self_attn
        for head in range(4):
            rows, shared = slice(6 * head, 6 * head + 6), slice(6 * (head // 2), 6 * (head // 2) + 6)
            for mine, weight, cut in ((of.q, attention.q_proj, rows), (of.k, attention.k_proj, shared)):
                torch.testing.assert_close(mine[head].float(), weight.weight[cut].T, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(
                of.v[head].float(), attention.v_proj.weight[shared].T, rtol=1e-5, atol=1e-6
            )
            torch.testing.assert_close(
                of.o[head].float(), attention.o_proj.weight[:, rows].T, rtol=1e-5, atol=1e-6
            )


def test_fused_and_transposed_weights_need_no_names():
    options = {"vocab_size": 50, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32}
    model = build("GPT2", **options, bos_token_id=1, eos_token_id=2)
    found, attention = head_weights(model, TOKENS), model.transformer.h[1].attn
    q, k, v = attention.c_attn.weight.split(24, dim=1)
    for mine, whole in ((found["blocks.1"].q, q), (found["blocks.1"].k, k), (found["blocks.1"].v, v)):
        torch.testing.assert_close(mine.movedim(0, 1).flatten(1).float(), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        found["blocks.1"].o.flatten(0, 1).float(), attention.c_proj.weight, rtol=1e-5, atol=1e-6
    )
    neox = build("GPTNeoX", **SMALL, **HEADS)
    found, whole = head_weights(neox, TOKENS), neox.gpt_neox.layers[0].attention.query_key_value.weight
    q = whole.view(4, 3, 6, 24)[:, 0].mT
    torch.testing.assert_close(found["blocks.0"].q.float(), q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["q", "k", "v"])
def test_composition_is_that_of_the_full_matrices(kind):
    weights = head_weights(build("Llama", **SMALL, **HEADS, num_key_value_heads=2), TOKENS)
    scores, names = composition_scores(weights, kind)
    heads = [(b, n) for b in range(3) for n in range(4)]
    assert names == [f"blocks.{b}.head.{n}" for b, n in heads]
    blocks = list(weights.values())
    for i, (b, n) in enumerate(heads):
        for j, (c, m) in enumerate(heads):
            first, second = blocks[b], blocks[c]
            ov = first.v[n] @ first.o[n]
            qk = second.q[m] @ second.k[m].T
            other = {"q": qk, "k": qk.T, "v": second.v[m] @ second.o[m]}[kind]
            wanted = (ov @ other).norm() / (ov.norm() * other.norm())
            if b < c:
                assert scores[i, j] == pytest.approx(wanted.item(), rel=1e-9)
            else:
                assert np.isnan(scores[i, j])


def test_copying_is_the_trace_beside_the_sizes_of_eigenvalues():
    of = head_weights(build("Llama", **SMALL, **HEADS), TOKENS)["blocks.1"]
    for head, found in enumerate(of.copying()):
        values = torch.linalg.eigvals(of.v[head] @ of.o[head])
        assert found.item() == pytest.approx((values.sum().real / values.abs().sum()).item(), rel=1e-6)


def test_of_queries_with_a_norm_only_values_make_a_circuit():
    model = build("Qwen3", **SMALL, **HEADS, num_key_value_heads=2, head_dim=6)
    weights = head_weights(model, TOKENS)
    of, attention = weights["blocks.1"], model.model.layers[1].self_attn
    assert of.q is None and of.k is None
    torch.testing.assert_close(of.v[2].float(), attention.v_proj.weight[6:12].T, rtol=1e-5, atol=1e-6)
    assert np.isfinite(composition_scores(weights, "v")[0][0, 4:]).all()
    with pytest.raises(InterpError, match="no linear map"):
        composition_scores(weights, "q")


def test_a_model_that_takes_the_softmax_itself_shows_its_values():
    model = build("Llama", **SMALL, **HEADS)
    wanted = head_weights(model, TOKENS)
    model.set_attn_implementation("eager")
    found = head_weights(model, TOKENS)
    assert found["blocks.2"].q is None
    torch.testing.assert_close(found["blocks.2"].v, wanted["blocks.2"].v)
    torch.testing.assert_close(found["blocks.2"].o, wanted["blocks.2"].o)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_other_dtypes(dtype):
    model = build("Llama", **SMALL, **HEADS).to(dtype)
    found = head_weights(model, TOKENS)["blocks.2"]
    wanted = model.model.layers[2].self_attn.q_proj.weight[6:12].T.double()
    torch.testing.assert_close(found.q[1], wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-12, atol=1e-6)


def test_blocks_without_attention_have_no_heads():
    options = {"layer_types": ["mamba", "attention", "mamba"], "mamba_d_state": 8, "mamba_n_heads": 6}
    options |= {
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "shared_intermediate_size": 24,
        "num_local_experts": 0,
    }
    model = build("GraniteMoeHybrid", **SMALL, **HEADS, **options)
    found = head_weights(model, TOKENS)
    assert list(found) == ["blocks.1"]
    wanted = model.model.layers[1].self_attn.q_proj.weight[:6].T
    torch.testing.assert_close(found["blocks.1"].q[0].float(), wanted, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_is_refused():
    model = build("Llama", **SMALL, **HEADS)
    with pytest.raises(InterpError, match="expected 'q', 'k' or 'v'"):
        composition_scores({}, "o")
    for layer in model.model.layers:
        layer.self_attn.v_proj.forward = lambda x, plain=layer.self_attn.v_proj.forward: plain(x).tanh()
    with pytest.raises(InterpError, match=r"values or output of attention in blocks\.0 are no"):
        head_weights(model, TOKENS)


def test_an_output_projection_elsewhere_is_refused_not_taken_for_the_identity():
    model = transformers.BertModel(transformers.BertConfig(**SMALL, **HEADS)).eval()
    with pytest.raises(InterpError, match=r"blocks\.0 gives attn\.z as it is, so that W_O lies elsewhere"):
        head_weights(model, TOKENS)
