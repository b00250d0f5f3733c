"""Context parallelism: each rank has a part of the tokens of every sequence, and attention sees all of them.

Inputs are cut where they enter the model, so that data are read, and losses summed, as without it. A
replacement of the attribute `attend` of the attention modules gathers keys and values, sends them block by
block, or exchanges tokens for heads. B batch, T tokens, N query heads, K heads of keys and values, H head
dim, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from forge_parallel.collectives import all_gather, all_to_all
from forge_parallel.config import ContextParallelConfig
from forge_parallel.error import ParallelError
from forge_parallel.match import find
from forge_parallel.mesh import View
from forge_parallel.plan import Plan
from forge_parallel.ring import Around, ring_attention

TOKENS, HEADS = 2, 1
"""Dims of queries, keys and values [B, N, T, H]."""


@dataclass(frozen=True)
class Cut:
    """Which tokens of a sequence each rank has.

    Attributes:
        ranks: number of ranks that share a sequence.
        pieces: number of pieces of each rank. With two, rank r has the r-th piece from the start and the r-th
            from the end, so that under a causal mask all ranks attend to the same number of keys.
    """

    ranks: View
    pieces: int

    def starts(self, rank: int) -> list[int]:
        """Return the indices of the pieces of a rank, of the `pieces` x R equal pieces of a sequence."""
        return [rank] if self.pieces == 1 else [rank, 2 * self.ranks.size - 1 - rank]

    def width(self, tokens: int) -> int:
        """Return the number of tokens of a piece of a sequence.

        Raises:
            ParallelError: the sequence cannot be cut evenly.
        """
        parts = self.pieces * self.ranks.size
        if tokens % parts:
            raise ParallelError(
                f"a sequence of {tokens} tokens cannot be cut into {parts} pieces, {self.pieces} for each of "
                f"the cp = {self.ranks.size} ranks; use a multiple of {parts}"
            )
        return tokens // parts

    def index(self, tokens: int, rank: int, device: torch.device) -> Tensor:
        """Return [T/R] int64: the indices of the tokens of a rank in a sequence of T."""
        width = self.width(tokens)
        pieces = [torch.arange(width, device=device) + start * width for start in self.starts(rank)]
        return torch.cat(pieces)

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Gather `x` of all ranks along `dim`, in sequence order; the gradient is summed. Collective."""
        gathered = all_gather(x, dim, self.group, wide=True)
        if self.pieces == 1:
            return gathered
        starts = [start for rank in range(self.ranks.size) for start in self.starts(rank)]
        pieces = gathered.chunk(len(starts), dim)
        return torch.cat([pieces[starts.index(n)] for n in range(len(starts))], dim)

    @property
    def group(self) -> ProcessGroup:
        """The process group of the ranks."""
        assert self.ranks.group is not None, "a sequence is cut over several ranks"
        return self.ranks.group


@dataclass(frozen=True)
class _Shared:
    """Base of the attention kinds over several ranks.

    Attributes:
        inner: computes attention on one rank.
        cut: which tokens this rank has.
    """

    inner: Any
    cut: Cut

    def require(self, name: str) -> None:
        """Check that this kind computes the same as the inner attention, of a module `name`.

        Raises:
            ParallelError: it does not.
        """

    def require_causal(self, mask: Any) -> None:
        """Check that no token sees later ones.

        Raises:
            ParallelError: one may.
        """
        if getattr(mask, "span_ids", None) is not None or not getattr(mask, "causal", True):
            raise ParallelError(
                'context_parallel.method = "gather" or "ring" gives each rank the keys up to its own tokens, '
                'and a token here sees later ones (spans, or attention that is not causal); use "ulysses"'
            )

    def whole(self, mask: Any) -> Any:
        """Return the description of the mask of whole sequences, from that of the tokens of this rank.

        Raises:
            ParallelError: it has padding or a cache of keys.
        """
        if mask.cached or mask.padding is not None:
            raise ParallelError(
                "context parallelism is for training: it knows no padding and no cache of keys"
            )
        ids = {name: getattr(mask, name, None) for name in ("doc_ids", "span_ids")}
        whole = {name: self.cut.whole(one, 1) for name, one in ids.items() if one is not None}
        return replace(mask, tokens=mask.tokens * self.cut.ranks.size, **whole)


class GatherKeys(_Shared):
    """Keys and values of the whole sequence on each rank, for the queries of its own tokens."""

    def resolve(self, mask: Any, window: int | None) -> list[Any]:
        """Resolve the mask of each piece: its queries are the last ones of a sequence that ends with it.

        Raises:
            ParallelError: a token may see later ones.
        """
        self.require_causal(mask)
        whole = self.whole(mask)
        width = self.cut.width(whole.tokens)
        resolved = []
        for start in self.cut.starts(self.cut.ranks.rank):
            end = (start + 1) * width
            documents = None if whole.doc_ids is None else whole.doc_ids[:, :end]
            piece = replace(whole, tokens=width, cached=start * width, doc_ids=documents)
            resolved.append((end, self.inner.resolve(piece, window)))
        return resolved

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        resolved: list[Any],
        scale: float | None = None,
        **options: Any,
    ) -> Tensor:
        """[B, N, T/R, H], [B, K, T/R, H], [B, K, T/R, ...] -> [B, N, T/R, ...]; options are passed on."""
        both = self.cut.whole(torch.cat([key, value], -1), TOKENS)
        key, value = both.split([key.shape[-1], value.shape[-1]], -1)
        outs = [
            self.inner(piece, key[:, :, :end], value[:, :, :end], mask, scale, **options)
            for piece, (end, mask) in zip(query.chunk(self.cut.pieces, TOKENS), resolved, strict=True)
        ]
        return torch.cat(outs, TOKENS)


class Ulysses(_Shared):
    """The whole sequence on each rank, for a part of the heads."""

    def resolve(self, mask: Any, window: int | None) -> Any:
        """The mask of the inner attention, from that of whole sequences."""
        return self.inner.resolve(self.whole(mask), window)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        resolved: Any,
        scale: float | None = None,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """[B, N, T/R, H], [B, K, T/R, H], [B, K, T/R, ...] -> [B, N, T/R, ...]; options are passed on.

        `sinks` [N] has a number for each head; this rank passes on the numbers of its heads.
        """
        ranks, group = self.cut.ranks.size, self.cut.group
        heads, kv_heads = query.shape[HEADS], lcm(key.shape[HEADS], ranks)
        if heads % kv_heads:
            raise ParallelError(
                f"{heads} query heads and {key.shape[HEADS]} heads of keys cannot be shared by cp = {ranks} "
                'ranks; use context_parallel.method = "gather" or fewer ranks'
            )
        # heads of keys are repeated where there are fewer than ranks
        key, value = (x.repeat_interleave(kv_heads // x.shape[HEADS], HEADS) for x in (key, value))
        query, key, value = (all_to_all(x, HEADS, TOKENS, group) for x in (query, key, value))
        if sinks is not None:
            options["sinks"] = sinks.chunk(ranks)[self.cut.ranks.rank]
        return all_to_all(self.inner(query, key, value, resolved, scale, **options), TOKENS, HEADS, group)


class Ring(_Shared):
    """Keys and values of other ranks, one block after the other; see `forge_parallel.ring`.

    The inner attention must have `by_blocks`, which says that it is plain softmax attention, perhaps with
    sinks, because the kernels for blocks compute nothing else and return the log-sum-exp of each query.
    """

    def require(self, name: str) -> None:
        """See `_Shared.require`."""
        if not getattr(self.inner, "by_blocks", False):
            raise ParallelError(
                f'context_parallel.method = "ring" computes softmax attention alone, and that of {name}, by '
                f'{type(self.inner).__name__}, has more to it, such as a soft cap; use "gather" or "ulysses"'
            )

    def resolve(self, mask: Any, window: int | None) -> Around:
        """Return the tokens that this rank's tokens attend to.

        Raises:
            ParallelError: a token may see later ones.
        """
        self.require_causal(mask)
        whole = self.whole(mask)
        reaches = window if window is not None and window < whole.tokens else None
        return Around(self.cut, self.cut.width(whole.tokens), reaches, whole.doc_ids)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        resolved: Around,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[B, N, T/R, H], [B, K, T/R, H], [B, K, T/R, ...] -> [B, N, T/R, ...]; `sinks` are [N]."""
        return ring_attention(query, key, value, resolved, scale, sinks)


METHODS: dict[str, type[_Shared]] = {"gather": GatherKeys, "ring": Ring, "ulysses": Ulysses}


def context_parallel(model: nn.Module, plan: Plan, ranks: View, config: ContextParallelConfig) -> None:
    """Cut the inputs of a model, and let its attention see the tokens of the other ranks. In place.

    The model then returns results for the tokens of this rank: sum losses over `Mesh.loss`.

    Args:
        model: any module whose attention has an attribute `attend`, as in
            `forge_model.attention.mask.Attend`.
        plan: the flat plan; uses `attention` and `sequence_inputs`.
        ranks: `Mesh.context`.
        config: the section `[context_parallel]`.

    Raises:
        ParallelError: the plan names no attention or inputs, or attention that cannot be replaced.
    """
    if not plan.attention_patterns or not plan.sequence_inputs:
        raise ParallelError(
            f"the plan of {type(model).__name__} has no `attention` or no `sequence_inputs`, which context "
            "parallelism needs; use mesh.cp = 1"
        )
    method, cut = METHODS[config.method], Cut(ranks, config.pieces)
    made: dict[Any, _Shared] = {}
    for name, module in (item for p in plan.attention_patterns for item in find(model, p).items()):
        if not hasattr(module, "attend"):
            raise ParallelError(
                f"{name}, a {type(module).__name__}, has no attribute `attend` that context parallelism "
                "could replace; use mesh.cp = 1"
            )
        inner: Any = module.attend
        method(inner, cut).require(name)
        module.attend = made.setdefault(inner, method(inner, cut))  # type: ignore[assignment]
    model.register_forward_pre_hook(_cutter(cut, plan.sequence_inputs), with_kwargs=True)


def _cutter(cut: Cut, names: list[str]) -> Callable[..., Any]:
    """Return a hook that cuts the inputs [B, T] of a model, and adds the positions of the tokens."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        if len(args) > len(names):
            raise ParallelError(
                f"{len(args)} inputs without a name, and the plan knows {', '.join(names)}; name the others"
            )
        given = dict(zip(names, args, strict=False)) | kwargs
        tokens = given[names[0]]
        index = cut.index(tokens.shape[1], cut.ranks.rank, tokens.device)
        parts = {name: given[name][..., index] for name in names if given.get(name) is not None}
        if given.get("positions") is None:
            given["positions"] = index
        return (), given | parts

    return hook
