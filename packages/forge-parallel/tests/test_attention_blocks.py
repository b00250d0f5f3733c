"""Attention block by block against softmax over all keys, written out in float64."""

import pytest
import torch
from forge_parallel import attention_blocks
from forge_parallel.attention_blocks import Block, attend, gradients, joined
from forge_parallel.error import ParallelError

B, N, T, H = 2, 3, 40, 12


def drawn(tokens: int) -> torch.Tensor:
    return torch.randn(B, N, tokens, H, dtype=torch.float64)


def written_out(query, key, value, visible, scale):
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("masked", [False, True])
def test_blocks_of_keys_make_together_what_all_keys_do(masked):
    torch.manual_seed(0)
    query, key, value, through = (
        drawn(T).requires_grad_(),
        *(drawn(72).requires_grad_() for _ in "kv"),
        drawn(T),
    )
    visible = torch.ones(B, 1, T, 72, dtype=torch.bool)
    if masked:
        visible = torch.rand(B, 1, T, 72) < 0.4
        visible[..., 0], visible[:, :, :9, 48:] = True, False  # nine queries see nothing of the last block
    expected = written_out(query, key, value, visible, 0.3)
    blocks = [
        Block(query.detach(), k.detach(), v.detach(), seen if masked else None, False, 0.3)
        for k, v, seen in zip(key.split(24, 2), value.split(24, 2), visible.split(24, 3), strict=True)
    ]
    out, lse = attend(blocks[0])
    for block in blocks[1:]:
        out, lse = joined(out, lse, *attend(block))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    parts = [gradients(block, out, lse, through) for block in blocks]
    found = sum(one[0] for one in parts), *(torch.cat([one[i] for one in parts], 2) for i in (1, 2))
    for mine, reference in zip(
        found, torch.autograd.grad(expected, [query, key, value], through), strict=True
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-12)


def test_causal_block_is_that_of_a_triangle():
    torch.manual_seed(0)
    query, key, value = (drawn(T) for _ in "qkv")
    out, _ = attend(Block(query, key, value, None, True, 0.3))
    triangle = torch.ones(T, T, dtype=torch.bool).tril()
    torch.testing.assert_close(out, written_out(query, key, value, triangle, 0.3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test_kernels_of_gpus_are_given_shapes_that_they_know(kernel):
    """On the meta device: heads of 12 are padded to 16, and sums of 40 queries to 64."""
    query, key = (torch.empty(B, N, n, H, dtype=torch.bfloat16, device="meta") for n in (T, 24))
    visible = torch.empty(B, 1, T, 24, dtype=torch.bool, device="meta") if kernel == "efficient" else None
    block = Block(query, key, key, visible, False, 0.3)
    forward, backward = (getattr(attention_blocks, f"_{kernel}{name}") for name in ("", "_backward"))
    out, lse = forward(block)
    assert out.shape == query.shape and lse.shape == query.shape[:-1] and lse.dtype == torch.float32
    found = backward(block, out, lse, torch.empty_like(out))
    assert [one.shape for one in found] == [query.shape, key.shape, key.shape]


def test_other_devices_are_refused():
    empty = torch.empty(1, 1, 1, 8, device="meta")
    with pytest.raises(ParallelError, match='not on meta; use "gather"'):
        attend(Block(empty, empty, empty, None, False, 1.0))
