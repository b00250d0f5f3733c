import numpy as np
import pytest
import torch
from forge_interp.causal.attribution import attribution_patching
from forge_interp.causal.patching import activation_patching
from forge_interp.errors import InterpError
from forge_interp.hooks.edit import edit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self, activation: type[nn.Module], in_place: bool = False, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), activation()) for _ in range(3))
        self.head = nn.Linear(6, 9)
        self.in_place, self.recompute = in_place, recompute
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            y = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            x = y.add_(x) if self.in_place else x + y
        return self.head(x.cumsum(1))


CLEAN, CORRUPTED = torch.tensor([[1, 2, 3, 4], [2, 2, 5, 0]]), torch.tensor([[1, 7, 3, 8], [2, 6, 5, 1]])
SITES = ["embed", "layers.*:out", "layers.*.0:in"]


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 3].mean() - logits[:, -2, 4].mean()


@pytest.mark.parametrize("where", [None, "positions", {"half": (..., slice(3)), "last": (slice(None), -1)}])
def test_attribution_patching_is_exact_on_a_linear_net(where):
    model = Net(nn.Identity)
    estimate = attribution_patching(model, CLEAN, CORRUPTED, SITES, metric, where=where)
    exact = activation_patching(model, CLEAN, CORRUPTED, SITES, metric, where=where)
    np.testing.assert_allclose(estimate.values, exact.values, atol=1e-12)
    assert (estimate.labels, estimate.axes) == (exact.labels, exact.axes)
    assert (estimate.clean, estimate.corrupted) == (exact.clean, exact.corrupted)
    assert np.abs(exact.effect).max() > 0.1


def test_attribution_patching_of_heads_and_positions_lays_out_the_axes_as_activation_patching():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend, self.out = Attend(), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.attend(x).transpose(1, 2).flatten(2))

    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (3, 2)).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(heads, heads, heads)

    torch.manual_seed(0)
    model = Heads().double()
    clean, corrupted = torch.randn(2, 2, 5, 6, dtype=torch.float64).unbind()
    for where in (("heads", "positions"), ("positions", "heads"), "heads"):
        sites = "attend:attn.z"  # linear from here on
        estimate = attribution_patching(model, clean, corrupted, sites, torch.sum, where=where)
        exact = activation_patching(model, clean, corrupted, sites, torch.sum, where=where)
        np.testing.assert_allclose(estimate.values, exact.values, atol=1e-12)
        assert estimate.labels == exact.labels


def test_attribution_patching_is_the_first_order_term_on_a_curved_net():
    model = Net(nn.Tanh)
    with torch.no_grad():
        model.embed.weight[5:] = model.embed.weight[:4] + 1e-4 * torch.randn(4, 6)
    near = torch.where(torch.tensor([True, False, True, True]), CLEAN.clamp(max=3), CLEAN.clamp(max=3) + 5)
    clean = CLEAN.clamp(max=3)
    estimate = attribution_patching(model, clean, near, SITES, metric, where="positions")
    exact = activation_patching(model, clean, near, SITES, metric, where="positions")
    assert 0 < np.abs(estimate.effect - exact.effect).max() < 1e-3 * np.abs(exact.effect).max()


@pytest.mark.parametrize(("in_place", "recompute"), [(True, False), (False, True)])
def test_attribution_patching_holds_with_in_place_operations_and_activation_checkpointing(
    in_place, recompute
):
    plain = attribution_patching(Net(nn.Tanh), CLEAN, CORRUPTED, SITES, metric, where="positions")
    model = Net(nn.Tanh, in_place, recompute)
    other = attribution_patching(model, CLEAN, CORRUPTED, SITES, metric, where="positions")
    np.testing.assert_allclose(other.values, plain.values, atol=1e-12)


def test_attribution_patching_touches_neither_gradients_nor_flags_of_parameters():
    model = Net(nn.Tanh).requires_grad_(False)
    model.head.weight.requires_grad_()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    with torch.no_grad():
        table = attribution_patching(model, CLEAN, CORRUPTED, "layers.0", metric)
    assert table.effect.item() != 0
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["head.weight"]


def test_integrated_gradients_are_complete_in_the_limit():
    model = Net(nn.Tanh)
    exact = activation_patching(model, CLEAN, CORRUPTED, SITES, metric)
    misses = []
    for steps in (1, 4, 24):
        table = attribution_patching(model, CLEAN, CORRUPTED, SITES, metric, steps=steps)
        np.testing.assert_allclose(table.residual, table.values - exact.values, atol=1e-12)
        misses.append(np.abs(table.residual).max())
    assert misses[0] > 1e-2 > misses[1] > misses[2]
    assert misses[2] < 1e-9
    plain = attribution_patching(model, CLEAN, CORRUPTED, SITES, metric)
    assert plain.residual is None
    assert np.abs(plain.values - exact.values).max() > 1e-2  # one gradient is not enough on this net


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_integrated_gradients_are_exact_on_polynomials(steps):
    """Gauss and Legendre's points integrate degree 2 steps - 1 exactly: each point and weight matters."""
    model = nn.Sequential(nn.Identity(), nn.Identity())
    clean, corrupted = torch.randn(2, 2, 3, 4, dtype=torch.float64, generator=torch.manual_seed(0)).unbind()
    degree = 2 * steps

    def power(x):
        return (x**degree).sum()

    for where in (None, "positions"):
        table = attribution_patching(model, clean, corrupted, "0", power, steps=steps, where=where)
        exact = activation_patching(model, clean, corrupted, "0", power, where=where)
        np.testing.assert_allclose(table.values, exact.values, rtol=1e-12)
    if steps > 1:
        fewer = attribution_patching(model, clean, corrupted, "0", power, steps=steps - 1)
        assert abs(fewer.residual.item()) > 1e-3


def test_integrated_gradients_share_the_effect_of_a_site_among_its_places():
    model = Net(nn.Tanh)
    whole = attribution_patching(model, CLEAN, CORRUPTED, SITES, metric, steps=6)
    parts = attribution_patching(model, CLEAN, CORRUPTED, SITES, metric, steps=6, where="positions")
    np.testing.assert_allclose(parts.effect.sum(1), whole.effect, atol=1e-12)
    np.testing.assert_allclose(parts.residual, whole.residual, atol=1e-12)


def test_a_site_that_the_metric_does_not_depend_on_has_no_effect():
    model = Net(nn.Tanh)
    table = attribution_patching(
        model, CLEAN, CORRUPTED, ["embed", "layers.2"], lambda x: x[:, 0].sum(), where="positions"
    )
    assert (table.effect[:, 1:] == 0).all()


def test_a_site_that_nothing_is_made_of_has_no_effect():
    class Dead(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            self.layers[2](self.embed(tokens))
            return self.head(self.layers[1](self.layers[0](self.embed(tokens))))

    table = attribution_patching(Dead(nn.Tanh), CLEAN, CORRUPTED, "layers.*", metric)
    effects = dict(zip(table.labels[0], table.effect, strict=True))
    assert effects["layers.2:out"] == 0 != effects["layers.1:out"]


def test_attribution_patching_holds_where_the_input_of_a_module_is_changed_in_place_later():
    class Stream(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens) + 0
            for layer in self.layers:
                x.add_(layer(x))
            return self.head(x.cumsum(1))

    sites = ["layers.*.0:in", "layers.*:in"]
    model = Stream(nn.Identity)
    estimate = attribution_patching(model, CLEAN, CORRUPTED, sites, metric)
    exact = activation_patching(model, CLEAN, CORRUPTED, sites, metric)
    np.testing.assert_allclose(estimate.values, exact.values, rtol=0, atol=1e-12)


def test_attribution_patching_refuses_what_has_no_gradient():
    model = Net(nn.Tanh)

    def run(sites="layers.0", metric=metric, steps=None):
        attribution_patching(model, CLEAN, CORRUPTED, sites, metric, steps=steps)

    with pytest.raises(InterpError, match=r"gave a float.*no \.item"):
        run(metric=lambda x: x.sum().item())
    with pytest.raises(InterpError, match="gave a Tensor without a gradient"):
        run(metric=lambda x: x.sum().detach())
    with pytest.raises(InterpError, match=r"torch\.int64.*choose a later site"):
        run(sites="embed:in")
    with pytest.raises(InterpError, match="steps is 0"):
        run(steps=0)
    with pytest.raises(InterpError, match="one number: reduce"):
        run(metric=lambda x: x[:, -1, 3])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Queries(nn.Module):
    """Attention with 4 query heads and 2 key heads under a mask; linear from its output on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 8)
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 9)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = 3 * self.embed(tokens)
        q = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 2)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        z = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.out(z.transpose(1, 2).flatten(2))


def test_scores_that_the_mask_hides_in_both_runs_count_for_nothing():
    model = Queries()
    raw, scores = (
        attribution_patching(model, CLEAN, CORRUPTED, f":attn.{name}", metric, where=("heads", "positions"))
        for name in ("raw", "scores")
    )
    np.testing.assert_allclose(scores.values, raw.values, rtol=0, atol=1e-12)
    assert np.abs(scores.effect).max() > 1e-3
    exact = activation_patching(model, CLEAN, CORRUPTED, ":attn.scores", metric)
    line = attribution_patching(model, CLEAN, CORRUPTED, ":attn.scores", metric, steps=32)
    np.testing.assert_allclose(line.values, exact.values, rtol=0, atol=1e-8)
    np.testing.assert_allclose(line.residual, 0, atol=1e-8)


def test_scores_that_are_hidden_in_one_run_only_are_refused():
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask).sum()

    x, mask = torch.randn(2, 1, 2, 3, 4), torch.ones(3, 3, dtype=torch.bool)
    with pytest.raises(InterpError, match=r"':attn\.scores' by what is not finite.*one mask in both"):
        attribution_patching(Masked(), (x[0], mask.tril()), (x[1], mask), ":attn.scores", torch.sum)


@pytest.mark.parametrize("steps", [None, 3])
def test_attribution_patching_refuses_runs_of_different_shape(steps):
    with pytest.raises(InterpError, match=r"\[2, 4, 6\] in one run and \[2, 3, 6\]"):
        attribution_patching(Net(nn.Tanh), CLEAN, CORRUPTED[:, :3], "layers.0", metric, steps=steps)


def test_attribution_patching_of_neurons_is_exact_on_a_linear_net():
    model = Net(nn.Identity)
    for where in ("neurons", ("neurons", "positions")):
        estimate = attribution_patching(model, CLEAN, CORRUPTED, "layers.*:out", metric, where=where)
        exact = activation_patching(model, CLEAN, CORRUPTED, "layers.*:out", metric, where=where)
        np.testing.assert_allclose(estimate.values, exact.values, rtol=0, atol=1e-12)
        assert estimate.axes[1] == "neuron" and estimate.labels == exact.labels


def test_a_detaching_edit_drops_the_gradient_through_one_layer():
    model = Net(nn.Tanh)
    with edit(model, {"layers.1": torch.Tensor.detach}):
        dropped = attribution_patching(model, CLEAN, CORRUPTED, "layers.0", metric)
    x = model.embed(CORRUPTED)
    y = model.layers[0](x).detach().requires_grad_()
    h = x + y
    h = h + model.layers[1](h).detach()
    metric(model.head((h + model.layers[2](h)).cumsum(1))).backward()
    clean = model.layers[0](model.embed(CLEAN))
    expected = ((clean - y) * y.grad).sum().item()
    assert dropped.effect.item() == pytest.approx(expected, abs=1e-12)
    plain = attribution_patching(model, CLEAN, CORRUPTED, "layers.0", metric)
    assert abs(plain.effect.item() - expected) > 1e-3
