"""The block mask of FlexAttention against every pair of tokens, and what making it costs."""

import pytest
import torch
from forge_model.attention.mask import BLOCK, Mask, flex_blocks
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
