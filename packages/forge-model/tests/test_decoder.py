import pytest
import torch
from forge_model import Decoder, DecoderConfig, LossConfig, ModelError, initialize
from forge_model.attention.mask import Mask, flex_blocks, softmax_attention
from forge_model.attention.rope import rope_table
from forge_model.config import (
    GroupedQueryConfig,
    LayerNormConfig,
    MLPConfig,
    ResidualBlockConfig,
    RMSNormConfig,
    RopeConfig,
)

VOCAB = 61
CPU = torch.device("cpu")


def build(dtype=torch.float64, **options) -> Decoder:
    attention = options.pop("attention", GroupedQueryConfig(num_heads=4, num_kv_heads=2))
    config = DecoderConfig(
        vocab_size=VOCAB, dim=32, num_layers=2, max_tokens=64, attention=attention, **options
    )
    model = config.build()
    initialize(model, 0)
    return model.to(dtype)


def test_decoder_is_causal():
    model = build()
    tokens = torch.randint(VOCAB, (2, 20))
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def test_decoder_masked_documents_equal_documents_alone():
    model = build()
    lengths = [5, 9, 6]
    tokens = torch.randint(VOCAB, (1, sum(lengths)))
    doc_ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(tokens, doc_ids=doc_ids, positions=positions)
    alone = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)


def test_decoder_sliding_window_equals_brute_force():
    model = build(attention=GroupedQueryConfig(num_heads=4, sliding_window=3))
    query, key, value = torch.randn(3, 1, 4, 10, 8, dtype=torch.float64)
    out = softmax_attention(query, key, value, softmax_attention.resolve(Mask(10, CPU), 3))
    for t in range(10):
        seen = slice(max(0, t - 2), t + 1)
        weight = (query[:, :, t : t + 1] @ key[:, :, seen].mT / 8**0.5).softmax(-1)
        torch.testing.assert_close(out[:, :, t : t + 1], weight @ value[:, :, seen])
    tokens = torch.randint(VOCAB, (1, 20))
    far = tokens.clone()
    far[0, 0] = (far[0, 0] + 1) % VOCAB
    # two layers of window 3 see four tokens back, not more
    assert torch.equal(model(tokens)[0, 5:], model(far)[0, 5:])
    assert not torch.equal(model(tokens)[0, 4], model(far)[0, 4])


@pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile"
)  # eager is the reference here
def test_attend_flex_equals_masked_sdpa():
    query, key, value = torch.randn(3, 2, 2, 128, 16)
    doc_ids = torch.arange(128).div(40, rounding_mode="floor").expand(2, -1)
    mask = Mask(128, CPU, doc_ids)
    masked = softmax_attention(query, key, value, softmax_attention.resolve(mask, 30))
    from torch.nn.attention.flex_attention import flex_attention

    blocks = flex_blocks(mask, 30)
    torch.testing.assert_close(flex_attention(query, key, value, block_mask=blocks), masked)


def test_attend_grouped_equals_repeated_heads():
    query = torch.randn(2, 6, 9, 8)
    key, value = torch.randn(2, 2, 2, 9, 8)
    grouped = softmax_attention(query, key, value, None)
    repeated = softmax_attention(query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1), None)
    torch.testing.assert_close(grouped, repeated)


def test_decoder_refuses_sequences_that_are_too_long():
    with pytest.raises(ModelError, match="65 tokens is longer than max_tokens = 64"):
        build()(torch.zeros(1, 65, dtype=torch.int64))


@pytest.mark.parametrize("tied", [False, True])
def test_decoder_loss_equals_cross_entropy_of_its_logits(tied):
    model = build(tie_embeddings=tied)
    tokens, labels = torch.randint(VOCAB, (2, 2, 15))
    labels[0, :4] = -100
    terms = model(tokens, labels=labels, loss_fn=LossConfig(chunk_tokens=7).build())
    expected = torch.nn.functional.cross_entropy(
        model(tokens).flatten(0, 1), labels.flatten(), reduction="sum"
    )
    torch.testing.assert_close(terms.total, expected)
    ours = torch.autograd.grad(terms.total, list(model.parameters()))
    theirs = torch.autograd.grad(expected, list(model.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert terms.sums["loss"].count == 26


def test_decoder_wants_a_loss_with_labels():
    with pytest.raises(ModelError, match="loss_fn"):
        build()(torch.zeros(1, 4, dtype=torch.int64), labels=torch.zeros(1, 4, dtype=torch.int64))


def test_decoder_with_other_parts_has_their_parameters():
    model = build(norm=LayerNormConfig(bias=True), ffn=MLPConfig(activation="relu2", bias=True))
    names = dict(model.named_parameters())
    assert {"norm.bias", "layers.1.ffn.w_up.bias"} <= names.keys()
    assert "layers.0.ffn.w_gate.weight" not in names
    assert torch.isfinite(model(torch.zeros(1, 4, dtype=torch.int64))).all()


@pytest.mark.parametrize(
    ("options", "needle"),
    [
        ({"num_heads": 4, "num_kv_heads": 3}, "does not divide"),
        ({"num_heads": 2, "head_dim": 7}, "odd"),
        ({"num_heads": 2, "head_dim": 8, "rope_dim": 3}, "rope_dim = 3 is odd"),
    ],
)
def test_attention_config_refuses_impossible_heads(options, needle):
    with pytest.raises(ValueError, match=needle):
        GroupedQueryConfig(**options)


def test_key_value_heads_follow_the_given_heads():
    assert GroupedQueryConfig(num_heads=64).kv_heads == 64


def test_decoder_trains_after_it_was_used_in_inference_mode():
    model = build()
    tokens = torch.randint(VOCAB, (1, 8))
    with torch.inference_mode():
        model(tokens)
    model(tokens).sum().backward()
    assert model.embed.weight.grad is not None


def test_decoder_keeps_the_tables_of_each_number_format():
    model = build()
    tokens = torch.randint(VOCAB, (1, 30))
    exact = model(tokens)
    torch.testing.assert_close(model.float()(tokens), exact.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.double()(tokens), exact, rtol=0, atol=0)


@pytest.mark.parametrize("parallel", [True, False])
def test_residual_connections_equal_those_written_out(parallel):
    model = build(block=ResidualBlockConfig(parallel=parallel, scale=0.3)).double()
    tokens = torch.randint(VOCAB, (2, 9))
    x = model.embed(tokens)
    contexts = model._contexts(model._tables(Mask(9, x.device), tokens, None, x.dtype), None, {})
    for block, context in zip(model.layers.values(), contexts, strict=True):
        attended = block.attention(block.attention_norm(x), context.rope, context.mask)
        between = x if parallel else x + 0.3 * attended
        x = x + 0.3 * attended + 0.3 * block.ffn(block.ffn_norm(between))
    torch.testing.assert_close(model(tokens), model.head(model.norm(x)))


@pytest.mark.parametrize("pairs", [True, False])
def test_part_of_a_head_is_rotated_as_complex_numbers_are(pairs):
    config = GroupedQueryConfig(num_heads=2, head_dim=10, rope_dim=6, rope_pairs=pairs)
    attention = config.build(20, RMSNormConfig())
    query, key = torch.randn(2, 1, 2, 7, 10, dtype=torch.float64)
    rope = rope_table(RopeConfig(), config.rotary_dim(20), torch.arange(7), torch.float64)

    def turned(x):
        first, second = (x[..., 0:6:2], x[..., 1:6:2]) if pairs else (x[..., :3], x[..., 3:6])
        angle = torch.arange(7)[:, None] * 10000.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
        return torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)

    plain = query[..., 6:] @ key[..., 6:].mT
    expected = plain + (turned(query) @ turned(key).conj().mT).real
    torch.testing.assert_close(attention.rotated(query, rope) @ attention.rotated(key, rope).mT, expected)
    assert attention.rotated(query, None) is query


def test_divided_logits_are_those_without_divided_and_so_is_their_loss():
    model, plain = build(logit_divisor=4.0).double(), build().double()
    plain.load_state_dict(model.state_dict())
    tokens = torch.randint(VOCAB, (2, 9))
    torch.testing.assert_close(model(tokens), plain(tokens) / 4)
    labels = torch.randint(VOCAB, (2, 9))
    terms = model(tokens, labels=labels, loss_fn=LossConfig().build())
    expected = torch.nn.functional.cross_entropy((plain(tokens) / 4).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(terms.total.double() / 18, expected)


def test_rotated_part_wider_than_a_head_is_refused():
    with pytest.raises(ValueError, match="rope_dim = 12 of heads that are 10 wide"):
        DecoderConfig(
            vocab_size=8, dim=20, num_layers=1, attention=GroupedQueryConfig(num_heads=2, rope_dim=12)
        )
