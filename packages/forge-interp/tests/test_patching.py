import numpy as np
import pytest
import torch
from forge_interp.causal.attribution import attribution_patching
from forge_interp.causal.patching import activation_patching
from forge_interp.errors import InterpError
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.proj = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        z = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(z.transpose(1, 2).flatten(2))
        return x + self.mlp(x), "a tuple, as many models return"


class TinyLM(nn.Module):
    def __init__(self, vocab: int = 11, dim: int = 12, heads: int = 3, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x, _ = layer(x)
        return {"logits": self.head(self.norm(x))}


def difference(output: dict[str, Tensor]) -> Tensor:
    return (output["logits"][:, -1, 3] - output["logits"][:, -1, 5]).mean()


@pytest.fixture
def model() -> TinyLM:
    torch.manual_seed(0)
    return TinyLM().eval()


CLEAN = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
CORRUPTED = torch.tensor([[1, 9, 3, 4, 0], [6, 7, 2, 2, 10]])


def run_with_hook(model: nn.Module, name: str, hook) -> dict[str, Tensor]:
    handle = model.get_submodule(name).register_forward_hook(hook)
    with torch.no_grad():
        output = model(CORRUPTED)
    handle.remove()
    return output


def output_of(model: nn.Module, name: str, tokens: Tensor) -> Tensor:
    found = []
    handle = model.get_submodule(name).register_forward_hook(lambda m, a, out: found.append(out))
    with torch.no_grad():
        model(tokens)
    handle.remove()
    return found[0][0] if isinstance(found[0], tuple) else found[0]


def test_activation_patching_of_positions_equals_manual_hooks_bit_for_bit(model):
    table = activation_patching(model, CLEAN, CORRUPTED, "layers.*:out", difference, where="positions")
    for i in range(2):
        clean = output_of(model, f"layers.{i}", CLEAN)
        for t in range(5):

            def hook(module, args, output, clean=clean, t=t):
                x = output[0].clone()
                x[:, t] = clean[:, t]
                return x, output[1]

            expected = difference(run_with_hook(model, f"layers.{i}", hook)).item()
            assert table.values[i, t] == expected
    assert table.axes == ("site", "position")
    assert table.labels == (("layers.0:out", "layers.1:out"), ("0", "1", "2", "3", "4"))
    assert (table.clean, table.corrupted) == (
        difference(model(CLEAN)).item(),
        difference(model(CORRUPTED)).item(),
    )
    assert np.ptp(table.values) > 0.01


def test_activation_patching_of_heads_equals_patching_the_input_of_the_projection(model):
    table = activation_patching(
        model, CLEAN, CORRUPTED, "layers.*:attn.z", difference, where=("heads", "positions")
    )
    assert table.values.shape == (2, 3, 5)
    slices = {f"{h}": (slice(None), slice(None), slice(4 * h, 4 * h + 4)) for h in range(3)}
    by_slices = activation_patching(model, CLEAN, CORRUPTED, "layers.*.proj:in", difference, where=slices)
    whole_heads = activation_patching(model, CLEAN, CORRUPTED, "layers.*:attn.z", difference, where="heads")
    np.testing.assert_array_equal(whole_heads.values, by_slices.values)
    assert whole_heads.labels[1] == by_slices.labels[1] == ("0", "1", "2")
    cell = {"it": (slice(None), 4, slice(4, 8))}
    one = activation_patching(model, CLEAN, CORRUPTED, "layers.1.proj:in", difference, where=cell)
    assert table.values[1, 1, 4] == one.values[0, 0] != one.corrupted


@pytest.mark.parametrize("where", ["neurons", ("positions", "neurons"), ("neurons", "positions")])
def test_activation_patching_of_neurons_equals_patching_by_index(model, where):
    table = activation_patching(model, CLEAN, CORRUPTED, "layers.*.mlp.2:out", difference, where=where)
    kinds = [where] if isinstance(where, str) else where
    assert table.values.shape == (2, *({"positions": 5, "neurons": 24}[kind] for kind in kinds))
    index = {"it": (slice(None), 4, 7) if "positions" in kinds else (..., 7)}
    one = activation_patching(model, CLEAN, CORRUPTED, "layers.1.mlp.2:out", difference, where=index)
    at = tuple({"positions": 4, "neurons": 7}[kind] for kind in kinds)
    assert table.values[(1, *at)] == one.values[0, 0] != one.corrupted


def test_activation_patching_of_keys_of_the_pattern_equals_patching_by_index(model):
    where = ("heads", "positions", "neurons")
    table = activation_patching(model, CLEAN, CORRUPTED, "layers.1:attn.pattern", difference, where=where)
    assert table.axes == ("site", "head", "position", "neuron") and table.values.shape == (1, 3, 5, 5)
    index = {"it": (slice(None), 2, 4, 1)}
    one = activation_patching(model, CLEAN, CORRUPTED, "layers.1:attn.pattern", difference, where=index)
    assert table.values[0, 2, 4, 1] == one.values[0, 0] != one.corrupted


def test_patching_a_whole_site_that_all_flows_through_brings_the_clean_metric_back(model):
    table = activation_patching(model, CLEAN, CORRUPTED, ["layers.0", "norm"], difference)
    np.testing.assert_array_equal(table.normalized, [1.0, 1.0])
    nothing = activation_patching(model, CORRUPTED, CLEAN, ["layers.0"], difference, where={"none": (0, 0)})
    assert nothing.effect.item() == 0.0  # the first tokens are equal, and nothing precedes them


def test_activation_patching_takes_tuples_and_mappings_of_inputs(model):
    plain = activation_patching(model, CLEAN, CORRUPTED, "layers.0", difference, where="positions")
    for clean, corrupted in [((CLEAN,), (CORRUPTED,)), ({"tokens": CLEAN}, {"tokens": CORRUPTED})]:
        table = activation_patching(model, clean, corrupted, "layers.0", difference, where="positions")
        np.testing.assert_array_equal(table.values, plain.values)
    with pytest.raises(InterpError, match="inputs are a str"):
        activation_patching(model, "hello", CORRUPTED, "layers.0", difference)


def test_activation_patching_of_one_call_leaves_the_other_calls_of_a_shared_module_alone():
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    clean, corrupted = torch.randn(2, 3, 4).unbind()
    table = activation_patching(model, clean, corrupted, "0:out", lambda x: x.square().sum())
    assert table.labels == (("0:out", "0:out#1"),)
    np.testing.assert_allclose(table.normalized, [1.0, 1.0], rtol=1e-6)
    half = activation_patching(
        model, clean, corrupted, "0:out", lambda x: x.square().sum(), where={"first": (..., slice(2))}
    )
    x = shared(corrupted).tanh()
    expected = shared(torch.cat([shared(clean).tanh()[:, :2], x[:, 2:]], dim=1)).square().sum().item()
    assert half.values[0, 0] == pytest.approx(expected, rel=1e-6)


def test_top_lists_the_largest_effects_first(model):
    table = activation_patching(model, CLEAN, CORRUPTED, "layers.*", difference, where="positions")
    top = table.top(3)
    flat = np.sort(np.abs(table.effect), axis=None)[::-1]
    assert [abs(effect) for _, effect in top] == flat[:3].tolist()
    (site, position), effect = top[0]
    assert table.effect[table.labels[0].index(site), int(position)] == effect


def test_normalized_refuses_equal_metrics(model):
    table = activation_patching(model, CLEAN, CLEAN, "layers.0", difference)
    assert table.effect.item() == 0.0
    with pytest.raises(InterpError, match="clean and corrupted"):
        _ = table.normalized


def test_activation_patching_refuses_what_does_not_fit(model):
    def run(sites="layers.0", metric=difference, corrupted=CORRUPTED, where=None):
        activation_patching(model, CLEAN, corrupted, sites, metric, where=where)

    with pytest.raises(InterpError, match=r"one number: reduce"):
        run(metric=lambda output: output["logits"][:, -1, 0])
    with pytest.raises(InterpError, match=r"raised TypeError.*a dict with logits: take the tensor from it"):
        run(metric=lambda output: output[:, -1, 0].mean())
    with pytest.raises(InterpError, match=r"raised AttributeError.*a dict with logits"):
        attribution_patching(model, CLEAN, CORRUPTED, "layers.0", lambda output: output.mean())
    with pytest.raises(InterpError, match=r"no axis of heads.*attn\.z"):
        run(where="heads")
    with pytest.raises(InterpError, match=r"where is 'tokens'"):
        run(where="tokens")
    with pytest.raises(InterpError, match=r"\('positions', 'positions'\); expected each axis once"):
        run(where=("positions", "positions"))
    with pytest.raises(InterpError, match=r"\[2, 5, 12\] in one run and \[2, 4, 12\]"):
        run(corrupted=CORRUPTED[:, :4])
    with pytest.raises(InterpError, match=r"layer\.0"):
        run(sites="layer.0")


def test_activation_patching_refuses_sites_of_different_length():
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(1), nn.Linear(12, 4))
    x = torch.randn(2, 3, 4)
    with pytest.raises(InterpError, match=r"'0:out': 3, '1:out': 12.*call once"):
        activation_patching(model, x, -x, ["0", "1"], torch.sum, where="positions")
    with pytest.raises(InterpError, match=r"expected heads along|no axis of heads"):
        activation_patching(model, x, -x, ["0", "1"], torch.sum, where="heads")


@pytest.mark.parametrize("where", ["heads", "positions", "neurons"])
def test_activation_patching_refuses_axes_of_attention_without_heads(where):
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.randn(2, 5, 4)
    with pytest.raises(InterpError, match=rf"\(2, 5, 4\); expected {where} along .*label: index"):
        activation_patching(Flat(), x, -x, ":attn.z", torch.sum, where=where)


def test_activation_patching_refuses_positions_and_neurons_of_rows():
    x = torch.randn(10, 4)
    rows = activation_patching(nn.Identity(), x, -x, "", torch.sum, where="neurons")
    np.testing.assert_allclose(rows.effect, 2 * x.sum(0)[None], rtol=1e-5)
    with pytest.raises(InterpError, match=r"\(10, 4\); expected neurons along dim -1 of \[B, T"):
        activation_patching(nn.Identity(), x, -x, "", torch.sum, where=("neurons", "positions"))


def test_activation_patching_of_a_compiled_model_equals_that_of_the_model(model):
    plain = activation_patching(model, CLEAN, CORRUPTED, "layers.*", difference, where="positions")
    compiled = torch.compile(model, backend="eager")
    compiled(CLEAN)
    table = activation_patching(compiled, CLEAN, CORRUPTED, "layers.*", difference, where="positions")
    np.testing.assert_array_equal(table.values, plain.values)
    assert table.labels == plain.labels


def test_an_error_in_the_middle_leaves_no_hook_behind(model):
    calls = []

    def metric(output):
        calls.append(0)
        if len(calls) == 4:
            raise RuntimeError("stop")
        return difference(output)

    before = model(CORRUPTED)["logits"]
    with pytest.raises(RuntimeError, match="stop"):
        activation_patching(model, CLEAN, CORRUPTED, "layers.*", metric, where="positions")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(CORRUPTED)["logits"], before)
