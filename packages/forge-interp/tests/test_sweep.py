"""Patching of several places in a pass against a whole pass for each place."""

from typing import Any

import numpy as np
import pytest
import torch
from forge_interp import InterpError, activation_patching, capture, edit, patch
from torch import Tensor, nn

CLEAN, CORRUPTED = torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Block(nn.Module):
    def __init__(self, memory: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv, self.mlp = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.memory, self.calls = memory, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.mlp(x).tanh() + self.memory * self.calls


def stack(*parts: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    parts = parts or (Block(), Block(), Block(), nn.LayerNorm(8))
    for part in (part for layer in parts for part in layer.modules() if isinstance(part, nn.Linear)):
        nn.init.normal_(part.weight, std=0.6)
    return nn.Sequential(*parts).double()


def metric(output: Tensor) -> Tensor:
    assert len(output) == 2
    return (output[:, -1] * torch.arange(8)).sin().mean()


def sweep(model: nn.Module, sites: Any, where: Any = None, at_once: int | None = None, **options: Any) -> Any:
    given = {"clean": CLEAN, "corrupted": CORRUPTED, "metric": metric} | options
    return activation_patching(model, sites=sites, where=where, at_once=at_once, **given)


BLOCKS = ["0", "1", "2"]
INDICES = {"last": (slice(None), -1), "of one sample": (0, 4), "by mask": (..., torch.arange(8) > 4)}
WAYS = {
    "positions": (BLOCKS, "positions"),
    "neurons": (["1:in", "2:in"], "neurons"),
    "whole": (["0", "1.mlp:in", "2.norm", "3", ""], None),
    "indices": (BLOCKS, INDICES),
    "patterns": ([f"{i}:attn.pattern" for i in BLOCKS], ("heads", "neurons")),
    "heads": (["2:attn.z", "0:attn.q"], ("positions", "heads")),
}


@pytest.mark.parametrize("at_once", [1, 3, 40])
@pytest.mark.parametrize("way", WAYS)
def test_sweep_of_several_places_equals_whole_passes(way: str, at_once: int):
    model, (sites, where) = stack(), WAYS[way]
    single, several = sweep(model, sites, where), sweep(model, sites, where, at_once)
    np.testing.assert_allclose(several.values, single.values, rtol=0, atol=1e-12)
    assert np.ptp(single.values) > 1e-3
    assert (several.labels, several.axes) == (single.labels, single.axes)
    assert (several.clean, several.corrupted) == (single.clean, single.corrupted)


@pytest.mark.parametrize(("site", "skipped"), [("0:in", 0), ("1:in", 1), ("1:attn.z", 1), ("1:out", 2)])
def test_sweep_does_not_run_what_ends_before_the_place(site: str, skipped: int):
    model = stack()
    sweep(model, site, {"all": ..., "last": (..., slice(-1, None)), "first": (..., slice(1))}, at_once=1)
    calls = [block.calls for block in model[:3]]
    assert [calls[2] - count for count in calls] == [3] * skipped + [0] * (3 - skipped)


def test_sweep_leaves_modules_and_outer_edits_as_they_were():
    model = stack()
    before = model(CORRUPTED)
    model[1].forward = own = model[1].forward
    with edit(model, {"0": patch(0.5, (..., 0)), "1.mlp": torch.tanh}):
        single, several = sweep(model, BLOCKS, "positions"), sweep(model, BLOCKS, "positions", 4)
    np.testing.assert_allclose(several.values, single.values, rtol=0, atol=1e-12)

    def fails(output: Tensor) -> Tensor:
        calls.append(0)
        if len(calls) == 5:
            raise RuntimeError("stop")
        return metric(output)

    calls: list[int] = []
    with pytest.raises(RuntimeError, match="stop"):
        sweep(model, BLOCKS, "positions", 2, metric=fails)
    assert vars(model[1])["forward"] is own
    assert [name for name, part in model.named_modules() if "forward" in vars(part)] == ["1"]
    assert model(CORRUPTED).equal(before)


class Twice(nn.Module):
    """Calls one module twice, and adds both outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        first = self.shared(x)
        return self.last(first + self.shared(first))


@pytest.mark.parametrize("sites", [["1"], ["0", "0.0"], ["3:in", "2.last:in"], ["0.0", "1", "2.last.mlp"]])
def test_sweep_of_shared_modules_equals_whole_passes(sites: list[str]):
    shared = Block()
    model = stack(nn.Sequential(shared, Block()), Block(), Twice(), shared)
    single, several = sweep(model, sites, "positions"), sweep(model, sites, "positions", at_once=3)
    np.testing.assert_allclose(several.values, single.values, rtol=0, atol=1e-12)
    assert np.ptp(single.values) > 1e-3


def test_sweep_of_modules_that_change_values_in_place_equals_whole_passes():
    class Rough(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            y = self.first(x)
            z = y.add_(1.0) * 2.0  # of the output of a child
            return self.second(z).tanh_(), {"y": y}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Rough(), Rough(), Rough()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                y, more = layer(x)
                x = y.add_(more["y"].mul_(0.5))
            return x

    torch.manual_seed(0)
    model = Model().double()
    for sites in ("layers.*", "layers.*.second:in"):
        single, several = sweep(model, sites, "positions"), sweep(model, sites, "positions", 4)
        np.testing.assert_allclose(several.values, single.values, rtol=0, atol=1e-12)
        assert np.ptp(single.values) > 1e-3


def test_sweep_of_a_compiled_model_equals_that_of_the_model():
    model = stack()
    plain = sweep(model, BLOCKS, "positions")
    compiled = torch.compile(model, backend="eager")
    before = compiled(CORRUPTED)
    np.testing.assert_allclose(
        sweep(compiled, BLOCKS, "positions", 3).values, plain.values, rtol=0, atol=1e-12
    )
    assert compiled(CORRUPTED).equal(before)


class BatchNorm(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.mT).mT


class Capacity(nn.Module):
    """An expert that serves half of the tokens of the batch, those with the largest first number."""

    def forward(self, x: Tensor) -> Tensor:
        first = x[..., 0].flatten()
        served = first >= first.topk(len(first) // 2).values.min()
        return x + served.view(x.shape[:2])[..., None] * x.square().tanh()


WRONG = {
    "batch norm in training": (BatchNorm(8), 4),
    "capacity": (Capacity(), 4),
    "dropout": (nn.Dropout(0.1), 4),
    "dropout, one place": (nn.Dropout(0.1), 1),
    "memory": (Block(memory=0.05), 4),
    "memory, one place": (Block(memory=0.05), 1),
}


@pytest.mark.parametrize("case", WRONG)
def test_sweep_refuses_samples_that_depend_on_each_other_and_modules_that_remember(case: str):
    part, at_once = WRONG[case]
    with pytest.raises(InterpError, match=r"patched at .* alone and .* with at_once; expected one number"):
        sweep(stack(Block(), part, Block()), ["0", "2"], "positions", at_once)


def test_sweep_refuses_samples_that_depend_on_each_other_behind_places_without_an_effect():
    corrupted = CLEAN.clone()
    corrupted[:, 3] += 1.0
    with pytest.raises(InterpError, match=r"alone and .* with at_once"):
        sweep(stack(BatchNorm(8), Block()), "0:in", "positions", 2, corrupted=corrupted)


def test_sweep_refuses_what_has_no_samples_along_dim_0():
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": x, "loss": x.mean()}

    def of_logits(output: dict[str, Tensor]) -> Tensor:
        return metric(output["logits"])

    model, options = stack(Block(), Loss()), {"metric": of_logits}
    with pytest.raises(InterpError, match=r"the output has \[\] in a run of 2 places.*count 2 samples"):
        sweep(model, ["0"], "positions", 2, **options)
    one, whole = (sweep(model, ["0"], "positions", at_once, **options) for at_once in (1, None))
    np.testing.assert_allclose(one.values, whole.values, rtol=0, atol=1e-12)

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.inner(x.transpose(0, 1)).transpose(0, 1) * scale

    model, scale = Turned().double(), torch.ones(5, 1)
    inputs = {"clean": (CLEAN, scale), "corrupted": (CORRUPTED, scale)}
    with pytest.raises(InterpError, match=r"have \[2, 5\] rows; expected one number"):
        sweep(model, "inner", at_once=3, **inputs)
    inputs = {"clean": (CLEAN, torch.ones(2, 5, 1)), "corrupted": (CORRUPTED, torch.ones(2, 5, 1))}
    with pytest.raises(InterpError, match=r"site 'inner:out' has \[5, 6, 8\] in a run of 3 places"):
        sweep(model, "inner", at_once=3, **inputs)


@pytest.mark.parametrize("at_once", [0, -1, 2.0, "4"])
def test_activation_patching_refuses_other_numbers_at_once(at_once: Any):
    with pytest.raises(InterpError, match=r"at_once is .*expected a positive number of places"):
        sweep(stack(), "0", at_once=at_once)


def doubled(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


def changed(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    name, value = next(iter(inputs.items()))
    return inputs | {name: value.flip(-1) if value.is_floating_point() else (value * 7 + 3) % 90}


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "ViT"])
@pytest.mark.parametrize("padded", [False, True])
def test_sweep_equals_whole_passes_in_families_of_transformers(name: str, padded: bool):
    pytest.importorskip("transformers")
    from .families import TABLE, blocks, made

    def of_output(output: Any) -> Tensor:
        last = (output.logits if hasattr(output, "logits") else output[0])[:, -1]
        return (last * torch.arange(last.shape[-1])).sin().mean()

    model = made(name).double()
    corrupted = doubled(TABLE[name]().inputs(padded), torch.float64)
    clean, layers = changed(corrupted), blocks(name, model)
    with torch.no_grad(), capture(model, "**.*at*:attn.z") as acts:
        model(**corrupted)
    heads = list(acts)
    assert len(heads) >= 2
    for sites, where in [(layers, "positions"), (heads, "heads"), ([*layers, *heads], None)]:
        whole = activation_patching(model, clean, corrupted, sites, of_output, where=where)
        assert np.ptp(whole.values) > 1e-6
        for at_once in (1, 5):
            found = activation_patching(
                model, clean, corrupted, sites, of_output, where=where, at_once=at_once
            )
            np.testing.assert_allclose(found.values, whole.values, rtol=0, atol=1e-12)
    model.float()
    given = (model, doubled(clean, torch.float32), doubled(corrupted, torch.float32), layers, of_output)
    whole, found = (activation_patching(*given, where="positions", at_once=n) for n in (None, 7))
    np.testing.assert_allclose(found.values, whole.values, rtol=0, atol=1e-5)


class Leaving(nn.Module):
    """Leaves what it computes on itself, or in a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x, left):
        self.last = self.a(x).tanh()
        left.append(self.last)
        return x + self.last


class Remembering(nn.Module):
    """Its output reads what the first layer left behind."""

    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.layers, self.listed = nn.ModuleList(Leaving() for _ in range(3)), listed

    def forward(self, x):
        left = []
        for layer in self.layers:
            x = layer(x, left)
        return x + (sum(left) if self.listed else self.layers[0].last)


@pytest.mark.parametrize("where", [None, "positions"])
@pytest.mark.parametrize("listed", [False, True], ids=["attribute", "list"])
def test_what_modules_that_are_left_out_should_have_left_behind_is_missed(listed, where):
    torch.manual_seed(1)
    model, (clean, corrupted) = Remembering(listed).double(), torch.randn(2, 3, 5, 8).double()
    sites, keys = ["layers.0.a", "layers.2.a"], {"where": where, "progress": False}
    metric = lambda output: (output[:, -1] * torch.arange(8)).sin().mean()  # noqa: E731
    with pytest.raises(InterpError, match="modules remember earlier calls"):
        activation_patching(model, clean, corrupted, sites, metric, at_once=1, **keys)
