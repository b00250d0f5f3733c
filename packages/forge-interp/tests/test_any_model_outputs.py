"""Capture and edit of whatever a module returns, and of modules that are never called.

B batch, T tokens, D model dim.
"""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from forge_interp import InterpError, ablate, capture, edit
from torch import Tensor, nn

B, T, D = 2, 6, 8


def test_packed_sequences_are_read_and_edited_by_path():
    lstm = nn.LSTM(D, D, batch_first=True)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(B, T, D), [T, 4], batch_first=True)
    with capture(lstm, [":out.0.data", ":in.0.data"]) as acts:
        output, _ = lstm(packed)
    assert torch.equal(acts[":out.0.data"], output.data) and torch.equal(acts[":in.0.data"], packed.data)
    with edit(lstm, {":out.0.data": ablate("zero")}):
        changed, _ = lstm(packed)
    assert type(changed) is type(output) and not changed.data.any()
    assert torch.equal(changed.batch_sizes, output.batch_sizes)


@dataclass(frozen=True)
class Frozen:
    hidden: Tensor
    name: str = "x"


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


Named = namedtuple("Named", ["hidden", "other"])


class Returning(nn.Module):
    def __init__(self, wrap: Callable) -> None:
        super().__init__()
        self.inner, self.wrap = nn.Linear(D, D), wrap

    def forward(self, x: Tensor) -> object:
        return self.wrap(self.inner(x))


@pytest.mark.parametrize(
    ("wrap", "site", "listed"),
    [
        (lambda y: Frozen(y), ":out.hidden", ":out.hidden"),
        (lambda y: Slotted(y), ":out.hidden", None),
        (lambda y: Named(None, [{"a": (1.0, y)}]), ":out.other.0.a.1", ":out.1.0.a.1"),
        (lambda y: {0: y, "b": None}, ":out.0", ":out.0"),
        (lambda y: (None, y), ":out.1", ":out.1"),
        (lambda y: [3.0, y], ":out.1", ":out.1"),
    ],
    ids=["dataclass", "object", "namedtuple", "dict", "tuple", "list"],
)
def test_any_output_is_read_and_edited_by_path_and_else_an_error_with_the_paths(wrap, site, listed):
    model, x = Returning(wrap), torch.randn(B, D)
    with capture(model, [site, "inner"]) as acts:
        model(x)
    assert torch.equal(acts[site], acts["inner"])
    with edit(model, {site: lambda value: value * 0 + 7}), capture(model, site) as acts:
        output = model(x)
    assert (acts[site] == 7).all() and type(output) is type(wrap(x))
    with pytest.raises(InterpError, match=listed or "expected a tensor"), capture(model, ":out"):
        model(x)


@pytest.mark.parametrize("output", [None, 3.0, (), "a"], ids=str)
def test_an_output_without_any_tensor_is_an_error(output):
    model = Returning(lambda y: output)
    message = rf"is {type(output).__name__}, expected a tensor; it holds no tensor"
    with pytest.raises(InterpError, match=message), capture(model, ":out"):
        model(torch.randn(B, D))


class Doubled(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * self.forward(x)


class Direct(nn.Module):
    """Four ways to use a module without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.by_forward, self.by_weight, self.overridden = nn.Linear(D, D), nn.Linear(D, D), Doubled(D, D)
        self.unused, self.listed = nn.Linear(D, D), nn.ModuleList([nn.Linear(D, D)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.by_weight.bias + self.by_forward.forward(x)
        return self.listed[0](self.overridden(x))


@pytest.mark.parametrize("site", ["by_forward", "by_weight", "overridden", "unused", "listed"])
def test_a_module_that_is_not_called_is_an_error(site):
    model = Direct()
    with (
        pytest.raises(InterpError, match=f"captured nothing at '{site}'"),
        capture(model, [site, "listed.0"]),
    ):
        model(torch.randn(B, D))
