"""Capture on models of plain torch, of all kinds, against plain hooks of a run of its own.

B batch, T tokens, N heads, D model dim.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from forge_interp import InterpError, ablate, capture, edit
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

B, T, N, D = 2, 6, 2, 8
EXACT = {"rtol": 0, "atol": 0}


class ResidualBlock(nn.Module):
    """Writes over its own values: a ReLU and a sum in place."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        y += x
        return self.act(y)


class VisionBlock(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention = nn.MultiheadAttention(D, N, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(D, 16), nn.GELU(), nn.Linear(16, D))
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=self.need_weights)[0]
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, need_weights: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, D, 4, 4)
        self.blocks = nn.ModuleList(VisionBlock(need_weights) for _ in range(2))

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


class Recurrent(nn.Module):
    """An LSTM, and a cell that is called once a token."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.cell = nn.LSTM(D, D, 2, batch_first=True, bidirectional=True), nn.GRUCell(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x)
        state = out.new_zeros(B, D)
        for t in range(T):
            state = self.cell(out[:, t], state)
        return state


class Shared(nn.Module):
    """One layer under two names, run thrice; another with its weight; a weight used without its module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tied, self.loose = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.alias, self.tied.weight = self.layer, self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.alias(self.layer(x)).relu()
        return F.linear(self.tied(self.layer(x)), self.loose.weight)


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Listed(nn.Module):
    """Containers run by hand, some of it never."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.by_name = nn.ModuleDict({"a": nn.Linear(D, D), "unused": nn.Linear(D, D)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers[1:]):
            x = layer(x).relu_()
        return self.by_name["a"](x)


class Padded(nn.Module):
    """torch's own encoder, which turns padded batches into nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, N, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=torch.arange(T) >= torch.tensor([T, 4])[:, None])


class Mixed(nn.Module):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(D, N, 1, 2, 16, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x, x[:, :4], tgt_mask=torch.full((4, 4), -torch.inf).triu(1))


class Recursive(nn.Module):
    """Calls itself, and its layer each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = self.layer(x)
        return x if depth == 0 else self(x, depth - 1) + x


class Spectral(nn.Module):
    """Complex values between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(D, D), nn.Parameter(torch.randn(D // 2 + 1, dtype=torch.complex64))
        self.scaled = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(self.scaled(torch.fft.rfft(self.layer(x)).conj() * self.gain))


def pruned() -> nn.Module:
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
    prune.random_unstructured(model[2], "weight", 0.5)
    return model


def parametrized() -> nn.Module:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(D, D)), nn.Tanh(), nn.Linear(D, D))
    parametrizations.orthogonal(model[2])
    return model


def quantized() -> nn.Module:
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


def adapted() -> nn.Module:
    return nn.Sequential(LowRank(nn.Linear(D, D)), nn.ReLU(), LowRank(nn.Linear(D, D)))


def symbolic() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)))


TOKENS, IMAGE = (B, T, D), (B, 3, 8, 8)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), ResidualBlock(), ResidualBlock()), IMAGE),
    "vision": (VisionTransformer, IMAGE),
    "vision_with_weights": (lambda: VisionTransformer(True), IMAGE),
    "recurrent": (Recurrent, TOKENS),
    "shared": (Shared, TOKENS),
    "listed": (Listed, TOKENS),
    "padded": (Padded, TOKENS),
    "mixed": (Mixed, TOKENS),
    "parametrized": (parametrized, TOKENS),
    "quantized": (quantized, TOKENS),
    "adapted": (adapted, TOKENS),
    "symbolic": (symbolic, TOKENS),
    "recursive": (Recursive, TOKENS),
    "spectral": (Spectral, TOKENS),
    "pruned": (pruned, TOKENS),
}
EVERY = pytest.mark.parametrize("name", MODELS)
QUIET = pytest.mark.filterwarnings(
    "ignore:.*nested tensor",
    "ignore:.*enable_nested_tensor",
    "ignore:torch.ao.quantization",
    "ignore:torch.quantize_per_tensor",
)


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    return build().eval(), torch.randn(shape)


def seen_by_hooks(model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """Copies of the first input and first output of every call of every module, under each of its names."""
    seen: dict[str, Tensor] = {}
    calls: dict[str, int] = {}
    begun: dict[str, list[int]] = {}

    def before(name: str, args: tuple, kwargs: dict) -> None:
        call = calls[name] = calls.get(name, -1) + 1
        begun.setdefault(name, []).append(call)
        keep(name, "in", call, args[0] if args else next(iter(kwargs.values()), None))

    def after(name: str, output: object) -> None:
        keep(name, "out", begun[name].pop(), output[0] if isinstance(output, tuple) else output)

    def keep(name: str, part: str, call: int, value: object) -> None:
        if isinstance(value, Tensor):
            seen[f"{name}:{part}" + (f"#{call}" if call else "")] = value.detach().clone()

    handles = []
    for name, module in model.named_modules(remove_duplicate=False):
        handles += [
            module.register_forward_pre_hook(lambda _, a, k, n=name: before(n, a, k), with_kwargs=True),
            module.register_forward_hook(lambda _, a, o, n=name: after(n, o)),
        ]
    run()
    for handle in handles:
        handle.remove()
    return seen


def dense(value: Tensor) -> Tensor:
    return value.to_padded_tensor(0.0) if value.is_nested else value


@QUIET
@EVERY
def test_every_module_equals_plain_hooks_of_another_run(name):
    model, x = made(name)
    with torch.no_grad():
        expected = seen_by_hooks(model, lambda: model(x.clone()))
        sites = list(dict.fromkeys(key.partition("#")[0] for key in expected))
        with capture(model, sites) as acts:
            model(x.clone())
    assert len(expected) > 3
    assert acts.keys() == expected.keys()
    for key, value in expected.items():
        assert acts[key].is_nested == value.is_nested
        torch.testing.assert_close(dense(acts[key]), dense(value), **EXACT, msg=key)


@QUIET
@EVERY
def test_early_stop_at_any_module_gives_what_a_full_run_gives(name):
    model, x = made(name)
    with torch.no_grad():
        expected = seen_by_hooks(model, lambda: model(x.clone()))
        for key in expected:
            with capture(model, key, stop=True) as acts:
                assert model(x.clone()) is None or key == ":out"  # the output is there already
            torch.testing.assert_close(dense(acts[key]), dense(expected[key]), **EXACT, msg=key)


def weights_of(attention: nn.MultiheadAttention, *given: Tensor, **options) -> Tensor:
    """[B, N, T, S] as torch returns them."""
    return attention(*given, need_weights=True, average_attn_weights=False, **options)[1]


@pytest.mark.parametrize(
    "options", [{}, {"add_zero_attn": True}, {"add_bias_kv": True}, {"kdim": 5, "vdim": 3}], ids=str
)
@pytest.mark.parametrize("batch_first", [False, True])
def test_pattern_of_multihead_attention_equals_its_weights(options, batch_first):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(D, N, batch_first=batch_first, **options).eval()
    x, key = torch.randn(B, T, D), torch.randn(B, 4, options.get("kdim", D))
    value = torch.randn(B, 4, options.get("vdim", D))
    hidden = torch.tensor([[False] * 4, [False, False, True, True]])
    given = (x, key, value) if batch_first else [one.transpose(0, 1) for one in (x, key, value)]
    with torch.no_grad():
        expected = weights_of(attention, *given, key_padding_mask=hidden)
        with capture(attention, [":attn.pattern", ":attn.z", ":attn.v", ":out"]) as acts:
            output = attention(*given, need_weights=False, key_padding_mask=hidden)[0]
    torch.testing.assert_close(acts[":attn.pattern"], expected)
    torch.testing.assert_close(acts[":attn.pattern"] @ acts[":attn.v"], acts[":attn.z"])
    assert torch.equal(acts[":out"], output)


@QUIET
def test_pattern_of_a_padded_encoder_equals_the_weights_of_its_layers():
    model, x = made("padded")
    hidden = torch.arange(T) >= torch.tensor([T, 4])[:, None]
    with torch.no_grad():
        plain = model(x)
        with capture(model, ["encoder.layers.*.self_attn:attn.pattern", "encoder.layers.*:in"]) as acts:
            inside = model(x)
        for i, layer in enumerate(model.encoder.layers):
            y = acts[f"encoder.layers.{i}:in"]
            expected = weights_of(layer.self_attn, y, y, y, key_padding_mask=hidden)
            pattern = acts[f"encoder.layers.{i}.self_attn:attn.pattern"]
            torch.testing.assert_close(pattern, expected)
            assert (pattern[1, ..., 4:] == 0).all()
    torch.testing.assert_close(inside[~hidden], plain[~hidden])  # torch's fast path rounds otherwise


def test_weights_of_multihead_attention_are_its_second_output():
    model, x = made("vision_with_weights")
    with torch.no_grad(), capture(model, ["blocks.0.attention:out.1", "blocks.0.attention:in"]) as acts:
        model(x)
    y = acts["blocks.0.attention:in"]
    with torch.no_grad():
        expected = model.blocks[0].attention(y, y, y)[1]
    assert torch.equal(acts["blocks.0.attention:out.1"], expected)
    with (
        pytest.raises(InterpError, match="scaled_dot_product_attention"),
        capture(model, "blocks.*.attention:attn.pattern"),
    ):
        model(x)


def test_states_of_a_recurrent_net_are_paths_of_its_output():
    model, x = made("recurrent")
    with torch.no_grad(), capture(model, ["lstm", "lstm:out.1.0", "lstm:out.1.1"]) as acts:
        model(x)
        out, (hidden, cell) = model.lstm(x)
    for site, expected in {"lstm": out, "lstm:out.1.0": hidden, "lstm:out.1.1": cell}.items():
        assert torch.equal(acts[site], expected)


def test_names_of_one_module_and_of_one_weight_are_told_apart():
    model, x = made("shared")
    with torch.no_grad(), capture(model, ["layer", "alias", "tied"]) as acts:
        model(x)
    assert sorted(acts) == [
        "alias:out",
        "alias:out#1",
        "alias:out#2",
        "layer:out",
        "layer:out#1",
        "layer:out#2",
        "tied:out",
    ]
    for call in ("", "#1", "#2"):
        assert torch.equal(acts[f"layer:out{call}"], acts[f"alias:out{call}"])
    once = {"layer#1": ablate("zero")}
    with torch.no_grad(), edit(model, once), capture(model, ["alias", "tied:in"]) as edited:
        model(x)
    assert torch.equal(edited["alias:out"], acts["alias:out"]) and not edited["alias:out#1"].any()
