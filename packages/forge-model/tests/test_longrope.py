"""LongRoPE, whose frequencies follow from the length of a sequence: batches, documents, caches, refusals."""

import pytest
import torch
from forge_model import DecoderConfig, ModelError
from forge_model.attention.config import GroupedQueryConfig
from forge_model.attention.rope import row_positions, sequence_lengths
from forge_model.attention.rope_config import LongRopeConfig
from forge_model.ffn.config import SwiGLUConfig
from forge_model.generation.generate import Sampling, generate
from forge_model.init import initialize

BORDER = 12


def config(**options):
    return DecoderConfig(
        **{
            "vocab_size": 61, "dim": 32, "num_layers": 2, "max_tokens": 40, "ffn": SwiGLUConfig(dim=48),
            "attention": GroupedQueryConfig(num_heads=4),
            "rope": LongRopeConfig(
                theta=50.0, original_max_tokens=BORDER, factor=4.0, short_factors=(1.0, 1.1, 1.5, 2.0), 
                long_factors=(1.5, 4.0, 9.0, 20.0),
            ),
        }
        | options
    )  # fmt: skip


@pytest.fixture
def model():
    made = config().build()
    initialize(made, 1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter *= 3
    return made.double().eval()


def test_sequence_lengths_agree_with_a_walk():
    rows = [[3, 1, 8], [12], [1, 1, 10], [5, 7]]
    positions = torch.tensor([[p for size in row for p in range(size)] for row in rows])
    expected = [[size for size in row for _ in range(size)] for row in rows]
    assert sequence_lengths(positions).tolist() == expected
    assert sequence_lengths(torch.tensor([[7, 8], [0, 0]])).tolist() == [[9, 9], [1, 1]], "after a cache"


def test_packed_documents_turn_as_each_alone(model):
    sizes = [5, BORDER, BORDER + 1, 2]
    tokens = torch.randint(61, (1, sum(sizes)))
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[None]
    packed = model(tokens, positions=positions, doc_ids=ids)
    alone = torch.cat([model(part) for part in tokens.split(sizes, 1)], 1)
    assert (packed - alone).abs().max() < 1e-12
    assert (packed - model(tokens, positions=positions * 0 + 1, doc_ids=ids)).abs().max() > 1e-3


def test_rows_with_padding_turn_as_each_alone(model):
    sizes = [5, BORDER, BORDER + 1, 20]
    tokens = torch.randint(61, (len(sizes), 20))
    rows = model(tokens, positions=row_positions(torch.tensor(sizes), 20))
    for row, known, size in zip(rows, tokens, sizes, strict=True):
        assert (row[:size] - model(known[None, :size])[0]).abs().max() < 1e-12, size
    assert (model(tokens)[0, :5] - rows[0, :5]).abs().max() > 1e-3, "padding that counts"


@pytest.mark.parametrize("prompts", [[[1, 2, 3]], [[5] * 9, [4, 2]], [list(range(BORDER + 3)), [7, 8]]])
def test_generation_across_the_border_equals_full_forward_passes(model, prompts):
    for prompt, new in zip(prompts, generate(model, prompts, 20, Sampling(temperature=0)), strict=True):
        known = list(prompt)
        for token in new:
            assert model(torch.tensor([known]))[0, -1].argmax() == token, len(known)
            known.append(token)


def test_a_cache_that_is_not_made_anew_at_the_border_would_be_wrong(model):
    tokens = torch.randint(61, (1, BORDER + 1))
    cache = model.new_cache(40, None, tokens.device)
    model.begin(tokens[:, :-1], cache)
    kept = model.writer(tokens[:, -1:], cache=cache, last_logits=1)[:, -1]
    assert (kept - model(tokens)[:, -1]).abs().max() > 1e-3


def test_what_longrope_cannot_do_is_refused_by_name(model):
    with pytest.raises(ValueError, match=r"rope\.short_factors has 3 numbers.* has 4 pairs"):
        config(rope=LongRopeConfig(short_factors=(1.0,) * 3, long_factors=(1.0,) * 4, factor=2.0))
    with pytest.raises(ValueError, match=r"set mesh\.cp = 1, or model\.max_tokens = 12"):
        config().require_axes(1, 2, False, "ring")
    config(max_tokens=BORDER).require_axes(1, 2, False, "ring")
    with pytest.raises(ModelError, match="would cross 12 tokens"):
        generate(model, [[1, 2]], 20, inputs={"span_ids": torch.zeros(1, 2, dtype=torch.long)})
