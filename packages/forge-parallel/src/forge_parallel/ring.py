"""Attention over several ranks by messages: blocks of keys travel while the block before is computed.

Each rank has two pieces of a sequence (see `forge_parallel.context_parallel.Cut`). In step s it receives
keys and values from the rank s before it, only of the pieces that its own tokens attend to; their gradients
go back the same way. B batch, N query heads, K heads of keys and values, R ranks, W tokens of a piece, H
head dim, V width of a value.

Source: Ring Attention, Liu et al. 2023, arXiv:2310.01889. Here the owner of a block sends it to each rank
that attends to it, which is less traffic than passing all blocks around. Two pieces, one from each end, give
all ranks equal work (Llama 3, arXiv:2407.21783 section 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_parallel.attention_blocks import Block, attend, gradients, joined

if TYPE_CHECKING:
    from forge_parallel.context_parallel import Cut

TOKENS, HEADS = 2, 1
PIECES = 2
"""Of a rank; see `Cut`."""


class Job(NamedTuple):
    """Pieces of this rank that attend to pieces of another rank, or of itself.

    Attributes:
        queries: range (first, after the last) of the own pieces, of 0, 1, 2.
        keys: range of the other rank's pieces.
        causal: whether some queries do not see all of these keys.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool


def jobs(cut: Cut, rank: int, source: int, reach: int | None) -> list[Job]:
    """Return which pieces of one rank attend to which pieces of another.

    Args:
        cut: a cut into two pieces a rank.
        rank: the rank of the queries.
        source: the rank of the keys.
        reach: the number of pieces before its own that a query may see; None means all.
    """
    mine, theirs = cut.starts(rank), cut.starts(source)
    if reach is None:
        if rank == source:
            return [Job((0, PIECES), (0, PIECES), True)]
        return [Job((0, PIECES), (0, 1), False) if source < rank else Job((1, PIECES), (0, PIECES), False)]
    return [
        Job((i, i + 1), (j, j + 1), True)
        for i, query in enumerate(mine)
        for j, key in reversed(list(enumerate(theirs)))  # its own piece first: every token sees itself
        if 0 <= query - key <= reach
    ]


def needed(found: list[Job]) -> tuple[int, int]:
    """Return the range (first, after the last) of the two pieces that some job reads; empty if none does."""
    return (min((job.keys[0] for job in found), default=0), max((job.keys[1] for job in found), default=0))


@dataclass(frozen=True)
class Around:
    """The tokens that this rank attends to in a pass: the resolved mask of `Ring`.

    Attributes:
        cut: the cut of the sequence.
        width: W.
        window: the number of tokens that a token sees at most, itself included; None means all.
        doc_ids: [B, 2 R W] of the whole sequence; None if all is one document.
    """

    cut: Cut
    width: int
    window: int | None
    doc_ids: Tensor | None

    @cached_property
    def reach(self) -> int | None:
        """The number of pieces before its own that a token may see."""
        return None if self.window is None else -(-(self.window - 1) // self.width)

    def jobs(self, rank: int, source: int) -> list[Job]:
        """See `jobs`."""
        return jobs(self.cut, rank, source, self.reach)

    def places(self, rank: int, pieces: tuple[int, int], device: torch.device) -> Tensor:
        """Return the positions in the sequence of the tokens of some pieces of a rank."""
        each = torch.arange(self.width, device=device)
        return torch.cat([each + start * self.width for start in self.cut.starts(rank)[slice(*pieces)]])

    def visible(self, job: Job, source: int, device: torch.device) -> Tensor | None:
        """Return [B or 1, 1, T, S] bool, the keys each query sees; None where `Block.causal` says it."""
        if self.doc_ids is None and self.window is None:
            return None
        query = self.places(self.cut.ranks.rank, job.queries, device)
        key = self.places(source, job.keys, device)
        before = key <= query[:, None]
        if self.window is not None:
            before &= key > query[:, None] - self.window
        if self.doc_ids is None:
            return before[None, None]
        same = self.doc_ids[:, query, None] == self.doc_ids[:, None, key]
        return (before & same)[:, None]


class _Messages:
    """The messages of one step; `wait` completes them.

    Args:
        cut: names the ranks.
        sent: the target rank and the tensor; None sends nothing.
        received: the source rank and the memory; None receives nothing.
    """

    def __init__(
        self, cut: Cut, sent: tuple[int, Tensor] | None, received: tuple[int, Tensor] | None
    ) -> None:
        self._sent, self._received = sent, received
        asked = ((dist.isend, sent), (dist.irecv, received))
        ops = [dist.P2POp(op, one[1], group=cut.group, group_peer=one[0]) for op, one in asked if one]
        self._works = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> Tensor | None:
        """Return the received tensor, if any."""
        for work in self._works:
            work.wait()
        self._works = []
        return None if self._received is None else self._received[1]


class _Passed:
    """Keys and values side by side, as they travel: [B, K, 2 W, H + V].

    Attributes:
        around: which pieces of which ranks are needed.
        own: keys and values of this rank.
    """

    def __init__(self, around: Around, own: Tensor) -> None:
        self.around, self.own = around, own
        self._rank, self._ranks = around.cut.ranks.rank, around.cut.ranks.size

    def source(self, step: int) -> int:
        """Return the rank whose keys this rank reads in a step."""
        return (self._rank - step) % self._ranks

    def start(self, step: int) -> _Messages:
        """Send this rank's pieces that the rank `step` behind it reads; receive the pieces of `source`."""
        target, source = (self._rank + step) % self._ranks, self.source(step)
        pieces = needed(self.around.jobs(target, self._rank))
        return _Messages(self.around.cut, self._given(target, pieces), self._wanted(source))

    def give_back(self, step: int, gradient: Tensor | None) -> _Messages:
        """Send the gradient of the pieces of `source`; receive the gradient of this rank's pieces."""
        target, source = (self._rank + step) % self._ranks, self.source(step)
        pieces = needed(self.around.jobs(target, self._rank))
        memory = None
        if pieces[1] > pieces[0]:
            memory = target, _empty(self.own, pieces, self.around.width, _wide(self.own.dtype))
        return _Messages(self.around.cut, None if gradient is None else (source, gradient), memory)

    def returned(self, step: int) -> tuple[int, int]:
        """Return the pieces of this rank whose gradient comes back in a step."""
        return needed(self.around.jobs((self._rank + step) % self._ranks, self._rank))

    def _given(self, target: int, pieces: tuple[int, int]) -> tuple[int, Tensor] | None:
        if pieces[0] == pieces[1]:
            return None
        return target, _pieces(self.own, pieces, self.around.width).contiguous()

    def _wanted(self, source: int) -> tuple[int, Tensor] | None:
        pieces = needed(self.around.jobs(self._rank, source))
        if pieces[0] == pieces[1]:
            return None
        return source, _empty(self.own, pieces, self.around.width, self.own.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _pieces(x: Tensor, pieces: tuple[int, int], width: int, first: int = 0) -> Tensor:
    """Return the tokens of some pieces, of a tensor that begins with the piece `first`."""
    return x.narrow(TOKENS, (pieces[0] - first) * width, (pieces[1] - pieces[0]) * width)


def _empty(like: Tensor, pieces: tuple[int, int], width: int, dtype: torch.dtype) -> Tensor:
    shape = list(like.shape)
    shape[TOKENS] = (pieces[1] - pieces[0]) * width
    return torch.empty(shape, dtype=dtype, device=like.device)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    around: Around,
    scale: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the tokens of this rank over those of all ranks. Collective.

    Args:
        query: [B, N, 2 W, H].
        key: [B, K, 2 W, H], K divides N.
        value: [B, K, 2 W, V].
        around: the tokens to attend to.
        scale: factor of the scores; None means 1/sqrt(H).
        sinks: [N] the score of one more key without a value, which every query of a head sees; the gradient
            is that of the queries of this rank.

    Returns:
        [B, N, 2 W, V].
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _Ring.apply(query, torch.cat([key, value], -1), sinks, around, scale)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, both: Tensor, sinks: Tensor | None, around: Around, scale: float
    ) -> Tensor:
        passed, ranks = _Passed(around, both), around.cut.ranks.size
        out = lse = query.new_empty(0)
        here: Tensor | None = both
        for step in range(ranks):
            coming = passed.start(step + 1) if step + 1 < ranks else None
            source = passed.source(step)
            found = around.jobs(around.cut.ranks.rank, source)
            for index, job in enumerate(found):
                assert here is not None
                block = _block(query, here, job, needed(found)[0], around, source, scale)
                made, sums = attend(block)
                made = made.to(_wide(made.dtype))
                if step == 0 and index == 0:
                    out, lse = _begun(made, sums, query, job, around.width)
                    continue
                rows = slice(job.queries[0] * around.width, job.queries[1] * around.width)
                out[:, :, rows], lse[:, :, rows] = joined(out[:, :, rows], lse[:, :, rows], made, sums)
            here = None if coming is None else coming.wait()
        if sinks is not None:
            out, lse = _with_sinks(out, lse, sinks)
        value_width = both.shape[-1] - query.shape[-1]
        ctx.save_for_backward(query, both, sinks, out.to(query.dtype), lse)
        ctx.around, ctx.scale = around, scale
        return out[..., :value_width].to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, both, sinks, out, lse = ctx.saved_tensors
        around, scale = ctx.around, ctx.scale
        grad = F.pad(grad, (0, out.shape[-1] - grad.shape[-1]))
        passed, ranks, width = _Passed(around, both), around.cut.ranks.size, around.width
        wide = _wide(query.dtype)
        of_query = torch.zeros(query.shape, dtype=wide, device=query.device)
        of_own = torch.zeros(both.shape, dtype=wide, device=both.device)
        here: Tensor | None = both
        returning: tuple[int, _Messages] | None = None
        for step in range(ranks):
            coming = passed.start(step + 1) if step + 1 < ranks else None
            source = passed.source(step)
            found = around.jobs(around.cut.ranks.rank, source)
            first = needed(found)[0]
            of_here = of_own if step == 0 else None if here is None else torch.zeros_like(here, dtype=wide)
            for job in found:
                assert here is not None and of_here is not None
                block = _block(query, here, job, first, around, source, scale)
                rows = slice(job.queries[0] * width, job.queries[1] * width)
                parts = gradients(block, out[:, :, rows], lse[:, :, rows], grad[:, :, rows])
                of_query[:, :, rows] += parts[0][..., : query.shape[-1]]
                _pieces(of_here, job.keys, width, first).add_(_side_by_side(parts, query, both))
            _take_back(returning, passed, of_own, width)
            returning = (step, passed.give_back(step, of_here)) if step else None
            here = None if coming is None else coming.wait()
        _take_back(returning, passed, of_own, width)
        of_sinks = None if sinks is None else _of_sinks(sinks, out, lse, grad)
        return of_query.to(query.dtype), of_own.to(both.dtype), of_sinks, None, None


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add the sink [N] of each head to attention over all keys, as one more block without values."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out * (lse - total).exp().unsqueeze(-1), total


def _of_sinks(sinks: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> Tensor:
    """Return [N] the gradient of sinks: of a key with weight exp(sink - lse) and value zero."""
    wide = lse.dtype
    weights = (sinks.to(wide)[:, None] - lse).exp()
    return -(weights * (out.to(wide) * grad.to(wide)).sum(-1)).sum((0, 2)).to(sinks.dtype)


def _begun(made: Tensor, sums: Tensor, query: Tensor, job: Job, width: int) -> tuple[Tensor, Tensor]:
    """Allocate the results of all queries over all keys, with the results of the first job."""
    shape = (*query.shape[:TOKENS], PIECES * width)
    out, lse = made.new_zeros(*shape, made.shape[-1]), sums.new_full(shape, float("-inf"))
    rows = slice(job.queries[0] * width, job.queries[1] * width)
    out[:, :, rows], lse[:, :, rows] = made, sums
    return out, lse


def _block(
    query: Tensor, both: Tensor, job: Job, first: int, around: Around, source: int, scale: float
) -> Block:
    """Return the input of one kernel call: heads of keys repeated, keys and values of equal width."""
    queries = _pieces(query, job.queries, around.width)
    key, value = _pieces(both, job.keys, around.width, first).split(
        [query.shape[-1], both.shape[-1] - query.shape[-1]], -1
    )
    wide = max(key.shape[-1], value.shape[-1])
    heads = query.shape[HEADS] // both.shape[HEADS]
    key, value = (x.repeat_interleave(heads, HEADS) if heads > 1 else x for x in (key, value))
    queries, key, value = (F.pad(x, (0, wide - x.shape[-1])) for x in (queries, key, value))
    visible = around.visible(job, source, query.device)
    return Block(queries, key, value, visible, job.causal and visible is None, scale)


def _side_by_side(parts: tuple[Tensor, Tensor, Tensor], query: Tensor, both: Tensor) -> Tensor:
    """Convert gradients of keys and values of all query heads to the gradient of [B, K, S, H + V]."""
    _, key, value = parts
    width, kv_heads = query.shape[-1], both.shape[HEADS]
    one = torch.cat([key[..., :width], value[..., : both.shape[-1] - width]], -1).to(_wide(both.dtype))
    return one.unflatten(HEADS, (kv_heads, -1)).sum(2) if one.shape[HEADS] != kv_heads else one


def _take_back(returning: tuple[int, _Messages] | None, passed: _Passed, of_own: Tensor, width: int) -> None:
    """Add the gradient that another rank computed for the keys and values of this rank."""
    if returning is None:
        return
    step, messages = returning
    if (given := messages.wait()) is not None:
        _pieces(of_own, passed.returned(step), width).add_(given)
