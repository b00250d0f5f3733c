"""How does a captured value become rows?

Letters: B samples, T tokens, P places that are no tokens (patches of an image), R rows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forge_interp.errors import InterpError, check_kind, kind_of
from forge_interp.extraction.run.parts import ROW_COLUMNS, is_site
from forge_interp.extraction.samples import Batch
from forge_interp.hooks.sites import ATTENTION_TENSORS, Site

Pool = str | Callable[[Tensor, Tensor], Tensor]
POOLS = ("mean", "last", "first", "max")


class RowMaker:
    """Turns the values of a batch into rows: one for each valid token, or with `pool` one for each sample.

    Attributes:
        square: number of values of this batch with equally many tokens and samples, whose order is unclear.
    """

    def __init__(
        self,
        select: Mapping[str, Callable[[Tensor], Tensor]],
        pool: Pool | None,
        dtype: torch.dtype | None,
        keep: Sequence[str] = (),
        foreign: Mapping[str, str] | None = None,
        where: str | None = None,
    ) -> None:
        if pool is not None and not callable(pool) and pool not in POOLS:
            raise InterpError(f"pool is {pool!r}; expected one of {', '.join(POOLS)}, a callable, or None")
        for name in keep:
            check_kind("an entry of keep", name, str, "the name of an entry of the batches")
        if wrong := [name for name in keep if is_site(name) or name in ROW_COLUMNS]:
            raise InterpError(f"keep names {wrong[0]!r}; expected entries of the batches, by other names")
        self._select, self._pool, self._dtype, self._names = select, pool, dtype, tuple(keep)
        self._where = where  # an entry [B, T] that is nonzero where a token is wanted
        self._foreign = foreign or {}  # why rows at a pattern are not those of the ids
        self.square = 0
        self._batch: Batch
        self._layout: tuple[int, ...] = ()  # of the rows of this batch, [B] or [B, T]
        self._first = ""  # the pattern that has settled it
        self._indices: dict[torch.device, Tensor] = {}

    def start(self, batch: Batch) -> None:
        """Begin the next batch."""
        self._batch, self._layout, self._indices, self.square = batch, (), {}, 0

    def rows(self, pattern: str, value: Tensor) -> Tensor:
        """Turn a value captured at a site of `pattern` into rows [R, ...], on the same device.

        Without a `select`, attention tensors [B, N, T, ...] become [B, T, N, ...]. InterpError where rows are
        neither samples nor tokens, or differ from those of earlier sites.
        """
        if pattern in self._select:
            value = self._select[pattern](value)
        elif ":attn." in pattern:
            value = _by_token(pattern, value)
        if value.is_nested:
            raise InterpError(
                f"{pattern} has a nested tensor; expected [samples, tokens, ...]: give nn.TransformerEncoder "
                "enable_nested_tensor=False, or select=lambda value: value.to_padded_tensor(0.0)"
            )
        size = self._batch.size
        self.square += value.ndim >= 2 and ":attn." not in pattern and value.shape[0] == value.shape[1]
        if not value.ndim or len(value) != size:
            raise InterpError(
                f"{pattern} has a value {list(value.shape)} for {size} samples; expected [samples, ...]: "
                "bring the samples to the front with select"
            )
        if value.ndim >= 3 and self._batch.tokens is not None and pattern in self._foreign:
            raise InterpError(self._foreign[pattern])
        if callable(self._pool):
            value = self._pooled(self._pool, pattern, value)
        elif value.ndim >= 3:
            value = self._tokens(pattern, value)
        elif self._where is not None:
            raise InterpError(
                f"{pattern} has a value {list(value.shape)}, a row a sample; expected [samples, tokens, "
                f"...], of which where={self._where!r} takes tokens: leave out where"
            )
        else:
            self._settle(pattern, (size,))
        return value if self._dtype is None else _cast(pattern, value, self._dtype)

    def samples(self) -> Tensor:
        """Return sample_id [R] int64 of the rows of this batch."""
        samples = torch.arange(self._batch.first, self._batch.first + self._batch.size)
        return self._by_row(samples)

    def ids(self) -> dict[str, Tensor]:
        """Return sample_id, position and token_id [R] int64 of this batch's rows, and the kept entries."""
        if not self._layout:
            return {}
        tokens, position = torch.full(self._layout, -1), torch.full(self._layout, -1)
        if len(self._layout) == 2:
            position = self._valid(self._layout).long().cumsum(1) - 1
            if self._batch.tokens is not None and self._batch.tokens.shape == self._layout:
                tokens = self._batch.tokens.long()
        found = {"sample_id": self.samples()}
        found |= {"position": self._by_row(position), "token_id": self._by_row(tokens)}
        for name in self._names:
            value = self._entry(name)
            if not isinstance(value, Tensor) or value.shape not in (self._layout, self._layout[:1]):
                raise InterpError(
                    f"keep names {name!r}, which is {kind_of(value)} in this batch; expected an entry "
                    f"[samples, tokens] or [samples], {list(self._layout)}, that has a value for each row"
                )
            found[name] = self._by_row(value.cpu())
        return found

    def _entry(self, name: str) -> Any:
        return self._batch.inputs.get(name) if isinstance(self._batch.inputs, Mapping) else None

    def _by_row(self, value: Tensor) -> Tensor:
        """Spread a value [B, T] or [B] over the rows."""
        if len(self._layout) == 1:
            return value
        value = value if value.ndim == 2 else value[:, None].expand(self._layout)
        return value[self._keep(self._layout)]

    def _pooled(self, pool: Callable[[Tensor, Tensor], Tensor], pattern: str, value: Tensor) -> Tensor:
        self._settle(pattern, (self._batch.size,))
        value = pool(value, self._keep(tuple(value.shape[:2])).to(value.device))
        if not isinstance(value, Tensor) or value.shape[:1] != (self._batch.size,):
            raise InterpError(
                f"pool gave {kind_of(value)} for {pattern}; expected [{self._batch.size} samples, ...]"
            )
        return value

    def _tokens(self, pattern: str, value: Tensor) -> Tensor:
        """Return the rows of a value [B, T, ...]."""
        batch, layout = self._batch, tuple(value.shape[:2])
        for name, ids in (("tokens", batch.tokens), ("a mask", batch.mask)):
            if ids is not None and layout != ids.shape:
                raise InterpError(
                    f"{pattern} has a value {list(value.shape)} for {name} {list(ids.shape)}; expected "
                    "[samples, tokens, ...]: bring it there with select, name its ids with tokens= and "
                    "mask= (tokens=None: its places are no tokens), or pool it with a callable"
                )
        if batch.tokens is None and value.ndim > 3:
            raise InterpError(
                f"{pattern} has a value {list(value.shape)} and the inputs have no tokens; expected [samples,"
                " places, features]: flatten it with select, e.g. lambda v: v.flatten(2).mT"
            )
        self._settle(pattern, layout if self._pool is None else (batch.size,))
        if self._pool is None and batch.mask is None and self._where is None:
            return value.flatten(0, 1)
        keep = self._keep(layout)
        if self._pool is None:
            if value.device not in self._indices:
                self._indices[value.device] = keep.flatten().nonzero()[:, 0].to(value.device)
            return value.flatten(0, 1).index_select(0, self._indices[value.device])
        for empty in (~keep.any(1)).nonzero()[:1, 0].tolist():
            what = "valid token" if self._where is None else f"token with {self._where!r}"
            number = batch.first + empty
            raise InterpError(f"sample {number} has no {what} to pool; expected at least one: drop it")
        return pool_tokens(value, keep.to(value.device), str(self._pool))

    def _keep(self, layout: tuple[int, ...]) -> Tensor:
        """[B, T] bool: the tokens that become rows or are pooled."""
        if self._where is None:
            return self._valid(layout)
        wanted = self._entry(self._where)
        if not isinstance(wanted, Tensor) or wanted.shape != layout:
            raise InterpError(
                f"where names {self._where!r}, which is {kind_of(wanted)} in this batch; expected an entry "
                f"[samples, tokens] {list(layout)} that is nonzero where a token is wanted"
            )
        return self._valid(layout) & (wanted.cpu() != 0)

    def _valid(self, layout: tuple[int, ...]) -> Tensor:
        """[B, T] bool: the tokens that are no padding."""
        mask = self._batch.mask
        return mask if mask is not None and mask.shape == layout else torch.ones(layout, dtype=torch.bool)

    def _settle(self, pattern: str, layout: tuple[int, ...]) -> None:
        """Raise InterpError unless all sites have the same rows."""
        if not self._layout:
            self._layout, self._first = layout, pattern
        if layout != self._layout:
            kinds = ["samples" if len(x) == 1 else "tokens" for x in (layout, self._layout)]
            raise InterpError(
                f"{pattern} has rows of {kinds[0]} {list(layout)}, {self._first} of {kinds[1]} "
                f"{list(self._layout)}; expected the same for all sites: extract them in two calls, or pool"
            )


def _by_token(pattern: str, value: Tensor) -> Tensor:
    """Turn [B, N, T, ...] of attention into [B, T, N, ...]."""
    name = Site.parse(pattern).path[0]
    if value.ndim != (4 if name in ATTENTION_TENSORS else 3):
        raise InterpError(
            f"{pattern} has a value {list(value.shape)} of a call with queries of three dimensions; expected "
            "[samples, heads, tokens, ...]: say with select which are samples and tokens, lambda value: value"
        )
    return value.movedim(2, 1)


def pool_tokens(value: Tensor, keep: Tensor, how: str) -> Tensor:
    """Reduce [B, T, ...] to [B, ...] over the valid tokens; padding may be on either side.

    `keep` is [B, T] bool, at least one in each row; `how` is mean (in float32 or wider, returned in the dtype
    of `value`), max, first or last.
    """
    if how in ("first", "last"):
        places = torch.arange(keep.shape[1], device=keep.device)
        index = places.where(keep, -1).amax(1) if how == "last" else keep.long().argmax(1)
        return value[torch.arange(len(value), device=keep.device), index]
    mask = keep.view(*keep.shape, *[1] * (value.ndim - 2))
    if how == "max":
        low = -torch.inf if value.is_floating_point() else torch.iinfo(value.dtype).min
        return value.masked_fill(~mask, low).amax(1)
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    mean = value.masked_fill(~mask, 0).sum(1, dtype=wide) / mask.sum(1)
    return mean.to(value.dtype) if value.is_floating_point() else mean


def _cast(pattern: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert; raise InterpError where a number is too large for a narrow dtype."""
    rows = value.to(dtype)
    if dtype.itemsize < 4 and dtype != torch.bfloat16 and dtype.is_floating_point:
        lost = ~rows.float().isfinite() & value.isfinite()
        if bool(lost.any()):
            raise InterpError(
                f"{pattern} has {float(value[lost].abs().max()):.4g}, which {dtype} cannot hold; expected "
                "smaller values: give dtype=torch.bfloat16 or float32, or scale with select"
            )
    return rows
