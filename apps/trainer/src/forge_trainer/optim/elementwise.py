"""Steps of element-wise optimizers: a formula on lists of tensors, compiled on request.

Uncompiled, each operation of a formula is a pass over memory, for many tensors at once. Compiled, the whole
formula is one pass for each large tensor, by CPU code or Triton; results are the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from forge_config import ConfigError
from forge_parallel.capabilities import compiled
from torch import Tensor

COMPILED_ELEMENTS = 1 << 16
"""Smaller tensors stay in lists: a kernel for each would take longer to start than to run."""

_MOST_COMPILATIONS = 64  # of all formulas, formats, and ways to know whether a step is finite

Formula = Callable[..., tuple[list[Tensor], ...]]
"""Takes `update` (see `LocalParameters.update`), lists with one tensor for each parameter (values, gradients,
each state), and numbers; returns lists of the new values and of each new state. A number is a float or []
tensor for all parameters, or a list of [] tensors, one for each parameter."""


def foreach(name: str, *arguments: Any, **options: Any) -> Any:
    """Call one of torch's operations on lists of tensors, which have no public names."""
    return getattr(torch, f"_foreach_{name}")(*arguments, **options)


def add_scaled(targets: list[Tensor], others: list[Tensor], factor: float | Tensor) -> None:
    """Add `others` times a number to `targets`, in place."""
    if isinstance(factor, Tensor):
        foreach("add_", targets, foreach("mul", others, factor))
    else:
        foreach("add_", targets, others, alpha=factor)


def step_compiled(
    formula: Formula,
    finite: Tensor | None,
    wide: torch.dtype,
    tensors: Sequence[Tensor],
    numbers: Sequence[float | Sequence[Tensor]],
) -> None:
    """Take the step of one parameter in one pass over memory.

    Args:
        formula: formula of the step.
        finite: [] bool; if false, nothing changes. None if it is known to be true.
        wide: dtype of the computation.
        tensors: value, gradient and states; all but the gradient are overwritten.
        numbers: numbers of the formula.

    Raises:
        ConfigError: the formula cannot be compiled, for example for lack of a C++ compiler.
    """
    from torch._dynamo.exc import BackendCompilerFailed  # takes seconds, and compiling needs it anyway

    flat = [tensor.detach().view(-1) for tensor in tensors]
    # as tensors, for a new learning rate would be compiled anew; filled, for a copy waits for the device
    number = partial(torch.full, (), dtype=torch.float64, device=flat[0].device)
    given = [number(n) if isinstance(n, float) else n for n in numbers]
    try:
        _compiled(formula)(finite, wide, flat, given)
    except BackendCompilerFailed as error:
        raise ConfigError(
            f"optimizer.compile = true, and the step cannot be compiled here: {error.inner_exception}; "
            "expected a compiler for C++, on a GPU Triton: install one, or set it to false"
        ) from error


@cache
def _compiled(formula: Formula) -> Callable[..., None]:
    def step(finite: Tensor | None, wide: torch.dtype, tensors: list[Tensor], numbers: list[Any]) -> None:
        new = formula(foreach, *([tensor.to(wide)] for tensor in tensors), *numbers)
        for target, (value,) in zip([tensors[0], *tensors[2:]], new, strict=True):
            narrow = value.to(target.dtype)
            target.copy_(narrow if finite is None else torch.where(finite, narrow, target))

    return compiled(step, _MOST_COMPILATIONS, dynamic=True, fullgraph=True)
