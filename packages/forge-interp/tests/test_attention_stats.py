"""Against loops over the dense pattern, and a padded batch against its sequences alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from forge_interp import capture
from forge_interp.attention import call as attention
from forge_interp.attention import tiles as module
from forge_interp.attention.call import AttentionCall
from forge_interp.attention.statistics import attention_statistics
from forge_interp.errors import InterpError
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .test_attention import random_qkv

NAMES = ["entropy", "sink", "previous", "lag.0", "lag.3"]


def random_call(
    shape=(2, 4, 12, 12), mask: Tensor | None = None, kv_heads=2, dtype=torch.float64, **kwargs
) -> AttentionCall:
    batch, heads, queries, keys = shape
    generator = torch.Generator().manual_seed(sum(shape))
    shapes = (batch, heads, queries, 8), (batch, kv_heads, keys, 8), (batch, kv_heads, keys, 8)
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    given = {"attn_mask": mask, "enable_gqa": True} | kwargs
    return AttentionCall.of((q, k, v), given, F.scaled_dot_product_attention(q, k, v, **given))


def left_padded(pads: list[int], queries: int, keys: int) -> Tensor:
    causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return causal & (torch.arange(keys) >= torch.tensor(pads)[:, None])[:, None, None]


def windowed(keys: int) -> Tensor:
    return torch.ones(keys, keys, dtype=torch.bool).tril().triu(-2)


def packed(keys: int) -> Tensor:
    document = torch.arange(keys) >= keys // 3
    return torch.ones(keys, keys, dtype=torch.bool).tril() & (document[:, None] == document)


def of_heads(keys: int) -> Tensor:
    """Head 0 sees all, head 1 a window, head 2 the past, head 3 nothing before key 2."""
    everything = torch.ones(keys, keys, dtype=torch.bool)
    return torch.stack([everything, windowed(keys), everything.tril(), torch.arange(keys) >= 2 * everything])


def by_loops(call: AttentionCall, visible: Tensor, name: str) -> Tensor:
    batch, heads, queries, keys = call.grid
    visible = visible.expand(batch, heads, queries, keys)
    each_key = call.key.repeat_interleave(heads // call.key.shape[1], 1)
    scores = (call.query @ each_key.mT * call.scale).masked_fill(~visible, -torch.inf)
    pattern = scores.softmax(-1).nan_to_num(0)
    found = torch.full((batch, heads, queries), math.nan, dtype=pattern.dtype)
    for b, n, t in torch.cartesian_prod(*map(torch.arange, (batch, heads, queries))).tolist():
        sees = visible[b, n, t]
        seen = sees.nonzero().flatten().tolist() or [-1]
        own = t if call.is_causal or queries == keys else seen[-1]
        if name == "entropy":
            p = pattern[b, n, t][pattern[b, n, t] > 0]
            found[b, n, t] = -(p * p.log()).sum() if sees.any() else math.nan
            continue
        first = visible[b, n].any(0).nonzero()[0].item()
        at = first if name == "sink" else own - {"previous": 1, "lag.0": 0, "lag.3": 3}[name]
        needed = [at] if name == "sink" else [at, own]
        if all(0 <= key < keys and sees[key] for key in needed):
            found[b, n, t] = pattern[b, n, t, at]
    return found


CASES = {
    "all": (None, (2, 4, 12, 12)),
    "left padding": (left_padded([0, 4], 12, 12), (2, 4, 12, 12)),
    "right padding": (torch.arange(12) < torch.tensor([12, 7])[:, None, None, None], (2, 4, 12, 12)),
    "window": (windowed(12), (2, 4, 12, 12)),
    "documents": (packed(12), (2, 4, 12, 12)),
    "heads": (of_heads(12), (2, 4, 12, 12)),
    "cache": (left_padded([0, 4], 3, 12), (2, 4, 3, 12)),
    "one query": (left_padded([0, 4], 1, 12), (2, 4, 1, 12)),
    "empty slots": (F.pad(left_padded([0, 4], 3, 8), (0, 4)), (2, 4, 3, 12)),
    "packed heads": (left_padded([0, 4], 1, 12), (2, 2, 2, 12)),
    "fewer keys": (None, (2, 4, 12, 5)),
}


@pytest.mark.parametrize("tile_bytes", [1, 4 * 12 * 8 * 5, 2**24], ids=["query", "queries", "batch"])
@pytest.mark.parametrize("case", CASES)
def test_attention_statistics_equal_loops_over_the_pattern(case, tile_bytes, monkeypatch):
    mask, shape = CASES[case]
    call = random_call(shape, mask)
    monkeypatch.setattr(AttentionCall.tiles, "__defaults__", (tile_bytes,))
    found = attention_statistics(call, NAMES)
    visible = torch.ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask
    for name in NAMES:
        torch.testing.assert_close(found[name], by_loops(call, visible, name), equal_nan=True)


@pytest.mark.parametrize("shape", [(2, 4, 12, 12), (2, 4, 5, 12), (2, 4, 12, 5)], ids=str)
def test_attention_statistics_align_is_causal_at_the_first_key(shape):
    call = random_call(shape, is_causal=True)
    visible = torch.ones(shape[2:], dtype=torch.bool).tril()
    found = attention_statistics(call, NAMES)
    for name in NAMES:
        torch.testing.assert_close(found[name], by_loops(call, visible, name), equal_nan=True)


@pytest.mark.parametrize("name", ["raw", "scores", "pattern"])
def test_attention_statistics_see_edits_in_every_part(name, monkeypatch):
    call = random_call((2, 4, 6, 6))
    factor = torch.rand(2, 4, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    edited = call.edited(name, lambda value: value * factor)
    expected = torch.special.entr(edited.read("pattern", 2**30)).sum(-1)
    monkeypatch.setattr(AttentionCall.tiles, "__defaults__", (1,))
    torch.testing.assert_close(edited.read("entropy", 0), expected)
    assert not torch.allclose(call.read("entropy", 0), expected)
    edited.check()


@pytest.mark.parametrize("minus", [-torch.inf, torch.finfo(torch.float64).min, -1e9, -1e4])
def test_attention_statistics_take_an_added_mask_like_the_bool_one(minus):
    mask = left_padded([0, 4], 12, 12)
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, minus)
    found = attention_statistics(random_call(mask=added), NAMES)
    expected = attention_statistics(random_call(mask=mask), NAMES)
    for name in NAMES:
        torch.testing.assert_close(found[name], expected[name], equal_nan=True)


def test_attention_statistics_of_a_padded_sequence_are_those_of_the_sequence_alone():
    pads = 4
    alone = random_call((1, 4, 12, 12), is_causal=True)
    filled = [F.pad(x, (0, 0, pads, 0), value=7.0) for x in (alone.query, alone.key, alone.value)]
    given = {"attn_mask": left_padded([pads], 16, 16), "enable_gqa": True}
    padded = AttentionCall.of(filled, given, F.scaled_dot_product_attention(*filled, **given))
    found = attention_statistics(padded, NAMES)
    for name, expected in attention_statistics(alone, NAMES).items():
        assert found[name][..., :pads].isnan().all()
        torch.testing.assert_close(found[name][..., pads:], expected, equal_nan=True)


def test_attention_statistics_without_any_key_are_not_defined():
    for name, found in attention_statistics(random_call((2, 4, 3, 0)), NAMES).items():
        assert found.shape == (2, 4, 3) and found.isnan().all(), name


def test_attention_statistics_of_many_bfloat16_tokens_equal_the_dense_definition():
    keys, lag = 4096, 7
    call = random_call((1, 2, keys, keys), kv_heads=1, dtype=torch.bfloat16, attn_mask=None, is_causal=True)
    call.check()
    found = attention_statistics(call, ["entropy", "sink", "previous", f"lag.{lag}"])
    raw = call.query.double() @ call.key.double().mT / 8**0.5
    pattern = raw.masked_fill_(torch.ones(keys, keys, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    expected = {
        "entropy": torch.special.entr(pattern).sum(-1),
        "sink": pattern[..., 0],
        "previous": F.pad(pattern.diagonal(-1, -2, -1), (1, 0), value=torch.nan),
        f"lag.{lag}": F.pad(pattern.diagonal(-lag, -2, -1), (lag, 0), value=torch.nan),
    }
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_attention_statistics_hold_no_tensor_of_all_weights():
    names = ["sink", "previous", "lag.5", "entropy"]
    shape = (1, 4, 3000, 3000)
    call = random_call(shape, mask=left_padded([5], 3000, 3000), dtype=torch.float32)
    with Largest() as largest:
        attention_statistics(call, names)
        call.check()
    assert largest.bytes <= 1.01 * attention.TILE_BYTES
    assert largest.bytes <= 0.12 * math.prod(shape) * 4


class Largest(TorchDispatchMode):
    """The most bytes that any new tensor took."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        fresh = [
            x.untyped_storage().nbytes()
            for x in tree_leaves(out)
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given
        ]
        self.bytes = max([self.bytes, *fresh])
        return out


def test_attention_statistics_refuse_unknown_names():
    call = random_call()
    for name in ("lag", "lag.-1", "lag.x", "mean", "entropy.1"):
        with pytest.raises(InterpError, match=f"no statistic '{name}'.*lag.K"):
            attention_statistics(call, [name])


def test_attention_statistics_stay_float32_for_half_precision():
    call = random_call(dtype=torch.bfloat16)
    assert attention_statistics(call, ["entropy"])["entropy"].dtype == torch.float32


def test_everything_read_of_one_call_takes_one_pass_over_its_scores(monkeypatch):
    """Products of queries and keys, and of pattern and values for the check and its scale: two in all.

    Beside them, later calls are checked at two queries.
    """

    class Attend(torch.nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

    products, grouped = [], module.grouped
    monkeypatch.setattr(module, "grouped", lambda *args: note(args) or grouped(*args))

    def note(args):
        products.extend([args] if args[0].shape[2] > 2 else [])

    names = ["raw", "scores", "pattern", "entropy", "sink", "previous"]
    model, qkv = Attend(), random_qkv()
    with capture(model, [f":attn.{name}" for name in names]) as acts:
        model(*qkv)
        assert len(products) == 2
        model(*qkv)
        assert len(products) == 3
    for name in names:
        with capture(model, f":attn.{name}") as alone:
            model(*qkv)
        for call in ("", "#1"):
            together, single = acts[f":attn.{name}{call}"], alone[f":attn.{name}"]
            torch.testing.assert_close(together, single, rtol=0, atol=0, equal_nan=True)
