"""A call as if its raw scores, scores or pattern had been others."""

import pytest
import torch
import torch.nn.functional as F
from forge_interp.attention.call import AttentionCall
from torch import Tensor

from .test_attention import BUDGET, call_sdpa, defined, left_padded, random_qkv, sliding_window


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", ["raw", "scores", "pattern"])
def test_edited_output_follows_and_later_reads_see_the_edit(name, flat):
    query, key, value = random_qkv((1, 4, 5, 6), kv_heads=2, dtype=torch.float64)
    tensors = (query[0], key[0], value[0]) if flat else (query, key, value)
    call = call_sdpa(*tensors, attn_mask=sliding_window(5, 6), enable_gqa=True)

    def shift(x: Tensor) -> Tensor:
        assert x.dim() == (3 if flat else 4)
        return x + torch.linspace(0, 1, 6, dtype=x.dtype)

    new = call.edited(name, shift)
    stages = dict(zip(("raw", "scores", "pattern"), defined(query, key, "window", {}), strict=True))
    mask = sliding_window(5, 6)
    stages = {"raw": stages["raw"]}
    if name == "raw":
        stages["raw"] = shift(stages["raw"][0])[None] if flat else shift(stages["raw"])
    ramp = torch.linspace(0, 1, 6, dtype=torch.float64)
    stages["scores"] = stages["raw"].masked_fill(~mask, -torch.inf) + (ramp if name == "scores" else 0)
    stages["pattern"] = stages["scores"].softmax(-1) + (ramp if name == "pattern" else 0)
    for stage, expected in stages.items():
        torch.testing.assert_close(new.read(stage, BUDGET).reshape(expected.shape), expected)
    output = stages["pattern"] @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(new.output.reshape(output.shape), output)
    assert new.output.dim() == call.output.dim()
    new.check()
    entropy = torch.special.entr(stages["pattern"]).sum(-1)
    torch.testing.assert_close(new.read("entropy", 0).reshape(entropy.shape), entropy)


def test_edited_keeps_edits_of_earlier_stages_and_drops_those_of_later_ones():
    call = call_sdpa(*random_qkv((1, 2, 4, 4), dtype=torch.float64))
    scores = call.edited("raw", lambda raw: raw * 2).edited("scores", lambda scores: scores + torch.eye(4))
    torch.testing.assert_close(scores.read("raw", BUDGET), call.read("raw", BUDGET) * 2)
    torch.testing.assert_close(scores.read("scores", BUDGET), call.read("raw", BUDGET) * 2 + torch.eye(4))
    again = scores.edited("raw", lambda raw: raw / 2)
    for name in ("raw", "scores", "pattern"):
        torch.testing.assert_close(again.read(name, BUDGET), call.read(name, BUDGET))
    torch.testing.assert_close(again.output, call.output)


@pytest.mark.parametrize("added", [False, True])
def test_edited_is_differentiable_past_a_query_that_sees_nothing(added):
    query, key, value = (x.requires_grad_() for x in random_qkv((2, 4, 5, 5), dtype=torch.float64))
    mask = left_padded(2, 5, 5)
    mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf) if added else mask
    call = AttentionCall.of((query, key, value), {"attn_mask": mask})
    plain = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    kept = call.edited("pattern", lambda pattern: pattern)
    torch.testing.assert_close(kept.output, plain)
    weight = torch.randn(plain.shape, dtype=torch.float64)
    for found, expected in zip(
        torch.autograd.grad(kept.output, (query, key, value), weight),
        torch.autograd.grad(plain, (query, key, value), weight),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)
