"""Rotations by several axes of positions, and none; positions that a caller gives to a cache."""

import pytest
import torch
from forge_model import DecoderConfig, ModelError, initialize
from forge_model.attention.rope import RopeTables, rope_table, rotate
from forge_model.attention.rope_config import MultiAxisRopeConfig, NoRopeConfig
from forge_model.config import GroupedQueryConfig, LatentConfig, RopeConfig

SECTIONS = (2, 3, 3)
TOKENS = torch.arange(10)[None] % 7


def built(**options):
    config = DecoderConfig(
        vocab_size=11,
        dim=32,
        num_layers=options.pop("num_layers", 2),
        max_tokens=64,
        attention=options.pop("attention", GroupedQueryConfig(num_heads=2)),
        **options,
    )
    model = config.build()
    initialize(model, 1)
    return model.double()


def test_rotation_by_axes_equals_that_of_transformers():
    qwen = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(SECTIONS)}
    text = qwen.Qwen2VLTextConfig(hidden_size=64, num_attention_heads=4, rope_parameters=parameters)
    positions = torch.randint(0, 50, (2, 3, 9))
    query = torch.randn(2, 4, 9, 16)
    cos, sin = qwen.Qwen2VLRotaryEmbedding(text)(query, positions.transpose(0, 1))
    expected, _ = qwen.apply_rotary_pos_emb(query, query, cos, sin)
    ours = rotate(query, *rope_table(MultiAxisRopeConfig(sections=SECTIONS), 16, positions))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_text_is_rotated_as_by_one_axis():
    plain, axes = built(), built(rope=MultiAxisRopeConfig(sections=SECTIONS))
    expected = plain(TOKENS)
    assert torch.equal(axes(TOKENS), expected)
    same = torch.arange(10).expand(1, 3, -1)
    torch.testing.assert_close(axes(TOKENS, positions=same), expected, rtol=0, atol=1e-12)
    moved = same.clone()
    moved[:, 1] += 3 * torch.arange(10)
    assert not torch.allclose(axes(TOKENS, positions=moved), expected)


class InterleavedConfig(MultiAxisRopeConfig):
    """Pairs that take turns, as in Qwen3-VL."""

    def axes(self, dim):
        return [pair % 3 for pair in range(dim // 2)]


def test_pairs_turn_by_the_axis_that_is_said_of_each():
    positions = torch.randint(0, 50, (2, 3, 9))
    config = InterleavedConfig(sections=SECTIONS)
    cos, _ = rope_table(config, 16, positions, torch.float64)
    frequencies = config.frequencies(16)
    for pair, axis in enumerate(config.axes(16)):
        expected = (positions[:, axis].double() * frequencies[pair]).cos()
        torch.testing.assert_close(cos[:, 0, :, pair], expected, rtol=0, atol=1e-12)


def test_no_rotation_has_no_theta():
    with pytest.raises(ValueError, match="theta = 5"):
        NoRopeConfig(theta=5.0)


def test_axes_that_do_not_fit_are_errors():
    with pytest.raises(ValueError, match=r"sections = \[2, 3\] add up to 5; .* 16 dims has 8 pairs"):
        built(rope=MultiAxisRopeConfig(sections=(2, 3)))
    three = torch.arange(10).expand(1, 3, -1)
    with pytest.raises(ModelError, match="3 axes; the rotation has one axis"):
        built()(TOKENS, positions=three)
    with pytest.raises(ModelError, match="2 axes; the rotation has 3 axes"):
        built(rope=MultiAxisRopeConfig(sections=SECTIONS))(TOKENS, positions=three[:, :2])


@pytest.mark.parametrize(
    "attention", [GroupedQueryConfig(num_heads=2), LatentConfig(num_heads=2, kv_rank=8, rope_dim=4)]
)
def test_without_rotation_the_order_of_what_was_before_does_not_matter(attention):
    turned = TOKENS.flip(1)
    turned = torch.cat([turned[:, 1:], TOKENS[:, -1:]], 1)
    model = built(attention=attention, rope=NoRopeConfig(), num_layers=1)
    torch.testing.assert_close(model(turned)[:, -1], model(TOKENS)[:, -1], rtol=0, atol=1e-12)
    rotated = built(attention=attention, num_layers=1)
    assert not torch.allclose(rotated(turned)[:, -1], rotated(TOKENS)[:, -1])


def test_cache_takes_the_positions_it_is_given_and_goes_on_from_them():
    model = built(rope=MultiAxisRopeConfig(sections=SECTIONS))
    positions = torch.randint(0, 9, (2, 3, 6))
    tokens = torch.randint(0, 11, (2, 9))
    following = torch.tensor([20, 31])[:, None] + torch.arange(3)
    whole = torch.cat([positions, following[:, None].expand(-1, 3, -1)], 2)
    expected = model(tokens, positions=whole)
    cache = model.new_cache(16, None, torch.device("cpu"))
    cache.shift = torch.tensor([20, 31]) - 6
    logits = [model.begin(tokens[:, :6], cache, positions=positions)]
    logits += [model(tokens[:, t : t + 1], cache=cache, last_logits=1)[:, -1] for t in (6, 7, 8)]
    torch.testing.assert_close(torch.stack(logits, 1), expected[:, 5:], rtol=0, atol=1e-12)


def test_cache_reads_spans_of_its_first_tokens_only():
    model = built()
    spans = torch.tensor([[1, 1, 1, 0, 0, 2, 2, 0, 0, 0]])
    cache = model.new_cache(16, None, torch.device("cpu"))
    first = model.begin(TOKENS[:, :8], cache, span_ids=spans[:, :8])
    whole = model(TOKENS, span_ids=spans)
    torch.testing.assert_close(first, whole[:, 7], rtol=0, atol=1e-12)
    assert not torch.allclose(first, model(TOKENS)[:, 7])
    with pytest.raises(ModelError, match="span_ids after a cache that has tokens"):
        model(TOKENS[:, 8:], cache=cache, span_ids=spans[:, 8:])


def test_tables_are_kept_by_their_configuration():
    tables = RopeTables()
    made = [
        tables(rope, 16, TOKENS, None, torch.float32)
        for rope in (RopeConfig(), MultiAxisRopeConfig(sections=SECTIONS), RopeConfig(theta=99.0))
    ]
    assert torch.equal(made[0][0], made[1][0]) and not torch.equal(made[0][0], made[2][0])
