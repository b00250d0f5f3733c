"""FlexAttention, which only CUDA has, against scaled dot products over a mask written out; varlen_attn."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from forge_model.attention.mask import BLOCK, Mask, flex_blocks, softmax_attention
from forge_parallel import View
from forge_parallel.attention_blocks import Block, attend, gradients, joined
from forge_parallel.context_parallel import Cut, GatherKeys
from gpu_device import DEVICE, needs_cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.gpu
HEADS, KV_HEADS, WIDTH = 4, 2, 64


def documents(rows: int, tokens: int) -> torch.Tensor:
    """[rows, tokens] ids of packed documents, other ones in each row."""
    generator = torch.Generator().manual_seed(tokens)
    return (torch.rand(rows, tokens, generator=generator) < 0.02).cumsum(1).to(DEVICE)


def drawn(tokens: int, dtype: torch.dtype, width: int = WIDTH) -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    return [
        torch.randn(2, heads, tokens, width, device=DEVICE, generator=generator).to(dtype).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def plain(query, key, value, mask: Mask, window: int | None) -> torch.Tensor:
    """In float64, over the mask [B, 1, T, S]."""
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
    return scores.masked_fill(~mask.dense(window), -torch.inf).softmax(-1) @ value


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(512, WIDTH), (333, WIDTH), (64, WIDTH), (64, 8)])
@pytest.mark.parametrize(("packed", "window"), [(True, None), (False, 100), (True, 100)])
def test_flex_attention_equals_the_mask_written_out(dtype, tokens, width, packed, window):
    mask = Mask(tokens, DEVICE, documents(2, tokens) if packed else None)
    inputs = drawn(tokens, dtype, width)
    resolved = softmax_attention.resolve(mask, window)
    if window is None or window < tokens:
        assert resolved is not None and not isinstance(resolved, torch.Tensor), "FlexAttention is used"
    out, exact = softmax_attention(*inputs, resolved), plain(*inputs, mask, window)
    bound = 2e-2 if dtype == torch.bfloat16 else 5e-3  # float32 dots are in TF32 there
    assert (out - exact).norm() < bound * exact.norm()
    weights = torch.randn_like(exact)
    for found, wanted in zip(
        torch.autograd.grad((out * weights).sum(), inputs),
        torch.autograd.grad((exact * weights).sum(), inputs),
        strict=True,
    ):
        assert (found - wanted).norm() < bound * wanted.norm()


@pytest.mark.parametrize("tokens", [1024, 640])
@pytest.mark.parametrize("window", [None, 200])
def test_blocks_see_what_the_description_says_and_no_more(tokens, window):
    """The block mask with an offset, as context parallelism makes it, written out token by token."""
    ids = documents(2, tokens)
    for start in (0, tokens // 2, 3 * tokens // 4):
        mask = Mask(tokens - start, DEVICE, ids, cached=start)
        inputs = [x.detach() for x in drawn(tokens, torch.float32)]
        query = inputs[0][:, :, start:]
        out = softmax_attention(query, *inputs[1:], flex_blocks(mask, window))
        exact = plain(query, *inputs[1:], mask, window)
        assert (out - exact).norm() < 5e-3 * exact.norm(), start


def test_pieces_of_context_parallelism_equal_the_whole_sequence(monkeypatch):
    tokens = 8 * BLOCK
    whole = Mask(tokens, DEVICE, documents(2, tokens))
    inputs = drawn(tokens, torch.float32)
    exact = plain(*inputs, whole, None)
    for rank in range(2):
        cut = Cut(View(rank, 2), 2)
        index = cut.index(tokens, rank, whole.device)
        # what the other rank would say is at hand here
        known = {1: whole.doc_ids, 2: torch.cat(inputs[1:], -1)}
        monkeypatch.setattr(Cut, "whole", lambda self, x, dim, known=known: known[dim])
        attend = GatherKeys(softmax_attention, cut)
        mine = replace(whole, tokens=len(index), doc_ids=whole.doc_ids[:, index])
        parts = [x[:, :, index] for x in inputs]
        out = attend(*parts, attend.resolve(mine, None))
        assert (out - exact[:, :, index]).norm() < 5e-3 * exact.norm()


@needs_cuda
def test_varlen_attention_of_torch_agrees_on_documents():
    """A second reference for packed documents, and what a backend for `varlen_attn` could rely on."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    tokens = 1024
    mask = Mask(tokens, DEVICE, documents(2, tokens))
    query, key, value = drawn(tokens, torch.bfloat16)
    assert mask.doc_ids is not None
    starts = torch.ones_like(mask.doc_ids, dtype=torch.bool)
    starts[:, 1:] = mask.doc_ids[:, 1:] != mask.doc_ids[:, :-1]
    ends = F.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=starts.numel())
    edges, longest = ends.int(), int(ends.diff().max())
    rows = [
        x.repeat_interleave(HEADS // x.shape[1], 1).transpose(1, 2).flatten(0, 1) for x in (query, key, value)
    ]
    out = varlen.varlen_attn(*rows, edges, edges, longest, longest, window_size=(-1, 0))
    ours = softmax_attention(query, key, value, softmax_attention.resolve(mask, None))
    ours = ours.transpose(1, 2).flatten(0, 1)
    assert (out - ours).norm() < 2e-2 * ours.norm()


@needs_cuda
def test_plain_causal_attention_takes_the_flash_kernel():
    query, key, value = drawn(512, torch.bfloat16)
    mask = Mask(512, DEVICE)
    assert softmax_attention.resolve(mask, None) is None
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        flash = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    found = softmax_attention(query, key, value, None)
    assert (found - flash).norm() < 1e-2 * flash.norm()


@needs_cuda
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "one-query"])
def test_latent_attention_never_holds_all_scores(causal):
    """Flash kernels do not take keys of 192 and values of 128: another one must, not plain products."""
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    queries = 2048 if causal else 1
    query, key, value = (
        torch.randn(2, 16, tokens, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for tokens, width in ((queries, 192), (2048, 192), (2048, 128))
    )
    resolved = softmax_attention.resolve(Mask(queries, DEVICE, cached=2048 - queries), None)
    with sdpa_kernel(kernels):
        out = softmax_attention(query, key, value, resolved)
        out.square().sum().backward()
    assert out.shape == (2, 16, queries, 128) and query.grad.isfinite().all()


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_of_a_ring_make_what_all_keys_do(dtype, masked):
    torch.manual_seed(0)
    tensors = [torch.randn(2, 3, tokens, 72, dtype=dtype, device=DEVICE) for tokens in (40, 96, 96, 40)]
    visible = torch.rand(2, 1, 40, 96, device=DEVICE) < 0.4
    visible[..., 0], visible[:, :, :9, 48:] = True, False  # nine queries see nothing of the last block
    query, key, value, through = (x.double().requires_grad_() for x in tensors)
    scores = query @ key.transpose(-1, -2) * 0.3
    expected = (scores.masked_fill(~visible, float("-inf")) if masked else scores).softmax(-1) @ value
    wanted = [expected, *torch.autograd.grad(expected, [query, key, value], through)]
    parts = zip(*(x.split(48, 2) for x in tensors[1:3]), visible.split(48, 3), strict=True)
    blocks = [Block(tensors[0], k, v, seen if masked else None, False, 0.3) for k, v, seen in parts]
    out, lse = attend(blocks[0])
    for block in blocks[1:]:
        out, lse = joined(out.float(), lse, *(x.float() for x in attend(block)))
    of_blocks = [gradients(block, out.to(dtype), lse, tensors[3]) for block in blocks]
    found = [
        out,
        sum(one[0] for one in of_blocks),
        *(torch.cat([g[i] for g in of_blocks], 2) for i in (1, 2)),
    ]
    for mine, reference in zip(found, wanted, strict=True):
        far = (mine - reference).abs().max() / reference.abs().max()
        assert far < (2e-2 if dtype == torch.bfloat16 else 1e-4)
