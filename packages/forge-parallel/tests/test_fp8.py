import pytest
import torch
from forge_parallel.error import ParallelError
from forge_parallel.fp8 import _largest, eight_bit_layers, use_fp8
from forge_parallel.fp8_config import FP8Config
from forge_parallel.mesh import Mesh
from forge_parallel.plan import Plan
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
PLAN = Plan.of({"blocks": "layers.*", "no_fp8": ["head"]})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.odd, self.small, self.head = nn.Linear(64, 72), nn.Linear(72, 32), nn.Linear(64, 64)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"])
def test_eight_bits_are_used_where_allowed_and_stay_near_full_precision(recipe):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(32, 64)
    exact, names = model(x), list(model.state_dict())
    wanted = torch.autograd.grad(exact.square().mean(), model.layers[0].weight)[0]
    chosen = use_fp8(
        model, PLAN, FP8Config(recipe=recipe, min_size=64, emulate=True, exclude=["layers.2"]), Mesh(CPU)
    )
    assert chosen == ["layers.0", "layers.1"]
    assert list(model.state_dict()) == names
    rough = model(x)
    assert not torch.equal(rough, exact)
    assert (rough - exact).norm() < 0.05 * exact.norm()
    found = torch.autograd.grad(rough.square().mean(), model.layers[0].weight)[0]
    assert found.dtype == torch.float32 and (found - wanted).norm() < 0.15 * wanted.norm()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (FP8Config(recipe="rowwise", min_size=64), "compute capability 8.9"),
        (FP8Config(recipe="mxfp8", min_size=64), r"compute capability 10.0 \(Blackwell\)"),
        (FP8Config(recipe="rowwise", emulate=True), "fits no layer"),
        (FP8Config(recipe="rowwise", emulate=True, min_size=64, exclude=["layer.*"]), "names no module"),
    ],
)
def test_eight_bits_are_refused(config, said):
    with pytest.raises(ParallelError, match=said):
        use_fp8(Net(), PLAN, config, Mesh(CPU))


def test_which_layers_are_in_eight_bits_does_not_depend_on_ranks_that_share_matrices():
    """Only the size that is cut counts: 48 over two ranks is well where it is not cut."""

    class Cut(nn.Module):
        def __init__(self, hidden: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(48, hidden), nn.Linear(hidden, 48)

    plan = Plan.of({"blocks": [], "tensor": {"up": "colwise", "down": "rowwise"}})
    config = FP8Config(recipe="rowwise", emulate=True, min_size=16)
    for tp in (1, 2, 4):
        assert eight_bit_layers(Cut(64), plan, config, tp) == ["up", "down"]
    assert eight_bit_layers(Cut(80), plan, config, 1) == ["up", "down"]
    with pytest.raises(ParallelError, match=r"mesh.tp = 2: up \(80\), down \(80\) would be cut .* of 16"):
        eight_bit_layers(Cut(80), plan, config, 2)


@pytest.mark.parametrize("special", [0.0, -7.0, torch.inf, torch.nan])
def test_greatest_value_of_a_weight_is_found_without_a_copy_of_it(special):
    class Made(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.most = max(self.most, out.numel())
            return out

    weight = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    weight[3, 5] = special
    with Made() as made:
        found = _largest(weight)
    torch.testing.assert_close(found, weight.abs().amax(), rtol=0, atol=0, equal_nan=True)
    assert made.most == 1
    assert _largest(weight[:0]) == 0


@pytest.mark.parametrize("tokens", [(0,), (9,), (3, 11), (2, 32)])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"])
def test_tokens_of_any_number_become_a_multiple_and_change_no_gradient(recipe, tokens, monkeypatch):
    """Patches of images and tokens of one kind follow the data; a GPU sums over multiples only."""
    from torchao.float8.float8_linear import Float8Linear
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear

    rows, config = [], FP8Config(recipe=recipe, min_size=64, emulate=True)
    for kind in (Float8Linear, MXFP8Linear):

        def forward(self, x, plain=kind.forward):
            rows.append(x.numel() // x.shape[-1])
            return plain(self, x)

        monkeypatch.setattr(kind, "forward", forward)
    torch.manual_seed(0)
    model, x, slopes = Net(), torch.randn(*tokens, 64, requires_grad=True), torch.randn(*tokens, 64)
    use_fp8(model, PLAN, config, Mesh(CPU))
    layer = model.layers[0]
    out = layer(x)
    assert len(rows) == 1 and rows[0] > 0 and rows[0] % config.multiple_of_tokens == 0
    found = [out, *torch.autograd.grad(out, [x, layer.weight, layer.bias], slopes)]
    flat, over = x.detach().flatten(0, -2), slopes.flatten(0, -2)
    wanted = [
        (flat @ layer.weight.T + layer.bias).view(slopes.shape),
        (over @ layer.weight).view(x.shape),
        over.T @ flat,
        over.sum(0),
    ]
    for new, old in zip(found, wanted, strict=True):
        assert new.shape == old.shape and (new - old).norm() <= 0.15 * old.norm()
