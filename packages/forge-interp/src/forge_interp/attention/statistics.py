"""How do the heads of an attention call spread their weight, without ever holding all weights?

Letters: B sequences, N query heads, T queries, S keys; b and t are parts of B and T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_interp.attention.tiles import Tile
from forge_interp.errors import InterpError

if TYPE_CHECKING:
    from forge_interp.attention.call import AttentionCall

STATISTICS = ("entropy", "sink", "previous")


def attention_statistics(call: AttentionCall, names: Sequence[str]) -> dict[str, Tensor]:
    """Statistics of the weights of each head at each query, in one pass over tiles of the scores.

    entropy: -sum_s p_s ln p_s in nats; between 0 and ln of the number of visible keys.
    sink: weight on the first key that any query of the sequence may see in this call: key 0, or the first
        token after left padding. (The first key of a sliding cache is no longer the first of the text.)
    previous: lag.1.
    lag.K: weight on the key K before the query's own; with random tokens repeated with period P, lag.(P - 1)
        is the induction score of Olsson et al. 2022, arXiv:2209.11895.

    A value is NaN where it is not defined: the query sees no key at all; there is no such key, or the query
    may not see it (out of its window, of its document); for lag also where the query may not see its own key
    (it is padding). So a padded sequence has the values of the unpadded one. `Tile.own_key` says which key is
    a query's own; in cross-attention there is none, and lag means nothing.

    Returns for each name [B, N, T] in float32, or float64 for a float64 call. No tensor is larger than
    `attention.TILE_BYTES` or N S numbers. InterpError for an unknown name, or dropout.

    Source: sink: Xiao et al. 2023, arXiv:2309.17453.
    """
    call = call.local()
    found, add = collecting(call, names)
    with torch.no_grad():
        for tile in call.tiles():
            add(tile)
    return found


def collecting(call: AttentionCall, names: Sequence[str]) -> tuple[dict[str, Tensor], Callable[[Tile], None]]:
    """Statistics that are NaN as yet, and a function that takes the tiles of the call to fill them in."""
    batch, heads, queries, keys = call.grid
    places = {name: _places(call, name) for name in names if name != "entropy"}
    shape, like = (batch, heads, queries), {"dtype": call.dtype, "device": call.query.device}
    found = {name: torch.full(shape, torch.nan, **like) for name in names}

    def add(tile: Tile) -> None:
        for name in names if keys else ():
            value = _entropy(tile) if name == "entropy" else _weight(tile, places[name](tile), name == "sink")
            found[name][tile.batch, :, tile.queries] = value

    return found, add


class AttentionSummary:
    """Means over queries and sequences of `attention_statistics` of each head, in one pass, mergeable."""

    def __init__(self, names: Sequence[str] = STATISTICS):
        self.names = tuple(names)
        self._sums: dict[str, Tensor] = {}

    @property
    def sites(self) -> list[str]:
        """Those seen so far, in the order of their first call."""
        return list(self._sums)

    def update(self, site: str, call: AttentionCall, *, keep: Tensor | None = None) -> None:
        """Add the queries of a call; where a statistic is not defined, it counts for nothing.

        Args:
            site: the row of the result that it belongs to.
            call: of the attention; of DTensors, the sequences and heads of this rank.
            keep: [B, T] bool, False for queries to leave out: an attention mask, since models let padding see
                tokens. Default: all.
        """
        call = call.local()
        batch, _, queries, _ = call.grid
        if keep is not None and keep.shape != (batch, queries):
            raise InterpError(f"keep is {list(keep.shape)}; expected [{batch}, {queries}]: its queries")
        found = attention_statistics(call, self.names)
        values = torch.stack([found[name] for name in self.names])
        counted = ~values.isnan()
        if keep is not None:
            counted &= keep.to(values.device, torch.bool)[:, None]
        total = torch.where(counted, values, 0).sum((1, 3), dtype=torch.float64)
        self._add(site, torch.stack([total, counted.sum((1, 3), dtype=torch.float64)]))

    def merge(self, other: AttentionSummary) -> AttentionSummary:
        """Add what `other`, of the same statistics, has seen, in place, and return this one."""
        if other.names != self.names:
            raise InterpError(f"cannot merge statistics {other.names} into {self.names}; expected the same")
        for site, sums in other._sums.items():
            self._add(site, sums)
        return self

    def all_reduce(self, group: Any = None) -> AttentionSummary:
        """Replace what this rank has seen by what all ranks have, in place, and return this one. Collective.

        Ranks may have seen different sites; the order is that of the first rank that saw each. `group` are
        the ranks that have seen other sequences, of the same heads: of a mesh with tensor parallelism those
        of data parallelism. Default: all.
        """
        own = {site: sums.cpu() for site, sums in self._sums.items()}
        everyone: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(everyone, (self.names, own), group=group)
        total = AttentionSummary(self.names)
        for names, sums in everyone:
            other = AttentionSummary(names)
            other._sums = sums
            total.merge(other)
        devices = {site: sums.device for site, sums in self._sums.items()}
        self._sums = {site: sums.to(devices.get(site, "cpu")) for site, sums in total._sums.items()}
        return self

    def counts(self, name: str) -> Tensor:
        """[sites, N] float64: queries that the mean of a statistic is taken over."""
        return self._stacked(name)[:, 1]

    def values(self, name: str) -> Tensor:
        """[sites, N] float64: mean of a statistic; NaN for a head without any query."""
        sums = self._stacked(name)
        return sums[:, 0] / sums[:, 1]

    def _add(self, site: str, sums: Tensor) -> None:
        """[2, statistics, N] sums and counts."""
        before = self._sums.get(site)
        if before is not None and before.shape != sums.shape:
            raise InterpError(f"{site!r} has {sums.shape[2]} heads; expected {before.shape[2]}, as before")
        self._sums[site] = sums if before is None else before + sums.to(before.device)

    def _stacked(self, name: str) -> Tensor:
        if name not in self.names:
            raise InterpError(f"{name!r} was not summarized; expected one of {', '.join(self.names)}")
        heads = {site: sums.shape[2] for site, sums in self._sums.items()}
        if len(set(heads.values())) != 1:
            raise InterpError(f"sites have heads {heads}; expected some sites with equal numbers of heads")
        first = next(iter(self._sums.values()))
        return torch.stack([sums[:, self.names.index(name)].to(first.device) for sums in self._sums.values()])


def _entropy(tile: Tile) -> Tensor:
    """[b, N, t] in nats."""
    return torch.special.entr(tile.pattern).sum(-1).masked_fill(tile.hidden.all(-1), torch.nan)


def _weight(tile: Tile, place: Tensor, is_sink: bool) -> Tensor:
    """[b, N, t] weight on the key at `place` [b or 1, N or 1, t or 1]; NaN where that is not defined."""
    known = _sees(tile, place) if is_sink else _sees(tile, place) & _sees(tile, tile.own_key)
    index = place.clamp(0, tile.pattern.shape[-1] - 1).expand(tile.pattern.shape[:3])
    return tile.pattern.gather(-1, index[..., None])[..., 0].masked_fill(~known, torch.nan)


def _sees(tile: Tile, place: Tensor) -> Tensor:
    """[b or 1, N or 1, t] whether the query may see that key, and it exists."""
    keys = tile.hidden.shape[-1]
    shape = torch.broadcast_shapes(tile.hidden.shape[:3], place.shape)
    index = place.clamp(0, keys - 1).expand(shape)[..., None]
    hidden = tile.hidden.expand(*shape, keys).gather(-1, index)[..., 0]
    return ~hidden & (place >= 0) & (place < keys)


def _places(call: AttentionCall, name: str) -> Callable[[Tile], Tensor]:
    """Of a tile, [b or 1, N or 1, t or 1] int64: the key that a statistic looks at; negative for none."""
    if name == "sink":
        first = _first_visible(call)
        return lambda tile: tile.part(first)
    kind, _, lag = name.partition(".")
    if name == "previous" or (kind == "lag" and lag.isdigit()):
        return lambda tile: tile.own_key - int(lag or 1)
    raise InterpError(f"attention has no statistic {name!r}; expected {', '.join(STATISTICS)}, or lag.K")


def _first_visible(call: AttentionCall) -> Tensor:
    """[B or 1, N or 1, 1] the first key that any query may see."""
    if call.mask is None:
        return torch.zeros(1, 1, 1, dtype=torch.int64, device=call.query.device)
    batch, _, _, keys = call.grid
    seen: Tensor | None = None
    for tile in call.tiles():
        if seen is None:
            seen = torch.zeros(batch, tile.hidden.shape[1], keys, dtype=torch.bool, device=call.query.device)
        seen[tile.batch] |= ~tile.hidden.all(-2)
    return torch.zeros(1, 1, 1, dtype=torch.int64) if seen is None else seen.int().argmax(-1)[..., None]
