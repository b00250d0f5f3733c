"""Many feed-forwards of one shape, each for its own rows. E experts, R rows, D model dim, F ffn dim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from forge_model.ffn.dense import ACTIVATIONS, clamped_unit
from forge_model.roles import Role

if TYPE_CHECKING:
    from forge_model.moe.config import ClampConfig


class Experts(nn.Module):
    """Feed-forwards whose matrices are stacked: one parameter for each kind of matrix.

    Attributes:
        w_gate: [E, F, D]; None without gates.
        w_up: [E, F, D].
        w_down: [E, D, F].
        cut_dims: the dim of each parameter along which the hidden width may be sharded; None for a bias that
            is added after the parts are summed.
        product: multiplies rows by one of these matrices; may be replaced, by default `grouped_linear`.
    """

    residual_writers: ClassVar[tuple[str, ...]] = ("w_down",)
    cut_dims: ClassVar[dict[str, int | None]] = {
        "w_gate": 1,
        "w_up": 1,
        "w_down": 2,
        "b_gate": 1,
        "b_up": 1,
        "b_down": None,
    }
    roles: ClassVar[dict[str, Role]] = {
        "w_gate": "expert",
        "w_up": "expert",
        "w_down": "expert",
        "b_gate": "bias",
        "b_up": "bias",
        "b_down": "bias",
    }

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden: int,
        activation: str,
        gated: bool,
        bias: bool,
        clamp: ClampConfig | None = None,
    ) -> None:
        super().__init__()

        def parameter(*shape: int, exists: bool = True) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(num_experts, *shape)) if exists else None

        self.w_gate = parameter(hidden, dim, exists=gated)
        self.w_up = parameter(hidden, dim)
        self.w_down = parameter(dim, hidden)
        self.b_gate = parameter(hidden, exists=gated and bias)
        self.b_up = parameter(hidden, exists=bias)
        self.b_down = parameter(dim, exists=bias)
        self.activation, self.clamp = ACTIVATIONS[activation], clamp
        self.product: Callable[[Tensor, Tensor, Tensor], Tensor] = grouped_linear
        self._fused = gated and activation == "silu" and not bias and clamp is None

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Apply each expert to its rows.

        Args:
            rows: [R, D], sorted by expert.
            ends: [E] int32, where the rows of each expert end; an expert may have none.

        Returns:
            [R, D]; rows after the last end and their gradients mean nothing.
        """
        assert self.w_up is not None and self.w_down is not None
        if self._fused and rows.device.type == "cpu" and self.product is grouped_linear:
            return _GatedSilu.apply(rows, self.w_gate, self.w_up, self.w_down, ends.tolist())
        up = self._projected(rows, self.w_up, self.b_up, ends)
        gate = None if self.w_gate is None else self._projected(rows, self.w_gate, self.b_gate, ends)
        return self._projected(self._unit(gate, up), self.w_down, self.b_down, ends)

    def _unit(self, gate: Tensor | None, up: Tensor) -> Tensor:
        if gate is None:
            return self.activation(up)
        if self.clamp is None:
            return self.activation(gate) * up
        return clamped_unit(gate, up, self.clamp.limit, self.clamp.alpha)

    def _projected(self, rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
        out = self.product(rows, weight, ends)
        if bias is None:
            return out
        places = torch.arange(len(rows), device=rows.device, dtype=ends.dtype)
        # one more for the rows after the last end, whose gradients mean nothing
        return out + F.pad(bias, (0, 0, 0, 1))[torch.searchsorted(ends, places, right=True)]


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row by the matrix of its group, without padding.

    Uses `torch._grouped_mm`, which does not wait for the device, if it supports this device, dtype and these
    sizes; otherwise multiplies group by group, which waits.

    Args:
        rows: [R, I], sorted by group.
        weight: [E, O, I].
        ends: [E] int32, where the rows of each group end.

    Returns:
        [R, O]; values after the last end and their gradients mean nothing.
    """
    aligned = all(size * rows.element_size() % ALIGNMENT_BYTES == 0 for size in weight.shape[1:])
    if aligned and len(rows) and _runs_grouped(rows.device.type, rows.dtype):
        return torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)  # pyright: ignore
    return _Grouped.apply(rows, weight, ends.tolist())


ALIGNMENT_BYTES = 16
"""Rows of matrices of `torch._grouped_mm` start at multiples of this."""


@cache
def _runs_grouped(device: str, dtype: torch.dtype) -> bool:
    """Whether `torch._grouped_mm` computes products and their gradients; tried once.

    It supports float32 from torch 2.14 on and float64 nowhere. The trial runs without autograd and modes,
    since it may be inside activation checkpointing, which records saved tensors and products.
    """
    try:
        with torch.no_grad(), _disable_current_modes():
            rows, weight = (
                torch.ones(shape, device=device, dtype=dtype) for shape in ((16, 16), (2, 16, 16))
            )
            ends = torch.tensor([8, 16], device=device, dtype=torch.int32)
            out = torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)  # pyright: ignore
            torch._grouped_mm(out, weight, offs=ends)  # pyright: ignore
            torch._grouped_mm(out.t(), rows, offs=ends)  # pyright: ignore
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return True


def _groups(ends: list[int]) -> Iterator[tuple[int, slice]]:
    """Yield the index and the rows of each group that has rows."""
    for index, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if end > start:
            yield index, slice(start, end)


def _room_for_gradient(weight: Tensor, ends: list[int]) -> Tensor:
    """Allocate a gradient like `weight` [E, ...]: zeros for groups without rows, the rest uninitialized."""
    room = torch.empty_like(weight)
    for index, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if end == start:
            room[index].zero_()
    return room


class _GatedSilu(torch.autograd.Function):
    """w_down(silu(w_gate x) * w_up x), expert by expert, for a CPU, whose cache holds the rows of one expert.

    Besides the result, it writes only w_gate x and w_up x of all rows to memory: on a CPU new memory costs
    about as much as the products.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, ends: list[int]
    ) -> Tensor:
        gate, up = (rows.new_empty(len(rows), w_up.shape[1]) for _ in range(2))
        out = torch.empty_like(rows)
        for index, part in _groups(ends):
            x, g, u = rows[part], gate[part], up[part]
            torch.mm(x, w_gate[index].t(), out=g)
            torch.mm(x, w_up[index].t(), out=u)
            torch.mm(F.silu(g).mul_(u), w_down[index].t(), out=out[part])
        ctx.save_for_backward(rows, w_gate, w_up, w_down, gate, up)
        ctx.ends = ends
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, w_gate, w_up, w_down, gate, up = ctx.saved_tensors
        of_rows = torch.empty_like(rows)
        of_gate, of_up, of_down = (_room_for_gradient(w, ctx.ends) for w in (w_gate, w_up, w_down))
        for index, part in _groups(ctx.ends):
            x, g, u, coming = rows[part], gate[part], up[part], gradient[part]
            act, of_hidden = F.silu(g), coming @ w_down[index]
            torch.mm(coming.t(), act * u, out=of_down[index])
            of_u = act.mul_(of_hidden)
            of_g = torch.ops.aten.silu_backward(of_hidden.mul_(u), g)
            torch.mm(of_u.t(), x, out=of_up[index])
            torch.mm(of_g.t(), x, out=of_gate[index])
            into = torch.mm(of_u, w_up[index], out=of_rows[part])
            torch.addmm(into, of_g, w_gate[index], out=into)
        return of_rows, of_gate, of_up, of_down, None


class _Grouped(torch.autograd.Function):
    """One product per group, written directly into the result."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: list[int]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.ends = ends
        out = rows.new_empty(len(rows), weight.shape[1])
        for index, part in _groups(ends):
            torch.mm(rows[part], weight[index].t(), out=out[part])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        of_rows, of_weight = torch.empty_like(rows), _room_for_gradient(weight, ctx.ends)
        for index, part in _groups(ctx.ends):
            torch.mm(gradient[part], weight[index], out=of_rows[part])
            torch.mm(gradient[part].t(), rows[part], out=of_weight[index])
        return of_rows, of_weight, None
