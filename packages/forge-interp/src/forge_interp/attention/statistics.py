"""How do the heads of an attention call spread their weight, without ever holding all weights?

Letters as in `attention.call`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_interp.attention.tiles import Tile
from forge_interp.errors import InterpError

if TYPE_CHECKING:
    from forge_interp.attention.call import AttentionCall

STATISTICS = ("entropy", "sink", "previous")


def attention_statistics(call: AttentionCall, names: Sequence[str]) -> dict[str, Tensor]:
    """Compute statistics of the weights of each head at each query, in one pass over tiles of the scores.

    entropy: -sum_s p_s ln p_s in nats; between 0 and ln of the number of visible keys.
    sink: weight on the first key that any query of the sequence may see in this call: key 0, or the first
        token after left padding. (The first key of a sliding cache is no longer the first of the text.)
    previous: lag.1.
    lag.K: weight on the key K before the query's own; with random tokens repeated with period P, lag.(P - 1)
        is the induction score of Olsson et al. 2022, arXiv:2209.11895.

    A value is NaN where it is undefined: the query sees no key at all; the key does not exist, or the query
    may not see it (another window or document); for lag also where the query may not see its own key (it is
    padding). So a padded sequence has the values of the unpadded one. `Tile.own_key` defines a query's own
    key; in cross-attention there is none, and lag means nothing.

    Returns [B, N, T] by name, in float32, or float64 for a float64 call. No tensor is larger than
    `attention.TILE_BYTES` or N S numbers. InterpError for an unknown name, or dropout.

    Source: sink: Xiao et al. 2023, arXiv:2309.17453.
    """
    call.compute(names, 0)
    return {name: call.computed.pop(name) for name in names}


def collecting(call: AttentionCall, names: Sequence[str]) -> tuple[dict[str, Tensor], Callable[[Tile], None]]:
    """Return statistics, NaN at first, and a function that fills them in from the tiles of the call."""
    batch, heads, queries, keys = call.grid
    lags = {name: _lag(name) for name in names if name not in ("entropy", "sink")}
    first = _first_visible(call) if "sink" in names else None
    found = {
        name: call.query.new_full((batch, heads, queries), torch.nan, dtype=call.dtype) for name in names
    }

    def add(tile: Tile) -> None:
        for name in names if keys else ():
            if name == "entropy":
                value = torch.special.entr(tile.pattern).sum(-1)
                value = value.masked_fill(tile.hidden.all(-1), torch.nan)
            elif first is not None and name == "sink":
                value = _weight(tile, tile.part(first))
            else:
                is_own_seen, _ = _seen(tile, tile.own_key)
                value = _weight(tile, tile.own_key - lags[name]).masked_fill(~is_own_seen, torch.nan)
            found[name][tile.batch, :, tile.queries] = value

    return found, add


def _lag(name: str) -> int:
    """Return how many keys before its own key a query looks for a statistic."""
    kind, _, lag = name.partition(".")
    if name == "previous" or (kind == "lag" and lag.isdigit()):
        return int(lag or 1)
    raise InterpError(f"attention has no statistic {name!r}; expected {', '.join(STATISTICS)}, or lag.K")


def _weight(tile: Tile, place: Tensor) -> Tensor:
    """Return the weight [b, N, t] on the key at `place` [b or 1, N or 1, t or 1]; NaN if it is not seen."""
    is_seen, index = _seen(tile, place)
    index = index.expand(tile.pattern.shape[:3])[..., None]
    return tile.pattern.gather(-1, index)[..., 0].masked_fill(~is_seen, torch.nan)


def _seen(tile: Tile, place: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether there is such a key and the query sees it [b or 1, N or 1, t], and the nearest key."""
    keys = tile.hidden.shape[-1]
    shape = torch.broadcast_shapes(tile.hidden.shape[:3], place.shape)
    index = place.clamp(0, keys - 1).expand(shape)
    hidden = tile.hidden.expand(*shape, keys).gather(-1, index[..., None])[..., 0]
    return ~hidden & (place == index), index


def _first_visible(call: AttentionCall) -> Tensor:
    """Return the first key that any query may see, [B or 1, N or 1, 1]."""
    batch, _, queries, _ = call.grid
    if call.mask is None or not batch * queries:
        return torch.zeros(1, 1, 1, dtype=torch.int64, device=call.query.device)
    parts: dict[int, Tensor] = {}  # by the first sequence
    for tile in call.tiles():
        seen = (~tile.hidden).any(-2).expand(len(range(batch)[tile.batch]), -1, -1)
        parts[tile.batch.start] = seen | parts.get(tile.batch.start, torch.zeros_like(seen))
    return torch.cat(list(parts.values())).int().argmax(-1)[..., None]
