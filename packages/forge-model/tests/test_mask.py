"""The block mask of FlexAttention against every pair of tokens, and what making it costs."""

import pytest
import torch
from forge_model.attention.explicit import explicit_attention
from forge_model.attention.mask import BLOCK, LastKeys, Mask, attend_flex, flex_blocks, softmax_attention
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")


def packed(tokens: int, rows: int, longest: int) -> torch.Tensor:
    """[B, T] ids of documents of random lengths."""
    lengths = torch.randint(1, longest, (rows, tokens))
    return torch.stack([torch.arange(tokens).repeat_interleave(row)[:tokens] for row in lengths])


def kinds(blocks, rows: int, count: int) -> torch.Tensor:
    """[B, Q, K]: 0 none, 1 some, 2 all, as FlexAttention will read it."""
    found = torch.zeros(rows, count, count, dtype=torch.int64)
    listed = [
        (blocks.kv_num_blocks, blocks.kv_indices, 1),
        (blocks.full_kv_num_blocks, blocks.full_kv_indices, 2),
    ]
    for counts, indices, kind in listed:
        for row in range(rows):
            for query in range(count):
                of = min(row, len(counts) - 1)
                found[row, query, indices[of, 0, query, : counts[of, 0, query]].long()] = kind
    return found


@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize("tokens", [BLOCK, 700, 1024])
@pytest.mark.parametrize("documents", ["none", "short", "long"])
def test_flex_blocks_are_those_torch_finds_by_looking_at_every_pair(tokens, window, documents):
    from torch.nn.attention.flex_attention import create_block_mask

    rows = 1 if documents == "none" else 3
    doc_ids = None if documents == "none" else packed(tokens, rows, 20 if documents == "short" else 400)
    mask = Mask(tokens, CPU, doc_ids)
    ours = flex_blocks(mask, window)

    def visible(b, h, q, k):
        return mask.sees(b, q, k, window)

    theirs = create_block_mask(visible, rows, None, tokens, tokens, device="cpu")
    count = -(-tokens // BLOCK)
    assert torch.equal(kinds(ours, rows, count), kinds(theirs, rows, count))
    assert ours.seq_lengths == theirs.seq_lengths


def test_flex_blocks_of_documents_in_any_order_miss_no_pair():
    tokens = 640
    doc_ids = torch.randint(3, (2, tokens // 64)).repeat_interleave(64, 1)
    mask = Mask(tokens, CPU, doc_ids)
    found = kinds(flex_blocks(mask, 200), 2, tokens // BLOCK)
    pairs = mask.dense(200)[:, 0].unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    assert not (pairs.any((2, 4)) & (found == 0)).any()
    assert pairs.all(4).all(2)[found == 2].all()


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return made


def test_flex_blocks_never_hold_a_square_of_tokens():
    tokens = 4096
    doc_ids = packed(tokens, 2, 500)
    with Largest() as largest:
        flex_blocks(Mask(tokens, CPU, doc_ids), 1000)
    assert largest.elements <= max(2 * tokens, 2 * (tokens // BLOCK) ** 2 * 2)


def brute_force(mask, window):
    """[B, T, S] bool, token by token, from what the words of `Mask` say."""
    rows = 1 if mask.by_row is None else len(mask.by_row)
    total = mask.cached + mask.tokens
    seen = torch.zeros(rows, mask.tokens, total, dtype=torch.bool)
    for row in range(rows):
        for t in range(mask.tokens):
            query = mask.cached + t
            for key in range(total):
                near = window is None or (query - window < key < query + window)
                sees = near and (key <= query or not mask.causal)
                if mask.span_ids is not None:
                    span = mask.span_ids[row, query]
                    sees |= bool(span != 0 and span == mask.span_ids[row, key])
                if mask.doc_ids is not None:
                    sees &= bool(mask.doc_ids[row, query] == mask.doc_ids[row, key])
                if mask.padding is not None:
                    sees &= bool(key >= mask.padding[row]) or key == query
                seen[row, t, key] = sees
    return seen


SPANS = torch.tensor([[0, 1, 1, 1, 0, 0, -2, -2, 0, 3, 3, 3], [4, 4, 0, 0, 0, 5, 5, 5, 5, 0, 0, 0]])
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 3 + [1] * 9])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spans", [None, SPANS])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("padding", [None, torch.tensor([0, 2])])
def test_mask_is_what_its_words_say(window, causal, spans, documents, padding):
    mask = Mask(12, CPU, documents, padding=padding, span_ids=spans, causal=causal)
    assert torch.equal(mask.dense(window)[:, 0], brute_force(mask, window))
    query, key, value = torch.randn(3, 2, 2, 12, 4, dtype=torch.float64)
    for attend in (softmax_attention, explicit_attention):
        out = attend(query, key, value, attend.resolve(mask, window))
        scores = (query @ key.mT / 2).masked_fill(~brute_force(mask, window)[:, None], float("-inf"))
        torch.testing.assert_close(out, scores.softmax(-1) @ value, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_of_flex_attention_know_spans_and_later_keys(window, causal):
    from torch.nn.attention.flex_attention import flex_attention

    tokens = 400
    spans = torch.zeros(2, tokens, dtype=torch.int64)
    spans[0, 100:390], spans[1, 5:140], spans[1, 250:300] = -1, 1, 2
    documents = (torch.arange(tokens) >= 395).long().expand(2, -1)
    mask = Mask(tokens, CPU, documents, span_ids=spans, causal=causal)
    query, key, value = torch.randn(3, 2, 2, tokens, 16)
    expected = softmax_attention(query, key, value, mask.dense(window))
    out = flex_attention(query, key, value, block_mask=flex_blocks(mask, window))
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("width", "of_values"), [(8, 4), (16, 4), (24, 24)])
def test_flex_attention_is_never_given_heads_narrower_than_its_kernels(width, of_values, scale, monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    def of_kernels(query, key, value, **options):
        assert min(query.shape[-1], key.shape[-1], value.shape[-1]) >= 16
        return flex_attention(query, key, value, **options)

    monkeypatch.setattr("forge_model.attention.mask._compiled_flex", lambda: of_kernels)
    mask = Mask(200, CPU, (torch.arange(200) >= 90).long().expand(2, -1))
    (query, key), value = torch.randn(2, 2, 2, 200, width), torch.randn(2, 2, 200, of_values)
    options = {"score_mod": lambda score, *_: 2 * torch.tanh(score / 2)}
    for plain, changes in ((softmax_attention, {}), (explicit_attention, options)):
        softcap = {"softcap": 2.0} if changes else {}
        expected = plain(query, key, value, mask.dense(None), scale, **softcap)
        out = attend_flex(query, key, value, flex_blocks(mask, None), scale, **changes)
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


def test_attention_that_is_not_causal_needs_no_mask():
    mask = Mask(6, CPU, causal=False)
    assert isinstance(softmax_attention.resolve(mask, None), LastKeys)
    assert isinstance(softmax_attention.resolve(mask, 3), torch.Tensor)
