import pytest
import torch
from forge_model import DecoderConfig, ModelError, Sampling, generate, initialize
from forge_model.attention.cache import Cache, LayerCache
from forge_model.attention.explicit import explicit_attention
from forge_model.attention.mask import Mask, softmax_attention
from forge_model.config import GroupedQueryConfig

VOCAB = 41


@pytest.fixture(params=[None, 4], ids=["full", "window"])
def model(request):
    attention = GroupedQueryConfig(num_heads=4, num_kv_heads=2, sliding_window=request.param)
    config = DecoderConfig(
        vocab_size=VOCAB, dim=32, num_layers=2, max_tokens=48, init_std=0.2, attention=attention
    )
    model = config.build().double()
    initialize(model, 5)
    return model


def greedy_without_cache(model, prompt, count):
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_generate_equals_full_forward_for_prompts_of_different_lengths(model):
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9], [11, 12, 13]]
    written = generate(model, prompts, 12, Sampling(temperature=0))
    assert written == [greedy_without_cache(model, p, 12) for p in prompts]


def test_generate_without_padding_equals_full_forward_and_makes_no_masks(model, monkeypatch):
    made, dense = [], Mask.dense
    monkeypatch.setattr(Mask, "dense", lambda mask, window: made.append(mask.tokens) or dense(mask, window))
    prompts = [[1, 2, 3], [9, 8, 7]]
    written = generate(model, prompts, 12, Sampling(temperature=0))
    monkeypatch.undo()
    assert written == [greedy_without_cache(model, p, 12) for p in prompts]
    assert made == []


@pytest.mark.parametrize("options", [{"softcap": 1.5}, {"sinks": True}])
@pytest.mark.parametrize("window", [None, 4])
def test_generate_with_explicit_attention_equals_full_forward(options, window):
    attention = GroupedQueryConfig(num_heads=6, num_kv_heads=2, head_dim=8, sliding_window=window, **options)
    config = DecoderConfig(
        vocab_size=VOCAB, dim=32, num_layers=2, max_tokens=48, init_std=0.2, attention=attention
    )
    model = config.build().double()
    initialize(model, 5)
    for prompts in ([[1, 2, 3], [9, 8, 7]], [[1, 2, 3, 4, 5, 6, 7], [9]], [[5]]):
        written = generate(model, prompts, 12, Sampling(temperature=0))
        assert written == [greedy_without_cache(model, p, 12) for p in prompts]


def test_one_query_reads_no_keys_before_its_window():
    query, key, value = (torch.randn(2, heads, tokens, 6) for heads, tokens in ((4, 1), (2, 9), (2, 9)))
    mask = Mask(1, query.device, cached=8)
    key[:, :, :5] = value[:, :, :5] = float("nan")
    for attend in (softmax_attention, explicit_attention):
        assert torch.isfinite(attend(query, key, value, attend.resolve(mask, 4))).all()


def test_generate_stops_each_prompt_at_its_own_stop_token(model):
    prompts = [[1, 2], [3, 4]]
    free = generate(model, prompts, 10, Sampling(temperature=0))
    stop = free[0][3]
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    seen = []
    assert generate(model, prompts, 10, Sampling(temperature=0), [stop], on_tokens=seen.append) == expected
    assert [t for t in (step[0] for step in seen) if t is not None] == expected[0]


def test_generate_repeats_itself_with_the_same_generator(model):
    runs = [generate(model, [[1]], 20, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_generate_refuses_what_does_not_fit(model):
    with pytest.raises(ModelError, match="max_tokens = 48"):
        generate(model, [[1] * 40], 9)
    with pytest.raises(ModelError, match="no tokens"):
        generate(model, [[1], []], 2)


@pytest.mark.parametrize("count", [0, -3])
def test_generate_refuses_to_write_nothing(model, count):
    with pytest.raises(ModelError, match=f"max_new_tokens = {count}; expected at least 1"):
        generate(model, [[1]], count)


@pytest.mark.parametrize("token", [VOCAB, -1])
def test_generate_refuses_tokens_that_the_model_does_not_know(model, token):
    with pytest.raises(ModelError, match=rf"tokens \[{token}\]; the model knows 0 to 40"):
        generate(model, [[1, token]], 2)


def test_generate_makes_the_logits_of_one_token_a_prompt(model):
    shapes = []
    model.head.register_forward_hook(lambda module, inputs, logits: shapes.append(tuple(logits.shape)))
    generate(model, [[1] * 30, [2] * 9], 3)
    assert shapes == [(2, 1, VOCAB)] * 3


def test_cache_refuses_documents_beside_it(model):
    cache = Cache(2, 8, torch.zeros(1, dtype=torch.int64))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ModelError, match="one document a row"):
        model(tokens, cache=cache, doc_ids=tokens)


def test_layer_cache_takes_values_of_another_width_than_keys():
    key, value = torch.randn(2, 3, 4, 6), torch.randn(2, 3, 4, 5)
    cache = LayerCache(4)
    cache.extend(key[:, :, :3], value[:, :, :3])
    all_keys, all_values = cache.extend(key[:, :, 3:], value[:, :, 3:])
    assert torch.equal(all_keys, key) and torch.equal(all_values, value)


LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), [0, 1]),
        (Sampling(top_p=0.5), [0]),
        (Sampling(top_p=0.51), [0, 1]),
        (Sampling(min_p=0.2), [0, 1, 2]),
        (Sampling(top_k=3, top_p=0.6), [0, 1]),
        (Sampling(), [0, 1, 2, 3]),
    ],
)
def test_sampling_keeps(sampling, kept):
    assert torch.isfinite(sampling.filter(LOGITS))[0].nonzero()[:, 0].tolist() == kept


@pytest.mark.parametrize("top_k", [0, 3, 7])
@pytest.mark.parametrize("top_p", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.3])
def test_sampling_keeps_what_transformers_keeps(top_k, top_p, min_p):
    pytest.importorskip("transformers")
    from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

    names = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    empty = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=4, n_head=1, vocab_size=9, n_positions=4))
    asked = GenerationConfig(do_sample=True, **names)
    chain = empty._get_logits_processor(asked, device="cpu", input_ids_seq_length=1)
    logits = 3 * torch.randn(200, 9, generator=torch.Generator().manual_seed(0))
    theirs = chain(torch.zeros(200, 1, dtype=torch.int64), logits.clone())
    assert torch.isfinite(Sampling(**names).filter(logits)).equal(torch.isfinite(theirs))


def test_sampling_follows_the_probabilities():
    generator = torch.Generator().manual_seed(0)
    drawn = Sampling().choose(LOGITS.expand(20000, -1), generator)
    share = torch.bincount(drawn, minlength=4) / 20000
    torch.testing.assert_close(share, LOGITS.exp()[0], atol=0.015, rtol=0)


def test_sampling_refuses_nonsense():
    with pytest.raises(ModelError, match="top_p"):
        Sampling(top_p=0)
