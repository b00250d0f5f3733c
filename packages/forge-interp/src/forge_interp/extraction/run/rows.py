"""How does a captured value become rows?

Letters: B samples, T tokens, P places that are no tokens (patches of an image), R rows.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from forge_interp.errors import InterpError, check_kind
from forge_interp.extraction.run.parts import ROW_COLUMNS, is_site
from forge_interp.extraction.samples import Batch
from forge_interp.hooks.sites import ATTENTION_TENSORS, Site

Pool = str | Callable[[Tensor, Tensor], Tensor]
POOLS = ("mean", "last", "first", "max")


class RowMaker:
    """Turns the values of a batch into rows: one for each valid token, or with `pool` one for each sample.

    Attributes:
        square: values of this batch with as many tokens as samples, which may be in each other's place.
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
        self._select = select
        self._pool = pool
        self._dtype = dtype
        for name in keep:
            check_kind("an entry of keep", name, str, "the name of an entry of the batches")
        if wrong := [name for name in keep if is_site(name) or name in ROW_COLUMNS]:
            raise InterpError(f"keep names {wrong[0]!r}; expected entries of the batches, by other names")
        self._names = tuple(keep)
        self._where = where  # an entry [B, T] that is nonzero where a token is wanted
        self._foreign = foreign or {}  # why rows at a pattern are not those of the ids
        self.square = 0
        self._current: Batch
        self._layouts: dict[str, tuple[int, ...]] = {}
        self._indices: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}

    def start(self, batch: Batch) -> None:
        """Go on to the next batch."""
        self._current, self._layouts, self._indices, self.square = batch, {}, {}, 0

    def rows(self, pattern: str, value: Tensor) -> Tensor:
        """Turn what was captured at a site of `pattern` into rows [R, ...], on the same device.

        Without a `select`, attention tensors [B, N, T, ...] are taken as [B, T, N, ...]. InterpError where
        rows are neither samples nor tokens, or others than at the sites before.
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
        batch = self._current
        self.square += value.ndim >= 2 and ":attn." not in pattern and value.shape[0] == value.shape[1]
        if not value.ndim or len(value) != batch.size:
            raise InterpError(
                f"{pattern} has a value {list(value.shape)} for {batch.size} samples; expected [samples, "
                "...]: bring the samples to the front with select"
            )
        if value.ndim >= 3 or callable(self._pool):
            value = self._tokens(pattern, value)
        elif self._where is not None:
            raise InterpError(
                f"{pattern} has a value {list(value.shape)}, a row a sample; expected [samples, tokens, "
                f"...], of which where={self._where!r} takes tokens: leave out where"
            )
        else:
            self._settle(pattern, (batch.size,))
        return value if self._dtype is None else _cast(pattern, value, self._dtype)

    def samples(self) -> Tensor:
        """Return sample_id [R] int64 of the rows of this batch."""
        batch, layout = self._current, next(iter(self._layouts.values()))
        samples = torch.arange(batch.first, batch.first + batch.size)
        return samples if len(layout) == 1 else samples[:, None].expand(layout)[self._keep(layout)]

    def ids(self) -> dict[str, Tensor]:
        """Return sample_id, position and token_id [R] int64 of the rows of this batch, and what is kept."""
        batch = self._current
        layout = next(iter(self._layouts.values()), None)
        if layout is None:
            return {}
        samples = self.samples()
        if len(layout) == 1:
            none = torch.full_like(samples, -1)
            return {"sample_id": samples, "position": none, "token_id": none} | self._kept(layout)
        keep = self._keep(layout)
        has_ids = batch.tokens is not None and batch.tokens.shape == layout
        tokens = batch.tokens.long() if has_ids else torch.full(layout, -1)  # type: ignore[union-attr]
        position = self._valid(layout).long().cumsum(1) - 1
        return {
            "sample_id": samples,
            "position": position[keep],
            "token_id": tokens[keep],
        } | self._kept(layout)

    def _kept(self, layout: tuple[int, ...]) -> dict[str, Tensor]:
        """Inputs [B, T] or [B], by row."""
        found = {}
        for name in self._names:
            value = self._current.inputs.get(name) if isinstance(self._current.inputs, Mapping) else None
            if not isinstance(value, Tensor) or value.shape not in (layout, layout[:1]):
                shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise InterpError(
                    f"keep names {name!r}, which is {shape} in this batch; expected an entry [samples, "
                    f"tokens] or [samples], {list(layout)}: another has no value for each row"
                )
            value = value.cpu()
            if len(layout) == 2:
                rows = value if value.ndim == 2 else value[:, None].expand(layout)
                value = rows[self._keep(layout)]
            found[name] = value
        return found

    def _tokens(self, pattern: str, value: Tensor) -> Tensor:
        """Rows of a value [B, T, ...]."""
        batch, layout = self._current, tuple(value.shape[:2])
        if batch.tokens is not None and pattern in self._foreign and value.ndim >= 3:
            raise InterpError(self._foreign[pattern])
        if callable(self._pool):
            pooled = self._pool(value, self._keep(layout).to(value.device))
            if not isinstance(pooled, Tensor) or pooled.shape[:1] != (batch.size,):
                shape = list(pooled.shape) if isinstance(pooled, Tensor) else type(pooled).__name__
                raise InterpError(f"pool gave {shape} for {pattern}; expected [{batch.size} samples, ...]")
            self._settle(pattern, (batch.size,))
            return pooled
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
        if self._pool is None:
            self._settle(pattern, layout)
            if batch.mask is None and self._where is None:
                return value.flatten(0, 1)
            return value.flatten(0, 1).index_select(0, self._index(layout, value.device))
        self._settle(pattern, (batch.size,))
        keep = self._keep(layout)
        if not bool(keep.any(1).all()):
            empty = batch.first + int((~keep.any(1)).nonzero()[0])
            what = "valid token" if self._where is None else f"token with {self._where!r}"
            raise InterpError(f"sample {empty} has no {what} to pool; expected at least one: drop it")
        return pool_tokens(value, keep.to(value.device), str(self._pool))

    def _keep(self, layout: tuple[int, ...]) -> Tensor:
        """[B, T] bool, which tokens become rows, or are pooled."""
        if self._where is None:
            return self._valid(layout)
        inputs = self._current.inputs
        wanted = inputs.get(self._where) if isinstance(inputs, Mapping) else None
        if not isinstance(wanted, Tensor) or wanted.shape != layout:
            shape = list(wanted.shape) if isinstance(wanted, Tensor) else type(wanted).__name__
            raise InterpError(
                f"where names {self._where!r}, which is {shape} in this batch; expected an entry [samples, "
                f"tokens] {list(layout)} that is nonzero where a token is wanted"
            )
        return self._valid(layout) & (wanted.cpu() != 0)

    def _valid(self, layout: tuple[int, ...]) -> Tensor:
        """[B, T] bool, which tokens are no padding."""
        mask = self._current.mask
        return mask if mask is not None and mask.shape == layout else torch.ones(layout, dtype=torch.bool)

    def _index(self, layout: tuple[int, ...], device: torch.device) -> Tensor:
        if (layout, device) not in self._indices:
            found = self._keep(layout).flatten().nonzero()[:, 0]
            self._indices[layout, device] = found.to(device)
        return self._indices[layout, device]

    def _settle(self, pattern: str, layout: tuple[int, ...]) -> None:
        """All sites share their rows."""
        self._layouts[pattern] = layout
        first, expected = next(iter(self._layouts.items()))
        if layout != expected:
            kinds = ["samples" if len(x) == 1 else "tokens" for x in (layout, expected)]
            raise InterpError(
                f"{pattern} has rows of {kinds[0]} {list(layout)}, {first} of {kinds[1]} {list(expected)}; "
                "expected the same rows for all sites: extract them in two calls, or pool"
            )


def _by_token(pattern: str, value: Tensor) -> Tensor:
    """What attention computed, [B, N, T, ...], as [B, T, N, ...]."""
    name = Site.parse(pattern).path[0]
    if value.ndim != (4 if name in ATTENTION_TENSORS else 3):
        raise InterpError(
            f"{pattern} has a value {list(value.shape)} of a call with queries of three dimensions; expected "
            "[samples, heads, tokens, ...]: say with select which are samples and tokens, lambda value: value"
        )
    return value.movedim(2, 1)


def pool_tokens(value: Tensor, keep: Tensor, how: str) -> Tensor:
    """Reduce [B, T, ...] to [B, ...] over the valid tokens; padding may be on either side.

    `keep` is [B, T] bool, at least one in each row; `how` is mean (in float32 or wider, then back in that of
    `value`), max, first or last.
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
