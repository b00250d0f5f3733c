"""Against the definition written out in float64, and against torch's own kernels."""

import itertools
import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from forge_interp.attention.call import AttentionCall
from forge_interp.errors import InterpError
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

BUDGET = 2**30


def call_sdpa(query: Tensor, key: Tensor, value: Tensor, **kwargs) -> AttentionCall:
    with sdpa_kernel(SDPBackend.MATH):
        output = F.scaled_dot_product_attention(query, key, value, **kwargs)
    return AttentionCall.of((query, key, value), kwargs, output)


def random_qkv(shape=(2, 4, 7, 7), kv_heads=None, dtype=torch.float32, seed=0) -> tuple[Tensor, ...]:
    batch, heads, queries, keys = shape
    generator = torch.Generator().manual_seed(seed)
    kv = heads if kv_heads is None else kv_heads
    shapes = (batch, heads, queries, 24), (batch, kv, keys, 24), (batch, kv, keys, 24)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)


def left_padded(batch: int, queries: int, keys: int) -> Tensor:
    """[B, 1, T, S] causal from the end; sequence b starts with b padding tokens."""
    causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return causal & (torch.arange(keys) >= torch.arange(batch)[:, None])[:, None, None]


def sliding_window(queries: int, keys: int, window: int = 3) -> Tensor:
    behind = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return (behind >= 0) & (behind < window)


def masks(batch: int, heads: int, queries: int, keys: int) -> dict[str, dict]:
    padded = left_padded(batch, queries, keys)
    negative = torch.zeros(padded.shape).masked_fill(~padded, torch.finfo(torch.float32).min)
    slopes = torch.arange(1, heads + 1)[:, None, None] * -(torch.arange(keys) - 2.0).abs() / 8
    return {
        "none": {},
        "causal": {"is_causal": True},
        "left padding": {"attn_mask": padded},
        "keys": {"attn_mask": torch.arange(keys) < torch.tensor([keys, 3])[:, None, None, None]},
        "window": {"attn_mask": sliding_window(queries, keys)},
        "biases of heads": {"attn_mask": slopes},
        "-inf": {"attn_mask": torch.zeros(padded.shape).masked_fill(~padded, -torch.inf)},
        "finfo.min": {"attn_mask": negative},
        "lower right": {"attn_mask": causal_lower_right(queries, keys)} if queries <= keys else {},
        "upper left": {"attn_mask": causal_upper_left(queries, keys)},
        "scale": {"attn_mask": padded, "scale": 0.5},
    }


def defined(query: Tensor, key: Tensor, kind: str, kwargs: dict) -> tuple[Tensor, Tensor, Tensor]:
    """Raw, scores and pattern with loops over heads, in float64."""
    (batch, heads, queries, _), (_, kv_heads, keys, _) = query.shape, key.shape
    mask = kwargs.get("attn_mask")
    if kind in ("causal", "upper left"):
        mask = torch.ones(queries, keys, dtype=torch.bool).tril()
    elif kind == "lower right" and mask is not None:
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    if mask is None:
        mask = torch.ones(1, dtype=torch.bool)
    mask = mask.expand(batch, heads, queries, keys)
    raw = torch.empty(batch, heads, queries, keys, dtype=torch.float64)
    for b, n in itertools.product(range(batch), range(heads)):
        raw[b, n] = query[b, n].double() @ key[b, n // (heads // kv_heads)].double().T
    raw *= kwargs.get("scale", 1 / math.sqrt(query.shape[-1]))
    scores = raw.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else raw + mask.double()
    return raw, scores, scores.softmax(-1).nan_to_num(0)


KINDS = list(masks(2, 4, 3, 5))


@pytest.mark.parametrize("lengths", [(7, 7), (3, 7), (1, 7), (7, 4)], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_read_equals_the_definition(kind, kv_heads, lengths):
    shape = (2, 4, *lengths)
    query, key, value = random_qkv(shape, kv_heads)
    kwargs = masks(*shape)[kind]
    call = call_sdpa(query, key, value, **kwargs, enable_gqa=kv_heads != 4)
    for name, expected in zip(("raw", "scores", "pattern"), defined(query, key, kind, kwargs), strict=True):
        torch.testing.assert_close(call.read(name, BUDGET).double(), expected, rtol=1e-5, atol=1e-6)
    call.check()


@pytest.mark.parametrize(
    "tile_bytes", [1, 3 * 4 * 7 * 4, 4 * 7 * 7 * 4], ids=["query", "queries", "sequence"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_read_and_check_in_parts_equal_the_definition(kind, tile_bytes, monkeypatch):
    monkeypatch.setattr(AttentionCall.tiles, "__defaults__", (tile_bytes,))
    shape = (2, 4, 7, 7)
    query, key, value = random_qkv(shape, 2)
    kwargs = masks(*shape)[kind]
    call = call_sdpa(query, key, value, **kwargs, enable_gqa=True)
    for name, expected in zip(("raw", "scores", "pattern"), defined(query, key, kind, kwargs), strict=True):
        torch.testing.assert_close(call.read(name, BUDGET).double(), expected, rtol=1e-5, atol=1e-6)
    call.check()
    call.output[1, 3, 6, 5] += 0.01
    with pytest.raises(InterpError, match="differs"):
        call.check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["none", "causal", "left padding", "biases of heads"])
def test_check_passes_with_every_dtype_and_kernel(kind, dtype):
    shape = (2, 4, 9, 9)
    query, key, value = random_qkv(shape, dtype=dtype)
    kwargs = dict(masks(*shape)[kind])
    if "attn_mask" in kwargs and kwargs["attn_mask"].dtype != torch.bool:
        kwargs["attn_mask"] = kwargs["attn_mask"].to(dtype)
    output = F.scaled_dot_product_attention(query, key, value, **kwargs)
    call = AttentionCall.of((query, key, value), kwargs, output)
    call.check()
    call_sdpa(query, key, value, **kwargs).check()
    assert call.read("pattern", BUDGET).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    with pytest.raises(InterpError, match="differs from the output"):
        AttentionCall.of((query * 1.2, key, value), kwargs, output).check()


def test_read_of_half_precision_rounds_inputs_only():
    query, key, value = random_qkv(dtype=torch.bfloat16)
    found = call_sdpa(query, key, value).read("pattern", BUDGET)
    exact = defined(query, key, "none", {})[2]
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-7)


def test_read_returns_the_tensors_of_the_call():
    query, key, value = random_qkv(kv_heads=2)
    call = call_sdpa(query, key, value, enable_gqa=True)
    assert [call.read(name, 0) is x for name, x in zip("qkv", (query, key, value), strict=True)] == [True] * 3
    assert call.read("z", 0) is call.output


@pytest.mark.parametrize("kind", ["none", "causal", "window"])
def test_read_keeps_the_rank_of_tensors_without_a_batch(kind):
    query, key, value = random_qkv((1, 4, 5, 6))
    kwargs = masks(1, 4, 5, 6)[kind] if kind != "keys" else {}
    flat = call_sdpa(query[0], key[0], value[0], **kwargs)
    full = call_sdpa(query, key, value, **kwargs)
    flat.check()
    for name in ("raw", "scores", "pattern", "entropy", "sink"):
        torch.testing.assert_close(
            flat.read(name, BUDGET), full.read(name, BUDGET)[0], rtol=0, atol=0, equal_nan=True
        )


def test_read_broadcasts_batch_and_heads_as_torch_does():
    query, key, value = random_qkv((2, 4, 5, 5))
    for q, k, v in (
        (query, key[:1], value[:1]),
        (query, key[:, :1], value[:, :1]),
        (query[:, :1], key, value),
    ):
        call = call_sdpa(q, k, v)
        call.check()
        assert call.read("pattern", BUDGET).shape == (2, 4, 5, 5)


@pytest.mark.parametrize("width", [3, 40])
def test_read_and_check_accept_values_of_another_width(width):
    query, key, value = random_qkv()
    wide = value.repeat(1, 1, 1, 2)[..., :width].contiguous()
    call = call_sdpa(query, key, wide)
    call.check()
    torch.testing.assert_close(
        call.read("pattern", BUDGET).double(), defined(query, key, "none", {})[2], rtol=1e-5, atol=1e-6
    )


def test_read_accepts_keys_expanded_before_the_call():
    query, key, value = random_qkv(kv_heads=2)
    grouped = call_sdpa(query, key, value, enable_gqa=True)
    expanded = call_sdpa(query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1))
    torch.testing.assert_close(grouped.read("pattern", BUDGET), expanded.read("pattern", BUDGET))


def test_pattern_of_a_query_that_sees_nothing_is_zero_and_not_checked():
    query, key, value = random_qkv((2, 4, 5, 5))
    mask = left_padded(2, 5, 5)
    call = call_sdpa(query, key, value, attn_mask=mask)
    pattern = call.read("pattern", BUDGET)
    assert (pattern[1, :, 0] == 0).all() and pattern.isfinite().all()
    torch.testing.assert_close(pattern[1, :, 1:].sum(-1), torch.ones(4, 4))
    call.output[1, :, 0] = torch.nan
    call.check()
    call.output[1, :, 1] += 0.01
    with pytest.raises(InterpError, match="differs"):
        call.check()


@pytest.mark.parametrize("shape", [(2, 4, 5, 0), (2, 4, 0, 5), (0, 4, 5, 5)], ids=str)
def test_read_and_check_accept_that_there_is_nothing(shape):
    query, key, value = random_qkv(shape)
    call = AttentionCall.of((query, key, value), {}, F.scaled_dot_product_attention(query, key, value))
    call.check()
    for name in ("raw", "scores", "pattern"):
        assert call.read(name, BUDGET).shape == shape


def test_read_and_check_accept_tensors_without_values():
    query, key, value = (x.to("meta") for x in random_qkv((2, 4, 5, 6)))
    call = AttentionCall.of((query, key, value), {}, F.scaled_dot_product_attention(query, key, value))
    call.check()
    assert call.read("pattern", BUDGET).is_meta and call.read("pattern", BUDGET).shape == (2, 4, 5, 6)
    for name in ("entropy", "sink", "previous"):
        assert call.read(name, 0).shape == (2, 4, 5)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_check_says_so_when_numbers_are_not_finite(number):
    call = call_sdpa(*random_qkv())
    call.output[0, 0, 0, 0] = number
    with pytest.raises(InterpError, match="not finite take part"):
        call.check()


@pytest.mark.parametrize("change", [1e-3, torch.nan, torch.inf])
def test_check_fails_when_one_number_of_the_output_was_tampered_with(change):
    call = call_sdpa(*random_qkv((3, 4, 40, 40)), is_causal=True)
    call.check()
    call.output[2, 3, 39, 5] += change
    with pytest.raises(InterpError, match=r"attn\.q, attn\.k"):
        call.check()


def test_check_is_relative_to_the_size_of_the_values():
    query, key, value = random_qkv()
    call = call_sdpa(query, key, value * 1e-6)
    call.check()
    call.output[0, 0, 0, 0] *= 1.01
    with pytest.raises(InterpError, match="differs"):
        call.check()
    call_sdpa(query, key, value * 1e4).check()
    call.check(tolerance=0.1)


@pytest.mark.parametrize(("times", "passes"), [(0.95, True), (1.05, False), (2.0, False)])
def test_check_allows_what_it_says_and_no_more(times, passes):
    """(1e-5 + 16 eps max |score|) times the largest sum_s pattern_s |V_s|, at one head and query."""
    query, key, value = (x.double() for x in random_qkv())
    call = call_sdpa(query.float(), key.float(), value.float())
    _, scores, pattern = defined(query, key, "none", {})
    allowed = 1e-5 + 16 * torch.finfo(torch.float32).eps * scores[0, 1, 2].abs().max()
    allowed *= (pattern[0, 1, 2] @ value[0, 1].abs()).max()
    output = (pattern @ value).clone()
    output[0, 1, 2, 3] += times * allowed
    off = AttentionCall.of((call.query, call.key, call.value), {}, output.float())
    with nullcontext() if passes else pytest.raises(InterpError, match="differs"):
        off.check()


def test_check_allows_the_rounding_of_large_scores():
    query, key, value = random_qkv((1, 2, 64, 64))
    call = call_sdpa(query * 10, key * 10, value)
    call.check()
    with pytest.raises(InterpError, match="differs"):
        AttentionCall.of((call.query * 1.01, call.key, value), {}, call.output).check()
    call_sdpa(query, key, value, attn_mask=torch.rand(64) * 10 + 3e4).check()


@pytest.mark.parametrize(("precision", "off"), [("ieee", 2e-5), ("tf32", 2e-3), ("bf16", 2e-2)])
def test_check_allows_what_the_precision_setting_of_products_allows(precision, off, request):
    matmul = torch.backends.mkldnn.matmul
    request.addfinalizer(partial(setattr, matmul, "fp32_precision", matmul.fp32_precision))
    query, key, value = (torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8), torch.ones(1, 1, 2, 8))
    matmul.fp32_precision = precision
    AttentionCall.of((query, key, value), {}, value * (1 + off / 4)).check()
    with pytest.raises(InterpError, match="differs"):
        AttentionCall.of((query, key, value), {}, value * (1 + 3 * off)).check()


def test_check_fails_when_scores_were_capped_elsewhere():
    query, key, value = random_qkv()
    scores = query @ key.transpose(-1, -2) / 24**0.5
    capped = (20 * torch.tanh(scores / 20)).softmax(-1) @ value
    with pytest.raises(InterpError, match="something else takes part"):
        AttentionCall.of((query, key, value), {}, capped).check()


def test_check_follows_autocast():
    query, key, value = random_qkv()
    mask = torch.zeros(7, 7).masked_fill(~sliding_window(7, 7), torch.finfo(torch.float32).min)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        call = AttentionCall.of((query, key, value, mask), {}, output)
        call.check(tolerance=1e-2)
        inside = call.read("pattern", BUDGET)
    exact = defined(query.bfloat16(), key.bfloat16(), "window", {"attn_mask": sliding_window(7, 7)})[2]
    torch.testing.assert_close(inside.double(), exact, rtol=1e-5, atol=1e-7)


def test_check_knows_that_autocast_rounds_values_and_masks():
    query, key, value = (torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8), torch.ones(1, 1, 2, 8) + 2**-9)
    value[:, :, 1] = 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for mask in (torch.tensor([[100.3, 99.0]]), torch.tensor([[200.0, 0.0]])):  # 100.3 rounds to 100.5
            output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            call = AttentionCall.of((query, key, value, mask), {}, output)
            call.check(tolerance=4e-3 if mask[0, 1] else 1e-4)
        double = query.double()
        assert AttentionCall.of((double, double, double), {}).output.dtype == torch.float64


def test_read_refuses_more_than_the_budget_and_names_remedies():
    call = call_sdpa(*random_qkv((2, 4, 7, 7)))
    needed = 2 * 4 * 7 * 7 * 4
    assert call.read("pattern", needed).nbytes == needed
    for name in ("raw", "scores", "pattern"):
        with pytest.raises(
            InterpError, match=rf"attn\.{name}.*{needed:,} bytes.*1,567.*attn\.entropy.*attention_bytes"
        ):
            call.read(name, needed - 1)
    assert call.read("entropy", 0).shape == (2, 4, 7)


def test_read_refuses_dropout_and_unknown_names():
    query, key, value = random_qkv()
    output = F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    call = AttentionCall.of((query, key, value, None, 0.5), {}, output)
    assert call.read("q", 0) is query
    for attempt in (lambda: call.read("pattern", BUDGET), lambda: call.read("sink", 0), call.check):
        with pytest.raises(InterpError, match=r"dropout 0.5.*model\.eval\(\)"):
            attempt()
    with pytest.raises(InterpError, match=r"no statistic 'size'.*entropy, sink, previous"):
        call_sdpa(query, key, value).read("size", 0)


def test_of_refuses_shapes_that_it_does_not_know():
    x = torch.randn(1, 1, 2, 4, 8)
    with pytest.raises(InterpError, match="expected 3 or 4 dimensions"):
        AttentionCall.of((x, x, x), {}, x)
    nested = torch.nested.nested_tensor([torch.randn(3, 8)], layout=torch.jagged)
    with pytest.raises(InterpError, match="pad the batch"):
        AttentionCall.of((nested, nested, nested), {}, nested)


def test_run_repeats_the_call():
    query, key, value = random_qkv(kv_heads=2)
    call = call_sdpa(query, key, value, attn_mask=left_padded(2, 7, 7), scale=0.3, enable_gqa=True)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.equal(call.run(F.scaled_dot_product_attention), call.output)


def test_of_before_the_call_knows_the_dtype_that_autocast_will_give():
    query, key, value = random_qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        edited = AttentionCall.of((query, key, value), {}).edited("raw", lambda raw: raw)
        output = F.scaled_dot_product_attention(query, key, value)
    assert edited.output.dtype == torch.bfloat16
    torch.testing.assert_close(edited.output, output, rtol=2e-2, atol=2e-2)


def test_read_works_on_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    query, key, value = random_qkv(kv_heads=2)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q, k, v = (mode.from_tensor(x) for x in (query, key, value))
        mask = mode.from_tensor(left_padded(2, 7, 7))
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        call = AttentionCall.of((q, k, v, mask), {"enable_gqa": True}, output)
        assert call.read("pattern", BUDGET).shape == (2, 4, 7, 7)
        for name in ("entropy", "sink", "previous"):
            assert call.read(name, 0).shape == (2, 4, 7)
