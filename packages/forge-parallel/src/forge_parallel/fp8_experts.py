"""Layers of experts that multiply in 8-bit floats. R rows, E experts, O outputs, I inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from forge_parallel.error import ParallelError
from forge_parallel.fp8_config import FP8Config
from forge_parallel.match import find, matches
from forge_parallel.plan import Plan

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""([R, I] rows, [E, O, I] weight, [E] ends) -> [R, O]: each row times the matrix of its group."""

FORMAT = torch.float8_e4m3fn


def use_fp8_in_experts(model: nn.Module, plan: Plan, config: FP8Config, multiple: int) -> list[str]:
    """Let experts multiply in 8 bits, in place: replaces their attribute `product`, and pads their rows.

    Args:
        model: best on the meta device.
        plan: uses `experts`.
        config: the section `[fp8]`.
        multiple: the number that inputs and outputs must be multiples of.

    Returns:
        The names of these modules; modules that are too small or excluded stay as they are.

    Raises:
        ParallelError: experts have no `product`.
    """
    chosen = []
    for name, layer in (item for pattern in plan.experts for item in find(model, pattern).items()):
        experts: Any = layer.get_submodule("experts")
        if not hasattr(experts, "product"):
            raise ParallelError(
                f"fp8.experts = true, and {name}.experts, a {type(experts).__name__}, has no attribute "
                "`product` that could be replaced; set it to false"
            )
        sizes = [
            size for parameter in experts.parameters() if parameter.ndim == 3 for size in parameter.shape[1:]
        ]
        excluded = any(matches(pattern, f"{name}.experts") for pattern in (*plan.no_fp8, *config.exclude))
        if excluded or min(sizes) < config.min_size or any(size % multiple for size in sizes):
            continue
        if config.recipe == "rowwise" and config.emulate:
            experts.product = _emulated(experts.product)
        else:
            experts.product = _mxfp8(config.emulate) if config.recipe == "mxfp8" else _rowwise()
            experts.__class__, experts.multiple = _padding(type(experts)), multiple
        chosen.append(f"{name}.experts")
    return chosen


def _emulated(exact: Product) -> Product:
    return lambda rows, weight, ends: _Rowwise.apply(rows, weight, ends, exact)


def _rowwise() -> Product:
    from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm

    def product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        out = _to_fp8_rowwise_then_scaled_grouped_mm(
            *_in_bf16(rows, weight), ends, pad_token_groups_for_grouped_mm=False
        )
        return out.to(rows.dtype)

    return product


def _mxfp8(emulate: bool) -> Product:
    try:
        from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
    except ImportError as error:
        raise ParallelError(f'fp8.recipe = "mxfp8" needs torchao 0.18: {error}; upgrade it') from None
    kernels = KernelPreference.EMULATED if emulate else KernelPreference.AUTO

    def product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        out = _to_mxfp8_then_scaled_grouped_mm(*_in_bf16(rows, weight), ends, kernel_preference=kernels)
        return out.to(rows.dtype)

    return product


def _in_bf16(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cast to bfloat16, as the kernels of torchao need."""
    return rows.to(torch.bfloat16), weight.to(torch.bfloat16).transpose(1, 2)


class Padded(nn.Module):
    """A mixin for experts that pads the rows of each group of all products to a multiple.

    Rows are moved once for all products, and once back. Waits for no device.

    Attributes:
        multiple: the number of rows of a group is a multiple of this.
    """

    multiple: int

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """As before: [R, D] rows, [E] ends -> [R, D]."""
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        room = (counts + self.multiple - 1) // self.multiple * self.multiple
        new_ends = room.cumsum(0).to(ends.dtype)
        # how far each group moves, and what lies after the last one
        moved = torch.cat([new_ends - room - (ends - counts), new_ends[-1:] - ends[-1:]])
        places = torch.arange(len(rows), device=rows.device) + moved[_groups(rows, ends)]
        most = -(-(len(rows) + len(ends) * (self.multiple - 1)) // self.multiple) * self.multiple
        wide = rows.new_zeros(most, rows.shape[1]).index_copy(0, places, rows)
        return super().forward(wide, new_ends).index_select(0, places)  # type: ignore[misc]


@cache
def _padding(base: type[nn.Module]) -> type[nn.Module]:
    """Return one class for all experts of a kind, so that compiled blocks share their code."""
    return type(base.__name__, (Padded, base), {"__module__": base.__module__})


class _Rowwise(torch.autograd.Function):
    """The products of `torchao` on a GPU, rounded to 8 bits and computed in high precision.

    Each row of each factor of a product has a scale, a power of two; in the product for the gradient of the
    weights, each column of the rows of a group has one.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor, exact: Product) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        ctx.exact = exact
        return exact(rounded(rows, 1), rounded(weight, 2), ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weight, ends = ctx.saved_tensors
        turned = rounded(weight, 1).transpose(1, 2).contiguous()
        of_rows = ctx.exact(rounded(gradient, 1), turned, ends)
        with torch.enable_grad():
            factor = torch.zeros_like(weight).requires_grad_()
            out = ctx.exact(_rounded_by_group(rows, ends), factor, ends)
            (of_weight,) = torch.autograd.grad(out, factor, _rounded_by_group(gradient, ends))
        return of_rows, of_weight, None, None


def rounded(x: Tensor, dim: int) -> Tensor:
    """Round values to 8 bits and back, with one scale along `dim`."""
    return _rounded(x, x.abs().amax(dim, keepdim=True))


def _rounded(x: Tensor, largest: Tensor) -> Tensor:
    top = torch.finfo(FORMAT).max
    scale = torch.exp2(torch.floor(torch.log2(top / largest.double().clamp(min=1e-12)))).to(x.dtype)
    return (x * scale).clamp(-top, top).to(FORMAT).to(x.dtype) / scale


def _rounded_by_group(x: Tensor, ends: Tensor) -> Tensor:
    """Round with one scale for each column of each group of rows."""
    parts = torch.tensor_split(x.abs(), ends.tolist())
    largest = torch.stack([part.amax(0) if len(part) else x.new_zeros(x.shape[1]) for part in parts])
    return _rounded(x, largest[_groups(x, ends)])


def _groups(rows: Tensor, ends: Tensor) -> Tensor:
    """Return [R] the group of each row; E for rows after the last end."""
    places = torch.arange(len(rows), device=rows.device, dtype=ends.dtype)
    return torch.searchsorted(ends, places, right=True)
