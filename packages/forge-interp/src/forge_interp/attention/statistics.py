"""How do the heads of an attention call spread their weight, without ever holding all weights?

Letters: B sequences, N query heads, T queries, S keys; b and t are parts of B and T.
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
