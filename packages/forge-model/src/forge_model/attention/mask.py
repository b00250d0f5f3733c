"""Which keys a query may see, and softmax attention over them.

A `Mask` is a description; `Attend.resolve` of the function that computes attention derives its own form from
it, once per forward pass and window. Another function, for example for context parallelism, can replace the
attribute `attend` of attention modules. B batch, T queries, S keys, N heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_model.compiled_calls import call_compiled

BLOCK = 128
"""Number of tokens in a block of FlexAttention."""

FLEX_WIDTH = 16
"""The smallest head width for which FlexAttention has kernels."""

FLEX_COMPILATIONS = 64
"""How often FlexAttention is compiled in a process, outside of compiled blocks."""


@dataclass(frozen=True)
class LastKeys:
    """A replacement for a mask if every query sees the last keys of its row, like one query after a cache.

    Attributes:
        most: number of keys that are seen; None means all. Earlier keys need not be read.
    """

    most: int | None

    def of(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the visible part of each tensor [B, K, S, H]."""
        return tensors if self.most is None else tuple(one[:, :, -self.most :] for one in tensors)


@dataclass(frozen=True)
class Mask:
    """What tokens see in all layers of a forward pass: earlier tokens of their document, except padding.

    A token also sees later tokens if attention is not causal or both are in the same span.

    Tokens are counted from the start of their row, beginning with the tokens in the cache.

    Attributes:
        tokens: number T of queries.
        device: device of the attention.
        doc_ids: [B, S] integer, document ids of all keys; a token sees only tokens with its own id.
        cached: number of keys before the first query.
        padding: [B] integer, number of padding tokens at the left of each row.
        span_ids: [B, S] integer, span ids of all keys; tokens with the same id other than 0 see each other in
            both directions, also beyond a window.
        causal: whether a token sees no later tokens outside its span. If false, a window reaches to both
            sides.
    """

    tokens: int
    device: torch.device
    doc_ids: Tensor | None = None
    cached: int = 0
    padding: Tensor | None = None
    span_ids: Tensor | None = None
    causal: bool = True

    @property
    def by_row(self) -> Tensor | None:
        """The first tensor by which the masks of rows differ; None if all rows have the same mask."""
        return next((one for one in (self.doc_ids, self.padding, self.span_ids) if one is not None), None)

    def is_plain_causal(self, window: int | None) -> bool:
        """Whether every query sees exactly the keys up to itself."""
        everything = window is None or window >= self.tokens
        return self.causal and everything and self.by_row is None and not self.cached

    def sees_last_keys(self, window: int | None) -> bool:
        """Whether every query sees the last `window` of all keys, such as the next token after a cache."""
        if self.by_row is not None:
            return False
        everything = window is None or window >= self.cached + self.tokens
        return (self.tokens == 1 and self.causal) or (not self.causal and everything)

    def sees(self, row: Tensor | None, query: Tensor, key: Tensor, window: int | None) -> Tensor:
        """Return as bool whether a token sees another; padding sees itself, so that no row is empty.

        Args:
            row: index in the batch; None if all rows have the same mask. All indices broadcast.
            query: index of the token that looks.
            key: index of the token that may be seen.
            window: most tokens that a token sees, itself included.
        """
        visible = key <= query if self.causal else torch.ones_like(key <= query)
        if window is not None:
            visible = visible & (key > query - window)
            if not self.causal:
                visible = visible & (key < query + window)
        if self.span_ids is not None:
            span = self.span_ids[row, query]
            visible = visible | ((span != 0) & (span == self.span_ids[row, key]))
        if self.doc_ids is not None:
            visible = visible & (self.doc_ids[row, query] == self.doc_ids[row, key])
        if self.padding is not None:
            visible = visible & ((key >= self.padding[row]) | (key == query))
        return visible

    def dense(self, window: int | None) -> Tensor:
        """[B or 1, 1, T, S] bool, True where a query sees a key."""
        key = torch.arange(self.cached + self.tokens, device=self.device)
        query = key[self.cached :, None]
        by_row = self.by_row
        row = None if by_row is None else torch.arange(len(by_row), device=self.device)[:, None, None, None]
        visible = self.sees(row, query, key, window)
        return visible if visible.ndim == 4 else visible[None, None]


def flex_blocks(mask: Mask, window: int | None) -> Any:
    """Return the mask for FlexAttention without allocating any [T, T] tensor.

    Whether a block of queries sees none, some or all of a block of keys follows from the least and the
    greatest index and document id in each block. A block that sees none may count as "some", never the
    other way round.
    """
    from torch.nn.attention.flex_attention import BlockMask

    assert mask.padding is None
    before = mask.cached

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask.sees(row, query + before, key, window)

    keys, queries = _Blocks(0, before + mask.tokens, mask), _Blocks(before, mask.tokens, mask)
    some, every = _in_reach(keys, queries, window, mask.causal)
    if mask.span_ids is not None:
        (low, high), (own_low, own_high) = keys.ranges(mask.span_ids), queries.ranges(mask.span_ids)
        meet = (low[:, None] <= own_high[:, :, None]) & (high[:, None] >= own_low[:, :, None])
        has, own_has = (low != 0) | (high != 0), (own_low != 0) | (own_high != 0)
        some = some | (meet & has[:, None] & own_has[:, :, None])
    if mask.doc_ids is not None:
        (low, high), (own_low, own_high) = keys.ranges(mask.doc_ids), queries.ranges(mask.doc_ids)
        some = some & (low[:, None] <= own_high[:, :, None]) & (high[:, None] >= own_low[:, :, None])
        every = every & (low == high)[:, None] & (low[:, None] == own_low[:, :, None])
        every = every & (high[:, None] == own_high[:, :, None])
    # as torch does, a block that is cut off at the end is never called full
    every = every & keys.complete & queries.complete[:, None]
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every),
        *_listed(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(mask.tokens, before + mask.tokens),
    )


def _in_reach(keys: _Blocks, queries: _Blocks, window: int | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Whether the queries of a block see some, and see all, keys of a block: two [1, queries, keys] bool."""
    some = (keys.first <= queries.last[:, None])[None]
    every = (keys.last <= queries.first[:, None])[None]
    if not causal:
        some, every = torch.ones_like(some), torch.ones_like(every)
    if window is None:
        return some, every
    some = some & (keys.last > queries.first[:, None] - window)
    every = every & (keys.first > queries.last[:, None] - window)
    if not causal:
        some = some & (keys.first < queries.last[:, None] + window)
        every = every & (keys.last < queries.first[:, None] + window)
    return some, every


class _Blocks:
    """The blocks of the tokens from index `start` on: first and last token of each, [blocks]."""

    def __init__(self, start: int, tokens: int, mask: Mask) -> None:
        self.first = torch.arange(0, tokens, BLOCK, device=mask.device) + start
        self.last = (self.first + BLOCK - 1).clamp(max=start + tokens - 1)
        self.complete = self.first + BLOCK <= start + tokens
        self._start = start

    def ranges(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the greatest of ids [B, S] in each block, [B, blocks]."""
        ids = ids[:, self._start :]
        short = -ids.shape[1] % BLOCK
        padded = torch.cat([ids, ids[:, -1:].expand(-1, short)], 1)
        blocks = padded.unflatten(1, (-1, BLOCK))
        return blocks.amin(-1), blocks.amax(-1)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[B or 1, Q, K] bool -> number of key blocks for each query block, and their indices, int32."""
    counts = blocks.sum(-1, dtype=torch.int32)
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[:, None].contiguous(), order[:, None].contiguous()


class Attend(Protocol):
    """A way to compute softmax attention: the attribute `attend` of an attention module."""

    def resolve(self, mask: Mask, window: int | None) -> Any:
        """Return what `__call__` needs of the mask; called outside of compiled blocks, once per window."""
        ...

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, resolved: Any, scale: float | None = None
    ) -> Tensor:
        """Compute softmax attention.

        Modules that need more pass it by keyword; an implementation without that keyword fails:
        `softcap` (float): scores become softcap * tanh(score / softcap); `sinks` [N]: the score of one more
        key, which every query of a head sees and which has no value.

        Args:
            query: [B, N, T, H].
            key: [B, K, S, H], K divides N.
            value: [B, K, S, H]; its width may differ from H.
            resolved: result of `resolve`.
            scale: factor on the scores; absent means 1/sqrt(H).

        Returns:
            [B, N, T, width of value].
        """
        ...


class SoftmaxAttention:
    """Scaled dot-product attention of torch; FlexAttention on CUDA if the mask is not plain causal.

    Attributes:
        by_blocks: true; attention of the mask (with sinks, if given) by one block of keys after another may
            replace this one.
    """

    by_blocks: ClassVar[bool] = True

    def resolve(self, mask: Mask, window: int | None) -> Any:
        """Return None for plain causal attention, `LastKeys`, a block mask of FlexAttention, or a mask.

        The latter is [B or 1, 1, T, S] bool.
        """
        if mask.is_plain_causal(window):
            return None
        if mask.sees_last_keys(window):
            return LastKeys(window)
        return flex_blocks(mask, window) if suits_flex(mask) else mask.dense(window)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, resolved: Any, scale: float | None = None
    ) -> Tensor:
        """See `Attend.__call__`."""
        # a branch: while compiling, where blocks differ in heads, the comparison by itself is a symbol
        grouped = {"enable_gqa": True} if key.shape[1] != query.shape[1] else {}
        if isinstance(resolved, LastKeys):
            key, value = resolved.of(key, value)
        if resolved is None or isinstance(resolved, Tensor | LastKeys):
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=resolved if isinstance(resolved, Tensor) else None,
                is_causal=resolved is None,
                scale=scale,
                **grouped,
            )
        return attend_flex(query, key, value, resolved, scale)


softmax_attention: Attend = SoftmaxAttention()
"""The default `attend` of attention modules."""


def suits_flex(mask: Mask) -> bool:
    """Whether FlexAttention can compute it: on CUDA, no padding, not just a few queries after a cache."""
    return mask.device.type == "cuda" and mask.padding is None and (not mask.cached or mask.tokens >= BLOCK)


def attend_flex(
    query: Tensor, key: Tensor, value: Tensor, blocks: Any, scale: float | None, **options: Any
) -> Any:
    """Compute FlexAttention, compiled here unless it is in a compiled block; eager, it allocates all scores.

    Heads narrower than its kernels support are padded with zeros, which change no score.
    """
    from torch.nn.attention.flex_attention import flex_attention

    grouped, width = key.shape[1] != query.shape[1], value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = (_at_least(FLEX_WIDTH, one) for one in (query, key, value))
    options |= {"block_mask": blocks, "scale": scale, "enable_gqa": grouped}
    if torch.compiler.is_compiling():
        found = flex_attention(query, key, value, **options)
    else:
        compiled = _compiled_flex()
        found = call_compiled("FlexAttention was", compiled, FLEX_COMPILATIONS, query, key, value, **options)
    if value.shape[-1] == width:
        return found
    return (found[0][..., :width], *found[1:]) if isinstance(found, tuple) else found[..., :width]


def _at_least(width: int, heads: Tensor) -> Tensor:
    """Pad heads [..., H] with zeros to a width; wider heads stay as they are."""
    missing = width - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing > 0 else heads


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # whole: what cannot be compiled is an error, and not slow
    return torch.compile(flex_attention, fullgraph=True)
