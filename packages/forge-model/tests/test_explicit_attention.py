"""Soft-capped scores and sinks, against a loop over all pairs, and FlexAttention against both."""

import pytest
import torch
from forge_model import DecoderConfig, ModelError, initialize
from forge_model.attention.explicit import explicit_attention
from forge_model.attention.mask import Mask, flex_blocks, softmax_attention
from forge_model.config import GroupedQueryConfig, RMSNormConfig
from forge_model.layers import ZeroCenteredRMSNorm

B, N, K, T, H = 2, 4, 2, 9, 6
OPTIONS = {
    "plain": {},
    "capped": {"softcap": 1.3},
    "sinks": {"sinks": torch.linspace(-1, 2, N, dtype=torch.float64)},
}
OPTIONS["both"] = OPTIONS["capped"] | OPTIONS["sinks"]
EVERY = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def tensors(heads=N, tokens=T):
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, heads, tokens, H), (B, K, tokens, H), (B, K, tokens, H + 2)]
    return [torch.randn(s, dtype=torch.float64, generator=generator).mul_(2).requires_grad_() for s in shapes]


def looped(query, key, value, visible, scale=None, softcap=None, sinks=None):
    """One query at a time."""
    out = query.new_zeros(B, N, query.shape[2], value.shape[-1])
    for b, n, t in [(b, n, t) for b in range(B) for n in range(N) for t in range(query.shape[2])]:
        scores = key[b, n // (N // K)] @ query[b, n, t] * (scale or H**-0.5)
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        weights = scores.exp() * visible[b if len(visible) > 1 else 0, 0, t]
        total = weights.sum() + (0 if sinks is None else sinks[n].exp())
        out[b, n, t] = weights / total @ value[b, n // (N // K)]
    return out


def agree(ours, theirs, inputs):
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    weight = torch.randn_like(ours)
    given = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    gradients = (torch.autograd.grad((out * weight).sum(), given) for out in (ours, theirs))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@EVERY
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("documents", [False, True])
def test_scores_one_by_one_give_the_same_and_its_gradients(options, window, documents):
    inputs = tensors()
    options = {k: v.clone().requires_grad_() if k == "sinks" else v for k, v in options.items()}
    doc_ids = torch.arange(T).div(4, rounding_mode="floor").expand(B, -1) if documents else None
    mask = Mask(T, torch.device("cpu"), doc_ids)
    ours = explicit_attention(*inputs, explicit_attention.resolve(mask, window), 0.7, **options)
    agree(ours, looped(*inputs, mask.dense(window), 0.7, **options), [*inputs, *options.values()])


def test_without_options_it_is_softmax_attention():
    inputs, mask = tensors(), Mask(T, torch.device("cpu"))
    ours, theirs = (a(*inputs, a.resolve(mask, None)) for a in (explicit_attention, softmax_attention))
    agree(ours, theirs, inputs)


@EVERY
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_the_same(options, monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr("forge_model.attention.mask._compiled_flex", lambda: flex_attention)
    inputs = [x.detach() for x in tensors()]
    mask = Mask(T, torch.device("cpu"), torch.arange(T).div(4, rounding_mode="floor").expand(B, -1))
    with torch.no_grad():
        flex, dense = (
            explicit_attention(*inputs, made, 0.7, **options)
            for made in (flex_blocks(mask, 5), mask.dense(5))
        )
    torch.testing.assert_close(flex, dense, rtol=1e-9, atol=1e-11)


def test_softmax_attention_refuses_what_it_cannot_compute():
    inputs = tensors()
    with pytest.raises(TypeError, match="softcap"):
        softmax_attention(*inputs, None, softcap=3.0)


def test_a_loss_without_soft_cap_is_refused_by_a_head_with_one():
    attention = GroupedQueryConfig(num_heads=2)
    config = DecoderConfig(vocab_size=9, dim=8, num_layers=1, attention=attention, logit_softcap=2.0)
    model, tokens = config.build(), torch.zeros(1, 3, dtype=torch.int64)
    initialize(model, 0)
    assert model(tokens).abs().max() < 2
    with pytest.raises(TypeError, match="softcap"):
        model(tokens, labels=tokens, loss_fn=lambda hidden, weight, labels: None)
    with pytest.raises(ModelError, match="without a loss_fn"):
        model(tokens, labels=tokens)


def test_zero_centered_norm_starts_as_the_plain_one():
    plain, centered = (RMSNormConfig(zero_centered=zero).build(8).double() for zero in (False, True))
    config = DecoderConfig(
        vocab_size=9,
        dim=8,
        num_layers=1,
        norm=RMSNormConfig(zero_centered=True),
        attention=GroupedQueryConfig(num_heads=2, sinks=True),
    )
    values = config.build().initial_values()
    assert values["norm.weight"].value == 0 and values["layers.0.attention.sinks.weight"].value == 0
    assert isinstance(centered, ZeroCenteredRMSNorm)
    torch.nn.init.zeros_(centered.weight)
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(centered(x), plain(x), rtol=0, atol=1e-15)
    assert centered(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(("tp", "refused"), [(1, False), (2, True)])
def test_norms_over_all_heads_in_parts_are_refused_where_that_is_another_norm(tp, refused):
    attention = GroupedQueryConfig(num_heads=2, qk_norm=True, qk_norm_over="projection")
    norm = RMSNormConfig(zero_centered=True)
    config = DecoderConfig(vocab_size=8, dim=8, num_layers=1, attention=attention, norm=norm)
    if not refused:
        return config.require_axes(tp, 1, True, "gather")
    with pytest.raises(ValueError, match="layer 0: qk_norm_over"):
        config.require_axes(tp, 1, True, "gather")
