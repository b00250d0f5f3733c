"""Capture on our own decoder, against plain hooks and attention written out from its projections.

B batch, T tokens, N heads, K kv heads, S keys, H head dim.
"""

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from forge_interp import InterpError, activation_patching, capture, edit
from forge_model import DecoderConfig, LossConfig, initialize
from forge_model.attention.cache import Cache
from forge_model.attention.mask import Mask
from forge_model.attention.rope import rope_table, rotate
from forge_model.config import GroupedQueryConfig
from forge_model.moe.config import MoEConfig

VOCAB, LENGTH, LAYERS = 61, 11, 3
CASES = {
    "grouped": {"num_kv_heads": 2},
    "multi_query_normalized": {"num_kv_heads": 1, "qk_norm": True},
    "sliding_window": {"num_kv_heads": 2, "sliding_window": 4},
}
ATTENTION = ("q", "k", "v", "raw", "scores", "pattern", "z")
BLOCKS = ["layers.*:in", "layers.*:out", "layers.*.attention:out", "layers.*.ffn:in"]
EXACT = {"rtol": 0, "atol": 1e-12}
EVERY = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def build(case="grouped"):
    """Float64, weights large enough for patterns far from uniform."""
    attention = GroupedQueryConfig(num_heads=4, **CASES[case])
    config = DecoderConfig(vocab_size=VOCAB, dim=32, num_layers=LAYERS, max_tokens=64, attention=attention)
    model = config.build()
    initialize(model, 0)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    return model.double().eval()


def tokens():
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def two_documents():
    return torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2])


@contextmanager
def plain_hooks(model):
    """What plain hooks see at `BLOCKS`, by site."""
    seen, handles = {}, []

    def note(name, module, args, output):
        seen.update({f"{name}:in": args[0].clone(), f"{name}:out": output.clone()})

    for i in range(LAYERS):
        for name in (f"layers.{i}", f"layers.{i}.attention", f"layers.{i}.ffn"):
            handles.append(model.get_submodule(name).register_forward_hook(partial(note, name)))
    yield seen
    for handle in handles:
        handle.remove()


def written_out(model, layer, x, visible):
    """q, k, v, raw, scores, pattern, z of a layer's attention whose input is x, from its projections."""
    attention = model.layers[str(layer)].attention
    q, k, v = (
        w(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for w in (attention.wq, attention.wk, attention.wv)
    )
    if attention.q_norm is not None:
        q, k = attention.q_norm(q), attention.k_norm(k)
    table = rope_table(model.config.rope, attention.head_dim, torch.arange(x.shape[1]), torch.float64)
    q, k = rotate(q, *table), rotate(k, *table)
    each_k, each_v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    raw = torch.einsum("bnth,bnsh->bnts", q, each_k) / attention.head_dim**0.5
    scores = raw.masked_fill(~visible, -torch.inf)
    pattern = scores.softmax(-1)
    return dict(zip(ATTENTION, (q, k, v, raw, scores, pattern, pattern @ each_v), strict=True))


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(got[key], value), key


@EVERY
def test_blocks_equal_plain_hooks_of_the_same_run(case):
    model = build(case)
    with plain_hooks(model) as expected, capture(model, BLOCKS) as acts:
        model(tokens())
    assert len(acts) == 4 * LAYERS
    assert_equal(dict(acts), {key: expected[key] for key in acts})


@pytest.mark.parametrize("doc_ids", [None, two_documents()], ids=["one_document", "two_documents"])
@EVERY
def test_attention_equals_that_written_out(case, doc_ids):
    model = build(case)
    sites = [f"layers.*.attention:attn.{part}" for part in ATTENTION]
    with capture(model, [*sites, "layers.*.attention:in"]) as acts:
        model(tokens(), doc_ids=doc_ids)
    visible = Mask(LENGTH, torch.device("cpu"), doc_ids).dense(CASES[case].get("sliding_window"))
    assert len(acts) == LAYERS * (len(ATTENTION) + 1)
    for layer in range(LAYERS):
        name = f"layers.{layer}.attention"
        for part, expected in written_out(model, layer, acts[f"{name}:in"], visible).items():
            torch.testing.assert_close(acts[f"{name}:attn.{part}"], expected, **EXACT, msg=f"{name}.{part}")


@EVERY
def test_pattern_of_each_decoding_step_is_a_row_of_the_full_pattern(case):
    model, prompt = build(case), tokens()
    site = "layers.1.attention:attn.pattern"
    with capture(model, site) as full:
        model(prompt)
    cache = Cache(LAYERS, LENGTH, padding=torch.zeros(2, dtype=torch.long))
    with capture(model, site) as acts:
        model(prompt[:, :8], cache=cache)
        for step in range(8, LENGTH):
            model(prompt[:, step : step + 1], cache=cache)
    assert list(acts) == [site, *(f"{site}#{call}" for call in range(1, LENGTH - 7))]
    for call, step in enumerate(range(8, LENGTH), start=1):
        row = full[site][:, :, step : step + 1, : step + 1]
        torch.testing.assert_close(acts[f"{site}#{call}"], row, **EXACT)


@EVERY
def test_stop_gives_the_values_of_a_full_run(case):
    model = build(case)
    sites = ["layers.0:out", "layers.1.attention:attn.pattern"]
    with capture(model, sites) as full:
        assert model(tokens()) is not None
    with capture(model, sites, stop=True) as acts, plain_hooks(model) as ran:
        assert model(tokens()) is None
    assert_equal(dict(acts), dict(full))
    assert "layers.1:out" not in ran and "layers.0:out" in ran


def test_loss_inside_a_capture_is_that_without_it_and_its_sites_are_found():
    model, labels = build(), tokens().roll(-1, 1)
    loss_fn = LossConfig().build()
    expected = model(tokens(), labels=labels, loss_fn=loss_fn)
    with capture(model, ["head:in", "head:kw.labels", "layers.*:kw.x"]) as acts:
        got = model(tokens(), labels=labels, loss_fn=loss_fn)
    assert str(got) == str(expected)
    assert torch.equal(acts["head:kw.labels"], labels)
    assert torch.equal(acts["head:in"], model.norm(build_hidden(model)))


def build_hidden(model):
    with plain_hooks(model) as seen:
        model(tokens())
    return seen[f"layers.{LAYERS - 1}:out"]


class Counter:
    """A compiler that changes nothing and counts runs of what it compiled."""

    def __init__(self):
        self.compiled = self.ran = 0

    def __call__(self, graph, inputs):
        self.compiled += 1

        def run(*args):
            self.ran += 1
            return graph(*args)

        return run


def compile_whole(model, backend):
    return torch.compile(model, backend=backend)


def compile_in_place(model, backend):
    model.compile(backend=backend)
    return model


def compile_blocks(model, backend):
    for block in model.layers.values():
        block.compile(backend=backend)
    return model


@pytest.mark.parametrize("compiled", [compile_whole, compile_in_place, compile_blocks])
def test_capture_after_compiled_runs_sees_everything_and_leaves_them_compiled(compiled):
    sites = [*BLOCKS, *(f"layers.*.attention:attn.{part}" for part in ATTENTION), ":out"]
    plain = build()
    with capture(plain, sites) as expected:
        plain(tokens())
    counter = Counter()
    model = compiled(build(), counter)
    for _ in range(3):  # the second run finds the table of rotations kept by the first, and compiles again
        ran = counter.ran
        model(tokens())
    before, a_pass = (counter.compiled, counter.ran), counter.ran - ran
    assert a_pass > 0
    with capture(model, sites) as acts:
        model(tokens())
    with capture(model, sites[:1], stop=True) as stopped:
        assert model(tokens()) is None
    assert (counter.compiled, counter.ran) == before
    assert_equal(dict(acts), dict(expected))
    assert_equal(dict(stopped), {key: expected[key] for key in stopped})
    model(tokens())
    assert (counter.compiled, counter.ran) == (before[0], before[1] + a_pass)
    torch.compiler.reset()


def test_attention_request_is_an_error_where_the_module_does_not_attend():
    model = build()
    with (
        pytest.raises(InterpError, match="scaled_dot_product_attention"),
        capture(model, "layers.*.ffn:attn.pattern"),
    ):
        model(tokens())


@pytest.mark.parametrize("ending", ["normal", "stop", "raise"])
def test_nothing_is_left_behind(ending):
    model = build()
    sites = [*BLOCKS, "layers.*.attention:attn.z"]
    error = pytest.raises(RuntimeError) if ending == "raise" else nullcontext()
    with error, capture(model, sites, stop=ending == "stop"):
        model(tokens())
        if ending == "raise":
            raise RuntimeError
    for module in model.modules():
        assert not any(
            value for key, value in vars(module).items() if "hooks" in key and isinstance(value, dict)
        )
        assert "forward" not in vars(module)


CAPPED = {"softcap": {"softcap": 2.0}, "sinks": {"sinks": True}, "both": {"softcap": 2.0, "sinks": True}}


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("case", CAPPED)
def test_attention_with_a_cap_or_sinks_is_seen_on_a_cpu(case, window):
    CASES[case] = {"num_kv_heads": 2, "sliding_window": window, **CAPPED[case]}
    model, ids, seen = build(case), tokens(), {}
    for i, layer in enumerate(model.layers.values() if hasattr(model.layers, "values") else model.layers):
        layer.attention.wo.register_forward_pre_hook(
            lambda module, args, i=i: seen.update({i: args[0].unflatten(-1, (4, -1)).transpose(1, 2)})
        )
    with capture(model, ["layers.*.attention:attn.pattern", "layers.*.attention:attn.v"]) as acts:
        model(ids)
    with capture(model, "layers.*.attention:attn.z") as of_z:
        model(ids)
    for i in range(LAYERS):
        z, v = of_z[f"layers.{i}.attention:attn.z"], acts[f"layers.{i}.attention:attn.v"]
        torch.testing.assert_close(z, seen[i], **EXACT)
        pattern = acts[f"layers.{i}.attention:attn.pattern"]
        torch.testing.assert_close(pattern @ v.repeat_interleave(2, 1), z, **EXACT)
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        hidden = ~(hidden if window is None else hidden.triu(1 - window))
        assert (pattern[..., hidden] == 0).all()
        total = pattern.sum(-1)
        assert (total < 1).all() if "sinks" in CAPPED[case] else torch.allclose(total, torch.ones_like(total))


@pytest.fixture
def flex(monkeypatch):
    """Have FlexAttention compute on this device what it computes on a GPU; the list has each call of it."""
    from forge_model.attention import explicit, mask

    calls, attend = [], mask.attend_flex
    for module in (mask, explicit):
        monkeypatch.setattr(module, "suits_flex", lambda given: True)
        monkeypatch.setattr(module, "attend_flex", lambda *a, **k: calls.append(a) or attend(*a, **k))
    return calls


FLEX = ["layers.*:out", *(f"layers.*.attention:attn.{part}" for part in (*ATTENTION, "entropy", "sink"))]
quietly = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def wide(case):
    """Heads as wide as FlexAttention's kernels, which else add zeros to queries, keys and values."""
    attention = GroupedQueryConfig(num_heads=4, **{"num_kv_heads": 2} | case)
    config = DecoderConfig(vocab_size=VOCAB, dim=64, num_layers=2, max_tokens=512, attention=attention)
    model = config.build()
    initialize(model, 0)
    return model.double().eval()


@quietly
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("length", [LENGTH, 200])
def test_flex_attention_of_documents_is_seen_as_that_by_a_dense_mask(request, window, length):
    model, ids = wide({"sliding_window": window}), torch.randint(VOCAB, (2, length))
    docs = torch.arange(length) // 4 + torch.tensor([[0], [1]]) * (torch.arange(length) > 7)
    with capture(model, FLEX) as expected:
        model(ids, doc_ids=docs)
    calls = request.getfixturevalue("flex")
    with capture(model, FLEX) as acts:
        model(ids, doc_ids=docs)
    assert len(calls) == 2 and list(acts) == list(expected)
    for site, value in expected.items():
        torch.testing.assert_close(acts[site], value, **EXACT, equal_nan=True, msg=site)


@quietly
@pytest.mark.parametrize("part", ["q", "v", "raw", "scores", "pattern", "z"])
def test_edits_of_flex_attention_are_those_of_a_dense_mask(request, part):
    model, ids, docs = wide({}), tokens(), two_documents()
    scaled = {
        f"layers.*.attention:attn.{part}": lambda x: x * torch.linspace(0.5, 1, x.shape[1])[:, None, None]
    }
    with edit(model, scaled):
        expected = model(ids, doc_ids=docs)
    assert not torch.allclose(expected, model(ids, doc_ids=docs))
    request.getfixturevalue("flex")
    with edit(model, scaled):
        torch.testing.assert_close(model(ids, doc_ids=docs), expected, **EXACT)


@quietly
@pytest.mark.parametrize("case", CAPPED)
def test_flex_attention_with_a_cap_or_sinks_is_refused_where_asked_for_alone(flex, case):
    model, ids, docs = wide(CAPPED[case]), tokens(), two_documents()
    for site in ("layers.0.attention:attn.pattern", "layers.0.attention:attn.z"):
        with pytest.raises(InterpError, match=r"log-sum-exp|score_mod"), capture(model, site):
            model(ids, doc_ids=docs)
    with capture(model, "layers.1:out") as plain:
        model(ids, doc_ids=docs)
    with (
        pytest.raises(InterpError, match="FlexAttention"),
        capture(model, ["layers.1:out", "head:attn.z"]) as acts,
    ):
        model(ids, doc_ids=docs)
    assert torch.equal(acts["layers.1:out"], plain["layers.1:out"])


@EVERY
def test_patching_of_several_places_at_once_equals_whole_passes(case):
    model, clean = build(case), {"tokens": tokens()}
    corrupted = {"tokens": tokens().flip(1)}

    def metric(logits):
        return (logits[:, -1, 3] - logits[:, -1, 7]).mean()

    ways = [("layers.*:out", "positions"), ("layers.*.attention:attn.z", "heads"), (["norm", *BLOCKS], None)]
    for sites, where in ways:
        run = partial(activation_patching, model, clean, corrupted, sites, metric, where=where)
        whole = run().values
        assert whole.max() - whole.min() > 1e-3
        for at_once in (1, 4):
            assert abs(run(at_once=at_once).values - whole).max() < 1e-12


def test_patching_of_several_places_refuses_experts_with_a_capacity():
    ffn = MoEConfig(num_experts=4, top_k=1, dim=16, capacity_factor=0.5)
    options = {"attention": GroupedQueryConfig(num_heads=2), "ffn": ffn, "init_std": 0.4}
    model = DecoderConfig(vocab_size=VOCAB, dim=32, num_layers=2, max_tokens=64, **options).build().double()
    initialize(model, 0)
    run = partial(activation_patching, model, tokens(), tokens().flip(1), "layers.0:in", where="positions")
    with pytest.raises(InterpError, match="experts with a capacity"):
        run(metric=lambda logits: logits[:, -1, 3].mean(), at_once=3)
