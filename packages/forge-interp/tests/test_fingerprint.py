import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from forge_interp.extraction.fingerprint import callable_name, is_distributed, model_fingerprint
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

WEIGHTS = torch.arange(6.0)


def make_model(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    settings = {"eps": 1e-5, "last": nn.GELU, "bias": True} | changes
    return nn.Sequential(
        nn.Linear(37, 11, bias=settings["bias"]),
        nn.LayerNorm(11, eps=settings["eps"]),
        nn.BatchNorm1d(11),
        settings["last"](),
    )


def test_model_fingerprint_is_equal_for_equal_models():
    assert model_fingerprint(make_model()) == model_fingerprint(make_model())
    assert model_fingerprint(make_model())["numbers"] == 37 * 11 + 11 + 4 * 11 + 2 * 11 + 1


@pytest.mark.parametrize("change", [{"eps": 1e-6}, {"last": nn.ReLU}, {"bias": False}])
def test_model_fingerprint_sees_settings(change: dict[str, Any]):
    assert model_fingerprint(make_model(**change))["layout"] != model_fingerprint(make_model())["layout"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex128])
def test_model_fingerprint_sees_every_single_weight(dtype: torch.dtype):
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(3, 71).to(dtype))
    before = model_fingerprint(model)["weights"]
    for index in range(3 * 71):
        with torch.no_grad():
            kept = model.weight.view(-1)[index].clone()
            model.weight.view(-1)[index] *= 1.5
            assert model_fingerprint(model)["weights"] != before
            model.weight.view(-1)[index] = kept
    assert model_fingerprint(model)["weights"] == before


def test_model_fingerprint_sees_an_order():
    model = make_model()
    before = model_fingerprint(model)["weights"]
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.flip(0))
    assert model_fingerprint(model)["weights"] != before
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    a, b = nn.Sequential(first, second), nn.Sequential(second, first)
    assert model_fingerprint(a)["weights"] != model_fingerprint(b)["weights"]


def test_model_fingerprint_reads_saved_buffers_only():
    model = make_model()
    model.register_buffer("cache", torch.zeros(4), persistent=False)
    before = model_fingerprint(model)
    model.cache.add_(1)
    assert model_fingerprint(model) == before
    model[2].running_mean.add_(1)
    assert model_fingerprint(model) != before


def test_model_fingerprint_reads_views_that_are_not_aligned():
    model = nn.Module()
    model.weight = nn.Parameter(torch.arange(33.0)[1:])
    aligned = nn.Module()
    aligned.weight = nn.Parameter(torch.arange(1.0, 33.0))
    assert model_fingerprint(model) == model_fingerprint(aligned)
    model.weight = nn.Parameter(torch.arange(32.0).view(4, 8).T)
    aligned.weight = nn.Parameter(torch.arange(32.0).view(4, 8).T.contiguous())
    assert model_fingerprint(model) == model_fingerprint(aligned)


def test_model_fingerprint_looks_through_wrappers():
    model = make_model()
    before = model_fingerprint(model)
    model[0] = checkpoint_wrapper(model[0])
    assert model_fingerprint(model) == before
    assert model_fingerprint(torch.compile(model)) == before
    assert not is_distributed(model)


def scaled(factor: float, matrix: Any = None) -> Callable[[Tensor], Tensor]:
    return lambda value: value * factor if matrix is None else value @ matrix


class Projection:
    def __init__(self, matrix: Any):
        self.matrix = matrix

    def __call__(self, value: Tensor) -> Tensor:
        return value @ self.matrix

    def twice(self, value: Tensor) -> Tensor:
        return value


def by_default(value: Tensor, dim: int = 0) -> Tensor:
    return value.sum(dim)


def with_keyword(value: Tensor, *, dim: int = 0) -> Tensor:
    return value.sum(dim)


PAIRS = {
    "code": (lambda v: v[:, 0], lambda v: v[:, 1]),
    "name": (lambda v: v.sum(), lambda v: v.mean()),
    "inner code": (lambda v: [x + 1 for x in v], lambda v: [x + 2 for x in v]),
    "tuple constant": (lambda v: v.sum((0, 1)), lambda v: v.sum((0, 2))),
    "set constant": (lambda v: v in {1, 2}, lambda v: v in {1, 3}),
    "closure": (scaled(1.0), scaled(2.0)),
    "closure tensor": (scaled(1, torch.eye(2)), scaled(1, torch.ones(2, 2))),
    "closure array": (scaled(1, np.eye(2)), scaled(1, np.ones((2, 2)))),
    "closure list": (scaled(1, [1, {"a": 2}]), scaled(1, [1, {"a": 3}])),
    "default": (lambda v, k=1: v[k], lambda v, k=2: v[k]),
    "keyword default": (lambda v, *, k=1: v[k], lambda v, *, k=2: v[k]),
    "partial": (functools.partial(by_default, dim=0), functools.partial(by_default, dim=1)),
    "partial positional": (functools.partial(torch.add, 1), functools.partial(torch.add, 2)),
    "attribute": (Projection(torch.eye(2)), Projection(torch.ones(2, 2))),
    "module": (nn.Linear(2, 2), nn.Linear(2, 2)),
    "method of a module": (nn.Linear(2, 2).forward, nn.Linear(2, 2).forward),
    "builtin": (torch.mean, torch.sum),
    "function": (by_default, with_keyword),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_callable_name_tells_functions_apart(kind: str):
    first, second = PAIRS[kind]
    assert callable_name(first) == callable_name(first)
    assert callable_name(first) != callable_name(second)


def test_callable_name_is_equal_for_equal_functions():
    assert callable_name(None) is None
    assert callable_name(scaled(3.0)) == callable_name(scaled(3.0))
    assert callable_name(scaled(1, torch.eye(3))) == callable_name(scaled(1, torch.eye(3)))
    assert callable_name(Projection(torch.eye(2))) == callable_name(Projection(torch.eye(2)))
    assert callable_name(Projection(object())) == callable_name(Projection(object()))
    assert callable_name(Projection(1).twice) == callable_name(Projection(2).twice)
    assert str(callable_name(by_default)).startswith("by_default:")


def test_callable_name_ends_where_a_function_refers_to_itself():
    def repeat(value: Tensor, times: int = 2) -> Tensor:
        return repeat(value, times - 1) if times else value

    assert callable_name(repeat) == callable_name(repeat)

    def late() -> Any:
        return missing

    assert callable_name(late)
    missing = 1
    assert callable_name(late)


def test_callable_name_is_equal_in_every_process():
    script = (
        "import functools, torch\n"
        "from forge_interp.extraction.fingerprint import callable_name\n"
        "class A: pass\n"
        "def make(k, o): return lambda v: v[k] if v in {'a', 'b', 'c', 'd'} else o\n"
        "print(callable_name(functools.partial(make(torch.eye(2), A()), A())))\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1 and found.pop().startswith("make.<locals>.<lambda>:")
