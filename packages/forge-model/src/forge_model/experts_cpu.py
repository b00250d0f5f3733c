"""Experts by few rows at a time: what they make stays in the cache of a CPU.

N tokens, R pairs of a token and an expert, n of a block, E experts, D model dim, F ffn dim, I: F, or 2 F with
gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

Unit = Callable[[Tensor | None, Tensor], Tensor]
"""Of [n, F] gates, if there are, and as many values."""

BLOCK_ROWS = 1024
"""Experts are taken together until they have so many rows: fewer calls, and still what a cache holds."""


class Block(NamedTuple):
    """Experts next to each other.

    Attributes:
        experts: those that have rows.
        counts: of their rows.
        rows: where these are.
    """

    experts: list[int]
    counts: list[int]
    rows: slice


class Weights(NamedTuple):
    """Those of all experts, or their gradients: gates and up [E, F, D], down [E, D, F], and their biases."""

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None

    def inward(self, expert: int) -> Tensor:
        """[I, D] gate and up in one, for fewer and larger products."""
        return self.up[expert] if self.gate is None else torch.cat([self.gate[expert], self.up[expert]])

    def inner_bias(self, expert: int) -> Tensor | None:
        """[I], or None."""
        if self.up_bias is None or self.gate_bias is None:
            return None if self.up_bias is None else self.up_bias[expert]
        return torch.cat([self.gate_bias[expert], self.up_bias[expert]])

    def put_inward(self, expert: int, gradient: Tensor, x: Tensor) -> None:
        """Write the gradients of what `inward` and `inner_bias` put together: of [n, I] and of [n, D]."""
        if self.gate is None:
            torch.mm(gradient.t(), x, out=self.up[expert])
        else:
            gate, up = torch.mm(gradient.t(), x).chunk(2)
            self.gate[expert].copy_(gate)
            self.up[expert].copy_(up)
        if self.up_bias is not None:
            *gate, up = gradient.sum(0).chunk(1 if self.gate_bias is None else 2)
            self.up_bias[expert].copy_(up)
            if self.gate_bias is not None:
                self.gate_bias[expert].copy_(gate[0])


class ByBlocks(torch.autograd.Function):
    """Weighted sums of what feed-forwards of one shape make of tokens."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tokens: Tensor, scale: Tensor, ends: list[int], unit: Unit, *given: Tensor | None
    ) -> Tensor:
        """[N, D] -> [N, D].

        Args:
            ctx: of autograd.
            x: [N, D].
            tokens: [R], those of the first expert first; those after the last end are not served.
            scale: [R] of what an expert makes of a token.
            ends: [E].
            unit: the nonlinearity.
            given: the fields of `Weights`.
        """
        weights = Weights(*given)  # type: ignore[arg-type]
        width = weights.up.shape[1] * (1 if weights.gate is None else 2)
        kept, out = x.new_empty(len(tokens), width), torch.zeros_like(x)
        for block in _blocks(ends):
            here, factor, inner = tokens[block.rows], scale[block.rows, None], kept[block.rows]
            rows = x.index_select(0, here)
            for expert, part, into in _each(block, rows, inner):
                torch.mm(part, weights.inward(expert).t(), out=into)
                if (bias := weights.inner_bias(expert)) is not None:
                    into.add_(bias)
            hidden = _hidden(unit, inner, weights).mul_(factor)
            for expert, part, into, of_row in _each(block, hidden, rows, factor):
                torch.mm(part, weights.down[expert].t(), out=into)
                if weights.down_bias is not None:
                    into.addcmul_(of_row, weights.down_bias[expert])
            out.index_add_(0, here, rows)
        ctx.save_for_backward(x, tokens, scale, kept, *given)
        ctx.ends, ctx.unit = ends, unit
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Gradients of tokens, scales and weights."""
        x, tokens, scale, kept, *given = ctx.saved_tensors
        weights = Weights(*given)
        found = Weights(*(w if w is None else torch.empty_like(w) for w in given))  # type: ignore[arg-type]
        of_x, of_scale = torch.zeros_like(x), torch.zeros_like(scale)
        for block in _blocks(ctx.ends):
            here, factor = tokens[block.rows], scale[block.rows, None]
            rows, coming = x.index_select(0, here), gradient.index_select(0, here)
            inner = kept[block.rows].detach().requires_grad_()
            with torch.enable_grad():
                hidden = _hidden(ctx.unit, inner, weights)
            through, made = torch.empty_like(hidden), hidden.detach()
            of_rows = of_scale[block.rows]
            for expert, part, into, one, row, sums in _each(block, coming, through, made, factor, of_rows):
                torch.mm(part, weights.down[expert], out=into)
                torch.mm(part.t(), one * row, out=found.down[expert])
                if weights.down_bias is not None and found.down_bias is not None:
                    sums.copy_(part @ weights.down_bias[expert])
                    torch.mm(part.t(), row, out=found.down_bias[expert, :, None])
            of_rows += (through * made).sum(1)
            (of_inner,) = torch.autograd.grad(hidden, inner, through.mul_(factor))
            for expert, part, row, into in _each(block, of_inner, rows, coming):
                found.put_inward(expert, part, row)
                torch.mm(part, weights.inward(expert), out=into)
            of_x.index_add_(0, here, coming)
        for expert in _idle(ctx.ends):
            for one in found:
                if one is not None:
                    one[expert].zero_()
        return of_x, None, of_scale, None, None, *found


def _hidden(unit: Unit, inner: Tensor, weights: Weights) -> Tensor:
    """[n, I] -> [n, F]."""
    return unit(None, inner) if weights.gate is None else unit(*inner.chunk(2, -1))


def _each(block: Block, *of_rows: Tensor) -> Iterator[tuple[Any, ...]]:
    """Each expert of a block, with its part of tensors with a row for each of its pairs."""
    return zip(block.experts, *(x.split(block.counts) for x in of_rows), strict=True)


def _blocks(ends: list[int]) -> Iterator[Block]:
    """Experts that have rows, some at a time."""
    experts: list[int] = []
    counts: list[int] = []
    first = 0
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if end > start:
            experts.append(expert)
            counts.append(end - start)
        if experts and (end - first >= BLOCK_ROWS or expert == len(ends) - 1):
            yield Block(experts, counts, slice(first, end))
            experts, counts, first = [], [], end


def _idle(ends: list[int]) -> list[int]:
    """Experts without rows."""
    return [e for e, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)) if start == end]
