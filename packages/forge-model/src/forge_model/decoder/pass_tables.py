"""Data that the blocks of one forward pass share: each rotary table and each mask is computed once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forge_model.attention.cache import LayerCache
from forge_model.attention.mask import Attend, Mask, softmax_attention
from forge_model.attention.rope import Rope, RopeTables
from forge_model.decoder.config import LayerConfig
from forge_model.decoder.context import Context
from forge_model.error import ModelError


class PassTables:
    """Rotary tables and masks of one forward pass.

    Args:
        mask: the description of what tokens see.
        tables: the rotary tables of the model.
        tokens: [B, T].
        positions: as for `RopeTables`.
        dtype: dtype of the model.
        dim: width of the residual stream.
    """

    def __init__(
        self,
        mask: Mask,
        tables: RopeTables,
        tokens: Tensor,
        positions: Tensor | None,
        dtype: torch.dtype,
        dim: int,
    ) -> None:
        self._mask, self._tables, self._dim = mask, tables, dim
        self._padding = None if mask.doc_ids is None else mask.doc_ids < 0
        self._where = (tokens, positions, torch.promote_types(dtype, torch.float32))
        self._ropes: list[tuple[Any, int, Rope]] = []
        self._masks: list[tuple[Attend, int | None, Any]] = []

    def context(
        self,
        config: LayerConfig,
        attention: Any,
        cache: LayerCache | None = None,
        side: Mapping[str, Tensor] | None = None,
    ) -> Context:
        """Return the context of one block.

        Args:
            config: configuration of the layer.
            attention: result of `attention_of` for the block; its `attend` resolves the mask.
            cache: cache of the layer.
            side: the side inputs that the layer needs.
        """
        attend = softmax_attention if attention is None else attention.attend
        mask = self._resolved(attend, config.attention.window)
        return Context(self._rope(config), mask, cache, side or {}, self._padding)

    def _rope(self, config: LayerConfig) -> Rope | None:
        if not config.rope.rotates:
            return None
        width = config.attention.rotary_dim(self._dim)
        for rope, head_dim, made in self._ropes:
            if head_dim == width and rope == config.rope:
                return made
        made = self._tables(config.rope, width, *self._where)
        self._ropes.append((config.rope, width, made))
        return made

    def _resolved(self, attend: Attend, window: int | None) -> Any:
        for known, of, made in self._masks:
            if known is attend and of == window:
                return made
        made = attend.resolve(self._mask, window)
        self._masks.append((attend, window, made))
        return made


def attention_of(block: nn.Module) -> Any:
    """Return the module of a block that has an attribute `attend`; None if there is none.

    Raises:
        ModelError: there are several with different `attend`.
    """
    found = [module for module in block.modules() if hasattr(module, "attend")]
    if any(other.attend is not found[0].attend for other in found[1:]):
        raise ModelError(
            f"a {type(block).__name__} has {len(found)} modules with different `attend`, and one mask; call "
            "the attribute of those that make their own mask otherwise"
        )
    return found[0] if found else None
