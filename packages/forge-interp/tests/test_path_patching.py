import numpy as np
import pytest
import torch
from forge_interp.causal.patching import activation_patching
from forge_interp.causal.path_patching import path_patching
from forge_interp.errors import InterpError
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

INNER = "layers.*:out"


class Residual(nn.Module):
    """x + f0(x) + f1(..) + f2(..), then a head: each layer reads and writes the stream."""

    def __init__(self, dim: int = 4, num_layers: int = 3, activation: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), activation()) for _ in range(num_layers)
        )
        self.head = nn.Linear(dim, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def metric(output: Tensor) -> Tensor:
    return (output[..., 0] - output[..., 1]).mean()


def residual(activation: type[nn.Module] = nn.Tanh) -> tuple[Residual, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Residual(activation=activation).double()
    clean, corrupted = torch.randn(2, 5, 4, dtype=torch.float64).unbind()
    return model, clean, corrupted


@torch.no_grad()
def test_path_patching_equals_the_computation_by_hand_on_a_residual_network():
    model, clean, corrupted = residual()
    f0, f1, f2 = model.layers
    a0, b0 = f0(clean), f0(corrupted)
    b1 = f1(corrupted + b0)
    b2 = f2(corrupted + b0 + b1)
    a1 = f1(clean + a0)
    x = corrupted
    by_hand = {
        ("layers.0:out", "layers.1:in"): x + b0 + (r := f1(x + a0)) + f2(x + b0 + r),
        ("layers.0:out", "layers.2:in"): x + b0 + b1 + f2(x + a0 + b1),
        ("layers.0:out", "head:in"): x + a0 + b1 + b2,
        ("layers.1:out", "layers.1:in"): x + b0 + b1 + b2,
        ("layers.1:out", "layers.2:in"): x + b0 + b1 + f2(x + b0 + a1),
        ("layers.1:out", "head:in"): x + b0 + a1 + b2,
    }
    senders, receivers = ["layers.0", "layers.1"], ["layers.1:in", "layers.2:in", "head:in"]
    table = path_patching(model, clean, corrupted, senders, receivers, metric, frozen=INNER)
    assert table.axes == ("site", "receiver")
    assert table.labels == (("layers.0:out", "layers.1:out"), tuple(receivers))
    for (sender, receiver), stream in by_hand.items():
        cell = (table.labels[0].index(sender), table.labels[1].index(receiver))
        assert table.values[cell] == pytest.approx(metric(model.head(stream)).item(), abs=1e-12)
    both = path_patching(model, clean, corrupted, senders, receivers[:2], metric, frozen=INNER, joint=True)
    stream = x + b0 + (r := f1(x + a0)) + f2(x + a0 + b1)  # each receiver as the sender alone moves it
    assert both.values[0, 0] == pytest.approx(metric(model.head(stream)).item(), abs=1e-12)
    assert both.labels[1] == ("layers.1:in + layers.2:in",)


def test_frozen_sites_define_what_is_direct():
    model, clean, corrupted = residual()
    f0, f1, f2 = model.layers
    with torch.no_grad():
        b0 = f0(corrupted)
        b1 = f1(corrupted + b0)
        through = corrupted + b0 + b1 + f2(corrupted + f0(clean) + f1(corrupted + f0(clean)))
    table = path_patching(model, clean, corrupted, "layers.0", "layers.2:in", metric, frozen="layers.2:out")
    assert table.values[0, 0] == pytest.approx(metric(model.head(through)).item(), abs=1e-12)


@pytest.mark.parametrize("frozen", ["layers.0:in", INNER, ["layers.0:in", "layers.1:in"]])
def test_the_number_of_a_receiver_does_not_depend_on_which_others_are_listed(frozen):
    """A receiver that is listed is not frozen by that: who wants its paths cut lists it among the frozen."""
    model, clean, corrupted = residual()
    receivers = ["layers.1:in", "layers.2:in", "head:in"]
    listed = path_patching(model, clean, corrupted, "layers.0", receivers, metric, frozen=frozen)
    for column, receiver in enumerate(receivers):
        alone = path_patching(model, clean, corrupted, "layers.0", receiver, metric, frozen=frozen)
        assert listed.values[0, column] == alone.values[0, 0]
    assert len({*listed.values[0]}) == 3


@torch.no_grad()
def test_a_receiver_is_reached_through_another_that_is_not_frozen():
    model, clean, corrupted = residual()
    f0, f1, f2 = model.layers
    x, a0, b0 = corrupted, f0(clean), f0(corrupted)
    b1, through = f1(x + b0), f1(x + a0)
    by_hand = metric(model.head(x + b0 + b1 + f2(x + a0 + through)))
    receivers = ["layers.1:in", "layers.2:in"]
    table = path_patching(model, clean, corrupted, "layers.0", receivers, metric, frozen="layers.0:in")
    assert table.values[0, 1] == pytest.approx(by_hand.item(), abs=1e-12)


@torch.no_grad()
def test_nothing_passes_through_one_receiver_to_the_next_where_they_are_joint():
    model, clean, corrupted = residual()
    f0, f1, f2 = model.layers
    x, a0, b0 = corrupted, f0(clean), f0(corrupted)
    b1 = f1(x + b0)
    received = f2(x + a0 + b1)  # behind the first receiver, which is set back
    by_hand = metric(model.head(x + b0 + f1(x + a0) + received))
    receivers, options = ["layers.1:in", "layers.2:in"], {"frozen": "layers.0:in", "joint": True}
    table = path_patching(model, clean, corrupted, "layers.0", receivers, metric, **options)
    assert table.values[0, 0] == pytest.approx(by_hand.item(), abs=1e-12)


def test_paths_of_a_linear_network_add_up_to_the_total_effect():
    model, clean, corrupted = residual(nn.Identity)
    receivers = ["layers.1:in", "layers.2:in", "head:in"]
    paths = path_patching(model, clean, corrupted, INNER, receivers, metric, frozen=INNER)
    total = activation_patching(model, clean, corrupted, INNER, metric)
    np.testing.assert_allclose(paths.effect.sum(-1), total.effect, atol=1e-12)
    assert (paths.effect[2, :2] == 0).all()  # the last layer sends to the head only
    assert (np.abs(paths.effect[0]) > 1e-3).all()


class HeadsLM(nn.Module):
    """Two layers of attention with two heads each."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attend = Attend(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


class Attend(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        z = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(z.transpose(1, 2).flatten(2))


@torch.no_grad()
@pytest.mark.parametrize("frozen", ["layers.*:out", "layers.*.attend:out"])
@pytest.mark.parametrize("owner", ["layers.{}", "layers.{}.attend"])
def test_path_patching_from_a_head_to_the_query_of_a_head_equals_the_computation_by_hand(owner, frozen):
    torch.manual_seed(0)
    model = HeadsLM().double()
    clean, corrupted = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])

    def last(output: Tensor) -> Tensor:
        return output[0, -1, 3]

    table = path_patching(
        model,
        clean,
        corrupted,
        f"{owner.format(0)}:attn.z",
        f"{owner.format(1)}:attn.q",
        last,
        frozen=frozen,
        where="heads",
        receiver_where=(slice(None), 1),
    )
    assert table.labels == ((f"{owner.format(0)}:attn.z",), ("0", "1"), (f"{owner.format(1)}:attn.q",))
    first, second = (layer.attend for layer in model.layers)
    x = model.embed(corrupted)
    for head in range(2):
        own = slice(4 * head, 4 * head + 4)
        zs = [_z(first, model.embed(tokens)) for tokens in (clean, corrupted)]
        changed = zs[1].clone()
        changed[..., own] = zs[0][..., own]
        stream, moved = x + first.proj(zs[1]), x + first.proj(changed)
        z = _z(second, stream)
        z[..., 4:] = _z(second, stream, queries=moved)[..., 4:]
        expected = last(model.head(stream + second.proj(z))).item()
        assert table.values[0, head, 0] == pytest.approx(expected, abs=1e-12) != table.corrupted


def _z(layer: Attend, x: Tensor, queries: Tensor | None = None) -> Tensor:
    q, k, v = layer.q(x if queries is None else queries), layer.k(x), layer.v(x)
    q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@torch.no_grad()
def test_path_patching_of_one_call_of_a_shared_block_leaves_the_other_frozen():
    torch.manual_seed(0)
    model = HeadsLM().double()
    model.layers[1] = model.layers[0]
    clean, corrupted = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])
    table = path_patching(
        model, clean, corrupted, "layers.0.attend:attn.z", "head:in", torch.sum, frozen="layers.0:out"
    )
    assert table.labels[0] == ("layers.0.attend:attn.z", "layers.0.attend:attn.z#1")
    block = model.layers[0]
    x, y = model.embed(clean), model.embed(corrupted)
    first, own = block(x), block(y)
    second, last = block(x + first), block(y + own)
    expected = [model.head(y + first + last).sum().item(), model.head(y + own + second).sum().item()]
    np.testing.assert_allclose(table.values[:, 0], expected, rtol=0, atol=1e-12)
    assert np.abs(table.effect).min() > 1e-3


def test_a_frozen_pattern_shuts_out_the_queries_that_it_is_made_of():
    torch.manual_seed(0)
    model = HeadsLM()
    clean, corrupted = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])
    senders = ["layers.0.attend:attn.q", "layers.0.attend:attn.v"]
    table = path_patching(
        model, clean, corrupted, senders, "head:in", torch.sum, frozen="layers.*.attend:attn.pattern"
    )
    np.testing.assert_allclose(table.effect[0], 0, atol=1e-5)
    assert abs(table.effect[1, 0]) > 1e-2


@pytest.mark.parametrize("receivers", [["2.inner:in", "3.inner:in", "4:in"], ["2:in", "3:in"]])
def test_path_patching_holds_where_blocks_change_their_input_in_place(receivers):
    class Adds(nn.Module):
        def __init__(self, inner: nn.Module, in_place: bool) -> None:
            super().__init__()
            self.inner, self.in_place = inner, in_place

        def forward(self, x: Tensor) -> Tensor:
            return x.add_(self.inner(x)) if self.in_place else x + self.inner(x)

    model, clean, corrupted = residual()
    tables = []
    for in_place in (False, True):
        stream = nn.Sequential(nn.Tanh(), *(Adds(layer, in_place) for layer in model.layers), model.head)
        senders, frozen = ["1.inner", "2.inner"], "*.inner:out"
        tables.append(path_patching(stream, clean, corrupted, senders, receivers, metric, frozen=frozen))
    np.testing.assert_allclose(tables[1].values, tables[0].values, rtol=0, atol=1e-12)
    assert np.abs(tables[0].effect.diagonal()).min() > 1e-3


def test_path_patching_refuses_a_sender_that_runs_on_the_clean_inputs_only():
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(int(x[0, 0])):
                x = self.step(x)
            return x.sum()

    two, one = torch.full((1, 2), 2.0), torch.ones(1, 2)
    with pytest.raises(InterpError, match="step:out#1 ran on the clean inputs only"):
        path_patching(Loop(), two, one, "step", "step:in", torch.sum, frozen=":in")
    with pytest.raises(InterpError, match="step:out#1"):
        activation_patching(Loop(), two, one, "step", torch.sum)


def test_path_patching_refuses_what_does_not_fit():
    model, clean, corrupted = residual()
    with pytest.raises(InterpError, match=r"layers\.0:out are senders and receivers"):
        path_patching(model, clean, corrupted, "layers.0", "layers.*", metric, frozen=INNER)
    with pytest.raises(InterpError, match=r"\[5, 4\] in one run and \[3, 4\]"):
        path_patching(model, clean, corrupted[:3], "layers.0", "head:in", metric, frozen=INNER)
    with pytest.raises(InterpError, match=r"layer\.9"):
        path_patching(model, clean, corrupted, "layers.0", "head:in", metric, frozen="layer.9")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
