"""Experts in (emulated) 8 bits against a loop over experts that rounds row by row."""

import pytest
import torch
from forge_parallel.error import ParallelError
from forge_parallel.fp8 import use_fp8
from forge_parallel.fp8_config import FP8Config
from forge_parallel.fp8_experts import Padded
from forge_parallel.mesh import Mesh
from forge_parallel.plan import Plan
from torch import nn

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


def test_padding_changes_no_product(data):
    model, rows, gradient = data
    weight, seen = model.layers[0].experts.weight, []

    def product(rows, weight, ends):
        seen.append((len(rows), torch.diff(ends, prepend=ends.new_zeros(1)).tolist()))
        return exact(rows, weight, ends)

    found = with_gradients(Padded(product, 16), rows.double(), weight.double(), ENDS, gradient.double())
    reference = with_gradients(exact, rows.double(), weight.double(), ENDS, gradient.double())
    for one, other in zip(found, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert seen == [(112, [16, 0, 48, 16])]


def test_a_scale_for_32_numbers_stays_near_full_precision(data):
    model, rows, gradient = data
    experts = model.layers[0].experts
    reference = with_gradients(exact, rows, experts.weight, ENDS, gradient)
    use_fp8(model, PLAN, FP8Config(recipe="mxfp8", experts=True, min_size=32, emulate=True), Mesh(CPU))
    for one, other in zip(
        with_gradients(experts.product, rows, experts.weight, ENDS, gradient), reference, strict=True
    ):
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
