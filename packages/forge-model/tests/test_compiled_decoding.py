import pytest
import torch
from forge_model import DecoderConfig, ModelError, Sampling, generate, initialize
from forge_model.config import GroupedQueryConfig, LatentConfig, MoEConfig, SwiGLUConfig
from forge_model.generation import compiled as compiled_decoding
from torch._dynamo.testing import CompileCounter

VOCAB = 41
ALIKE, PADDED = [[1, 2, 3], [9, 8, 7]], [[1, 2, 3, 4, 5, 6, 7], [9], [11, 12, 13]]


def built(**options):
    config = DecoderConfig(
        **{"vocab_size": VOCAB, "dim": 32, "num_layers": 2, "max_tokens": 160, "init_std": 0.2} | options
    )
    model = config.build().double().eval()
    initialize(model, 5)
    return model


def attending(**options):
    return {"attention": GroupedQueryConfig(num_heads=4, num_kv_heads=2, head_dim=8, **options)}


MODELS = {
    "full": attending(),
    "window": attending(sliding_window=4),
    "sinks": attending(sinks=True),
    "softcap-window": attending(softcap=1.5, sliding_window=4),
    "latent": {"attention": LatentConfig(num_heads=4, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=5)},
    "soft-capped-logits": attending() | {"logit_softcap": 2.0},
}


@pytest.fixture
def counter(monkeypatch):
    """Only what is traced counts here: the code is run as it was traced, without a C++ compiler."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(compiled_decoding._logits, backend=counter, dynamic=False, fullgraph=True)
    monkeypatch.setattr(compiled_decoding, "_compiled", lambda: compiled)
    return counter


def greedy(model, prompts, new, **options):
    return generate(model, prompts, new, Sampling(temperature=0), **options)


@pytest.mark.parametrize("prompts", [ALIKE, PADDED], ids=["alike", "padded"])
@pytest.mark.parametrize("kind", MODELS)
def test_compiled_decoding_writes_what_plain_decoding_writes(kind, prompts, counter):
    model = built(**MODELS[kind])
    assert greedy(model, prompts, 12, compiled=True) == greedy(model, prompts, 12)
    assert counter.frame_count == 1


def test_prompts_and_answers_of_other_lengths_share_what_is_compiled(counter):
    model = built()
    for prompt, new in ((3, 9), (20, 40), (1, 100)):
        assert greedy(model, [[5] * prompt], new, compiled=True) == greedy(model, [[5] * prompt], new)
    assert counter.frame_count == 1


@torch._dynamo.config.patch(recompile_limit=2)
def test_more_shapes_are_compiled_than_torch_would_by_itself(counter):
    model = built()
    for batch in (1, 2, 3, 4):
        prompts = [[5, 6]] * batch
        assert greedy(model, prompts, 3, compiled=True) == greedy(model, prompts, 3)
    assert counter.frame_count == 4


def test_compiled_decoding_fills_all_the_room_of_a_model(counter):
    model = built()
    assert greedy(model, [[7] * 30], 130, compiled=True) == greedy(model, [[7] * 30], 130)
    with pytest.raises(ModelError, match="max_tokens = 160"):
        greedy(model, [[7] * 30], 131, compiled=True)


def test_compiled_decoding_draws_the_same_tokens_and_stops_alike(counter):
    model = built()

    def drawn(stop, compiled):
        drawing = torch.Generator().manual_seed(3)
        return generate(model, PADDED, 30, Sampling(0.9, top_k=9), stop, drawing, compiled=compiled)

    stop = drawn([], False)[0][5:6]
    plain = drawn(stop, False)
    assert drawn(stop, True) == plain
    assert len({len(row) for row in plain}) > 1


def test_machine_without_a_compiler_is_told_so(monkeypatch):
    def none_found(graph, inputs):
        raise OSError("no compiler for C++")

    torch._dynamo.reset()
    compiled = torch.compile(compiled_decoding._logits, backend=none_found, dynamic=False)
    monkeypatch.setattr(compiled_decoding, "_compiled", lambda: compiled)
    with pytest.raises(ModelError, match="cannot be compiled here, go on without: no compiler for C"):
        greedy(built(), ALIKE, 3, compiled=True)


@pytest.mark.slow
@pytest.mark.parametrize("ffn", [SwiGLUConfig(), MoEConfig(num_experts=4, top_k=2)], ids=["dense", "experts"])
def test_the_compiler_of_torch_writes_the_same(ffn):
    torch._dynamo.reset()
    model = built(ffn=ffn)
    assert greedy(model, PADDED, 6, compiled=True) == greedy(model, PADDED, 6)


def test_one_of_speculative_and_compiled():
    with pytest.raises(ModelError, match="one of both"):
        greedy(built(), ALIKE, 3, speculative=True, compiled=True)
