"""Experts in (emulated) 8 bits against a loop over experts that rounds row by row."""

from collections import Counter

import pytest
import torch
from forge_parallel.error import ParallelError
from forge_parallel.fp8 import use_fp8
from forge_parallel.fp8_config import FP8Config
from forge_parallel.fp8_experts import Padded, _padding
from forge_parallel.mesh import Mesh
from forge_parallel.plan import Plan
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
PLAN = Plan.of({"blocks": "layers.*", "experts": ["layers.*"]})
COUNTS = torch.tensor([5, 0, 40, 3])
ENDS = COUNTS.cumsum(0).int()


def exact(rows, weight, ends):
    parts = torch.tensor_split(rows, ends.tolist())
    products = [part @ w.t() for part, w in zip(parts, weight, strict=False)]
    return torch.cat([*products, parts[-1].new_zeros(len(parts[-1]), weight.shape[1])])


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(len(COUNTS), 64, 32))
        self.product = exact

    def forward(self, rows, ends):
        return self.product(rows, self.weight, ends)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].experts, self.layers[0].dispatch = Experts(), None


def with_gradients(product, rows, weight, ends, gradient):
    rows, weight = rows.clone().requires_grad_(), weight.detach().clone().requires_grad_()
    out = product(rows, weight, ends)
    out[: len(gradient)].backward(gradient)
    return out[: len(gradient)].detach(), rows.grad[: len(gradient)], weight.grad


def rounded(vector):
    scale = 2.0 ** torch.floor(torch.log2(448 / vector.abs().max().double())).item()
    return (vector * scale).to(torch.float8_e4m3fn).float() / scale


def each(matrix, dim):
    return torch.stack([rounded(vector) for vector in matrix.unbind(1 - dim)], 1 - dim)


@pytest.fixture
def data():
    torch.manual_seed(0)
    model = Model()
    return model, torch.randn(51, 32), torch.randn(48, 64)


def test_rounded_products_are_those_of_a_loop_over_experts(data):
    model, rows, gradient = data
    names = list(model.state_dict())
    chosen = use_fp8(
        model, PLAN, FP8Config(recipe="rowwise", experts=True, min_size=32, emulate=True), Mesh(CPU)
    )
    assert chosen == ["layers.0.experts"] and list(model.state_dict()) == names
    experts = model.layers[0].experts
    found = with_gradients(experts.product, rows, experts.weight, ENDS, gradient)
    outs, of_rows, of_weight = [], [], []
    for x, g, w in zip(
        rows[:48].split(COUNTS.tolist()), gradient.split(COUNTS.tolist()), experts.weight, strict=True
    ):
        if not len(x):
            of_weight.append(torch.zeros_like(w))
            continue
        outs.append(each(x, 1) @ each(w, 1).t())
        of_rows.append(each(g, 1) @ each(w, 0))
        of_weight.append(each(g, 0).t() @ each(x, 0))
    for one, other in zip(found, (torch.cat(outs), torch.cat(of_rows), torch.stack(of_weight)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


class Gated(nn.Module):
    """Experts of three products."""

    def __init__(self):
        super().__init__()
        self.up, self.gate = (nn.Parameter(torch.randn(len(COUNTS), 64, 32)) for _ in range(2))
        self.down = nn.Parameter(torch.randn(len(COUNTS), 32, 64))
        self.product = exact

    def forward(self, rows, ends):
        hidden = self.product(rows, self.gate, ends).sigmoid() * self.product(rows, self.up, ends)
        return self.product(hidden, self.down, ends)


def test_rows_are_padded_once_for_all_products_of_experts_and_change_none():
    torch.manual_seed(0)
    experts, rows, seen = Gated().double(), torch.randn(51, 32).double(), []

    def product(rows, weight, ends):
        seen.append((len(rows), torch.diff(ends, prepend=ends.new_zeros(1)).tolist()))
        return exact(rows, weight, ends)

    def results():
        x = rows.clone().requires_grad_()
        with Moved() as moved:
            out = experts(x, ENDS)
        out[:48].square().sum().backward()
        found = [out[:48].detach(), x.grad[:48], *(p.grad for p in experts.parameters())]
        experts.zero_grad()
        return found, moved.found

    reference, _ = results()
    experts.product = product
    experts.__class__, experts.multiple = _padding(Gated), 16
    found, moved = results()
    for one, other in zip(found, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert seen == [(112, [16, 0, 48, 16])] * 3
    assert moved == {"aten::index_copy": 1, "aten::index_select": 1}


class Moved(TorchDispatchMode):
    """Counts how often rows are moved."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith(("aten::index_copy", "aten::index_select")):
            self.found[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("emulate", [False, True])
def test_experts_that_need_multiples_of_rows_are_padded(emulate, monkeypatch):
    monkeypatch.setattr("forge_parallel.fp8._require_device", lambda *_: None)
    model = Model()
    config = FP8Config(recipe="rowwise", experts=True, min_size=32, emulate=emulate)
    use_fp8(model, PLAN, config, Mesh(CPU))
    assert isinstance(model.layers[0].experts, Padded) != emulate
    assert type(model.layers[0].experts).__name__ == "Experts"


def test_a_scale_for_32_numbers_stays_near_full_precision(data):
    model, rows, gradient = data
    experts = model.layers[0].experts
    reference = with_gradients(exact, rows, experts.weight, ENDS, gradient)
    use_fp8(model, PLAN, FP8Config(recipe="mxfp8", experts=True, min_size=32, emulate=True), Mesh(CPU))
    rows, experts.weight.grad = rows.requires_grad_(), None
    out = experts(rows, ENDS)[:48]
    out.backward(gradient)
    for one, other in zip((out, rows.grad[:48], experts.weight.grad), reference, strict=True):
        assert not torch.equal(one, other) and (one - other).norm() < 0.06 * other.norm()


def test_experts_in_eight_bits_are_refused():
    with pytest.raises(ValueError, match=r'experts = true with recipe = "tensorwise"'):
        FP8Config(recipe="tensorwise", experts=True)
    with pytest.raises(ParallelError, match=r"fits no layer of experts"):
        use_fp8(Model(), PLAN, FP8Config(recipe="rowwise", experts=True, emulate=True), Mesh(CPU))
    model = Model()
    del model.layers[0].experts.product
    with pytest.raises(ParallelError, match=r"layers.0.experts, a Experts, has no attribute `product`"):
        use_fp8(model, PLAN, FP8Config(recipe="rowwise", experts=True, min_size=32, emulate=True), Mesh(CPU))
