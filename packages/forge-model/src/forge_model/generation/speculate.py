"""Greedy generation in which the modules for multi-token prediction propose tokens and the model checks them.

B batch, D depths, L known tokens. The result is the same as that of plain greedy generation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forge_model.attention.cache import Cache, LayerCache
from forge_model.attention.mask import Mask


class Drafter:
    """Proposes tokens; caches what each depth has computed for accepted tokens.

    Args:
        model: a `Decoder` with modules for multi-token prediction.
        capacity: most tokens of a row.
        padding: [B] integer, number of padding tokens at the left of each row.
    """

    def __init__(self, model: Any, capacity: int, padding: Tensor) -> None:
        self._model, self._padding = model, padding
        self._caches = [LayerCache(capacity) for _ in model.mtp]
        self._hidden: list[Tensor | None] = [None for _ in model.mtp]

    def propose(self, known: Tensor, hidden: Tensor) -> Tensor:
        """[B, L] tokens and [B, L-1, dim] normalized hidden states of all but the last -> [B, D] tokens."""
        tokens, length = known, known.shape[1]
        for depth, module in enumerate(self._model.mtp.values(), 1):
            cache = self._caches[depth - 1]
            start = cache.length
            made = self._model.predict_ahead(
                module, tokens[:, start + depth :], hidden[:, start:], cache, self._mask(start, length - 1)
            )
            before = self._hidden[depth - 1]
            hidden = made if before is None else torch.cat([before[:, :start], made], 1)
            self._hidden[depth - 1] = hidden
            # beyond, it was given tokens that are only proposed
            cache.crop(max(0, length - depth))
            tokens = torch.cat([tokens, self._model.head(hidden[:, -1:]).argmax(-1)], 1)
        return tokens[:, length:]

    def _mask(self, start: int, end: int) -> Mask:
        return Mask(end - start, self._padding.device, cached=start, padding=self._padding)


class Speculation:
    """Rows that grow by several tokens at a time.

    Args:
        model: a `Decoder`, unsharded on one device.
        tokens: [B, L] prompts, padded on the left.
        padding: [B] integer, number of padding tokens at the left of each row.
        max_new_tokens: most tokens that will be requested.
    """

    def __init__(self, model: nn.Module, tokens: Tensor, padding: Tensor, max_new_tokens: int) -> None:
        self._model: Any = model
        capacity = tokens.shape[1] + max_new_tokens
        self._cache = Cache(self._model.config.num_layers, capacity, padding)
        self._drafter = Drafter(model, capacity, padding)
        self._hidden = self._model.hidden_states(tokens, self._cache)
        self.known = torch.cat([tokens, self._model.head(self._hidden[:, -1:]).argmax(-1)], 1)

    def grow(self, most: int, done: list[bool]) -> Tensor:
        """Return [B, n] further tokens, n from 1 to `most`; tokens of finished rows mean nothing."""
        drafts = self._drafter.propose(self.known, self._hidden)[:, : most - 1]
        tokens = torch.cat([self.known[:, -1:], drafts], 1)
        hidden = self._model.hidden_states(tokens, self._cache)
        chosen = self._model.head(hidden).argmax(-1)
        agreed = (chosen[:, :-1] == drafts).cumprod(1).sum(1).tolist()
        accepted = min(count for count, over in zip(agreed, done, strict=True) if not over)
        for layer in self._cache.layers:
            layer.crop(self.known.shape[1] + accepted)
        self._hidden = torch.cat([self._hidden, hidden[:, : accepted + 1]], 1)
        new = chosen[:, : accepted + 1]
        self.known = torch.cat([self.known, new], 1)
        return new
