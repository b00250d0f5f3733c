"""Capture on plain models, however they are run: transformed, compiled, exported, in other modes and threads.

B batch, T tokens, N heads, D model dim.
"""

import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from forge_interp import InterpError, ablate, capture, edit
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

B, T, N, D = 2, 6, 2, 8
ATTENTION = ("q", "k", "v", "raw", "scores", "pattern", "z", "entropy", "sink", "previous")
SITES = [
    "blocks.*:in",
    "blocks.*",
    "blocks.*.mlp.0:in",
    ":out",
    *(f"blocks.*.attention:attn.{part}" for part in ATTENTION),
]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, N, -1)).movedim(-3, 0).transpose(-2, -3)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def model() -> Tower:
    torch.manual_seed(0)
    return Tower().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))


def seen(model: nn.Module, run: Callable[[], object], sites=SITES, **options) -> dict[str, Tensor]:
    with capture(model, sites, **options) as acts:
        run()
    return dict(acts)


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor], **tolerance) -> None:
    assert got.keys() == expected.keys()
    tolerance = tolerance or {"rtol": 0, "atol": 0}
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, **tolerance, equal_nan=True, msg=key)


def test_pattern_is_softmax_of_the_projections(model, x):
    acts = seen(model, lambda: model(x))
    for block in (0, 1):
        q, k, _ = (
            model.blocks[block].attention.qkv(acts[f"blocks.{block}:in"]).unflatten(-1, (3, N, -1)).unbind(2)
        )
        scores = torch.einsum("btnh,bsnh->bnts", q, k) / (D // N) ** 0.5
        expected = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)
        torch.testing.assert_close(acts[f"blocks.{block}.attention:attn.pattern"], expected)
    assert len(acts) == 2 * 3 + 1 + 2 * len(ATTENTION)


def test_functional_call_is_seen_with_the_weights_it_was_given(model, x):
    doubled = {name: 2 * p for name, p in model.state_dict().items()}
    got = seen(model, lambda: functional_call(model, doubled, (x,)))
    other = Tower().eval()
    other.load_state_dict(doubled)
    assert_equal(got, seen(other, lambda: other(x)))
    with capture(model, "blocks.0", stop=True) as acts:
        assert functional_call(model, doubled, (x,)) is None
    assert torch.equal(acts["blocks.0"], got["blocks.0:out"])


@pytest.mark.parametrize(
    "site", ["blocks.1:in", "blocks.0", "blocks.0.attention:attn.q", "blocks.0.attention:attn.pattern"]
)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "jacrev"])
def test_values_that_live_inside_of_a_function_transform_are_an_error(model, x, transform, site):
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, weights, (x,)).square().mean()

    run = {
        "vmap": lambda: torch.func.vmap(model)(x[None]),
        "grad": lambda: torch.func.grad(loss)(weights, x),
        "jvp": lambda: torch.func.jvp(lambda x: loss(weights, x), (x,), (torch.ones_like(x),)),
        "jacrev": lambda: torch.func.jacrev(lambda x: loss(weights, x))(x),
    }[transform]
    with (
        sdpa_kernel(SDPBackend.MATH),  # the others know no forward-mode derivative on a CPU
        pytest.raises(InterpError, match=r"torch\.func"),
        capture(model, site),
    ):
        run()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_module_is_an_error_and_what_is_around_it_is_seen(model, x):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(D, D), nn.ReLU()))
    outer = nn.Sequential(model, scripted, nn.Tanh())
    for _ in range(2):
        for site in ("1", "1.0:in", "1.1"):
            with pytest.raises(InterpError, match="TorchScript"), capture(outer, site):
                outer(x)
    acts = seen(outer, lambda: outer(x), ["0.blocks.1", "2:in", ":out"])
    assert torch.equal(acts["2:in"], scripted(acts["0.blocks.1:out"]))
    assert torch.equal(acts[":out"], outer(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad, nullcontext])
def test_values_are_the_same_in_every_gradient_mode(model, x, mode):
    expected = seen(model, lambda: model(x))

    def run() -> None:
        with mode():
            model(x)

    assert_equal(seen(model, run), expected)
    with mode():
        acts = seen(model, lambda: model(x))
    assert_equal(acts, expected)
    probe = nn.Linear(D, 1)
    probe(acts["blocks.0:out"]).sum().backward()  # what was captured can be trained on
    assert probe.weight.grad.any()


def test_autocast_is_recorded_in_the_dtype_of_each_operation(model, x):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        acts = seen(model, lambda: model(x))
    assert acts["blocks.0.attention:attn.q"].dtype == torch.bfloat16
    assert acts["blocks.0.attention:attn.z"].dtype == torch.bfloat16
    assert acts["blocks.0.attention:attn.pattern"].dtype == torch.float32
    assert acts["blocks.0:in"].dtype == acts["blocks.0:out"].dtype == torch.float32
    exact = seen(model, lambda: model(x))
    torch.testing.assert_close(
        acts["blocks.0.attention:attn.pattern"], exact["blocks.0.attention:attn.pattern"], rtol=0, atol=1e-2
    )


def test_a_model_without_values_gives_shapes(x):
    with torch.device("meta"):
        model = Tower()
    acts = seen(model, lambda: model(x.to("meta")))
    assert acts["blocks.1.attention:attn.pattern"].shape == (B, N, T, T)
    assert all(value.is_meta for value in acts.values())


def test_a_half_precision_model_is_recorded_as_it_is(model, x):
    half = model.bfloat16()
    acts = seen(half, lambda: half(x.bfloat16()))
    kinds = {key: value.dtype for key, value in acts.items()}
    dense = ("raw", "scores", "pattern", "entropy", "sink", "previous")
    assert all((kinds[key] == torch.float32) == key.endswith(dense) for key in kinds)


def compile_whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def compile_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def compile_forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def compile_blocks(model: nn.Module) -> nn.Module:
    for i in range(2):
        model.blocks[i] = torch.compile(model.blocks[i], backend="eager")
    return model


def compile_parts(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.attention.compile(backend="eager")
        block.mlp = torch.compile(block.mlp, backend="eager")
    return model


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "compiled", [compile_whole, compile_in_place, compile_forward, compile_blocks, compile_parts]
)
def test_a_compiled_model_is_seen_in_full(model, x, compiled, when):
    expected = seen(model, lambda: model(x))
    model = compiled(model)
    with torch.no_grad():
        if when == "after":
            model(x)
        assert_equal(seen(model, lambda: model(x)), expected)
        with edit(model, {"blocks.0": ablate("zero")}):
            assert not model(x).equal(expected[":out"])
        assert torch.equal(model(x), expected[":out"])
    torch.compiler.reset()


def test_a_model_inside_of_a_compiled_function_is_seen_in_full(model, x):
    expected = seen(model, lambda: model(x))
    step = torch.compile(lambda x: model(x) + 1, backend="eager")
    step(x)
    assert_equal(seen(model, lambda: step(x)), expected)
    torch.compiler.reset()


def test_an_exported_program_is_seen_from_outside_only(model, x):
    program = torch.export.export(model, (x,)).module()
    assert torch.equal(seen(program, lambda: program(x), ":out")[":out"], model(x))
    with pytest.raises(InterpError, match="captured nothing at"), capture(program, "blocks.0"):
        program(x)


def test_every_thread_is_seen(model, x):
    expected = seen(model, lambda: model(x))

    def run() -> None:
        thread = threading.Thread(target=lambda: model(x))
        thread.start()
        thread.join()

    assert_equal(seen(model, run), expected)


def test_a_wrapped_model_is_seen_under_the_names_of_the_wrapper(model, x):
    expected = seen(model, lambda: model(x), "blocks.*")
    wrapped = nn.DataParallel(model)
    got = seen(wrapped, lambda: wrapped(x), "module.blocks.*")
    assert_equal({key.removeprefix("module."): value for key, value in got.items()}, expected)


@pytest.mark.parametrize("call", ["name", "builtin"])
def test_attention_is_seen_by_whatever_name_it_is_called(call):
    from torch.nn.functional import scaled_dot_product_attention as imported_before

    attend = {"name": imported_before, "builtin": torch._C._nn.scaled_dot_product_attention}[call]

    class Bare(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return attend(q, q, q)

    q = torch.randn(B, N, T, D)
    model = Bare()
    acts = seen(model, lambda: model(q), ":attn.pattern")
    torch.testing.assert_close(acts[":attn.pattern"], (q @ q.mT / D**0.5).softmax(-1))


def test_attention_that_is_written_out_is_seen():
    class Written(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return (q @ q.mT).softmax(-1) @ q

    model, q = Written(), torch.randn(B, N, T, 16)
    acts = seen(
        model, lambda: model(q), [f":attn.{part}" for part in ("scores", "pattern", "v", "z", "entropy")]
    )
    pattern = (q @ q.mT).softmax(-1)
    expected = {"scores": q @ q.mT, "pattern": pattern, "v": q, "z": pattern @ q}
    expected["entropy"] = torch.special.entr(pattern).sum(-1)
    assert_equal(acts, {f":attn.{part}": value for part, value in expected.items()}, rtol=1e-5, atol=1e-5)


def flexible(q: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, q, q, lambda score, b, h, t, s: score / 2)


def below(q: Tensor) -> Tensor:
    return torch.ops.aten.scaled_dot_product_attention(q, q, q)


@pytest.mark.filterwarnings("ignore:.*flex_attention")
@pytest.mark.parametrize("attend", [flexible, below])
def test_attention_that_is_not_sdpa_is_an_error(attend):
    class Other(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return attend(q)

    model, q = Other(), torch.randn(B, N, T, 16)
    assert torch.equal(seen(model, lambda: model(q), ":out")[":out"], model(q))
    for part in ("pattern", "entropy", "q", "z"):
        with (
            pytest.raises(InterpError, match=r"does not call F\.scaled_dot_product_attention"),
            capture(model, f":attn.{part}"),
        ):
            model(q)


def test_lazy_modules_are_seen_in_the_call_that_makes_them(x):
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(3))
    acts = seen(model, lambda: model(x), ["0:in", "*"])
    assert type(model[2]) is nn.Linear
    assert torch.equal(acts["0:in"], x)
    assert torch.equal(acts["2:out"], model(x)) and torch.equal(acts["0:out"], model[0](x))
