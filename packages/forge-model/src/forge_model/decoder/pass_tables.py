"""What the blocks of one forward pass share: each table of rotations and each mask is made once."""

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
    """Rotations and masks of one forward pass.

    Args:
        mask: the description of what tokens see.
        tables: of the model.
        tokens: [B, T].
        positions: as for `RopeTables`.
        dtype: of the model.
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
        """The context of one block.

        Args:
            config: of its layer.
            attention: from `attention_of` of the block; its `attend` makes the mask.
            cache: of its layer.
            side: the side inputs that it needs.
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
    """The module of a block that has an attribute `attend`; None if none has.

    Raises:
        ModelError: there are several that make their masks in different ways.
    """
    found = [module for module in block.modules() if hasattr(module, "attend")]
    if any(other.attend is not found[0].attend for other in found[1:]):
        raise ModelError(
            f"a {type(block).__name__} has {len(found)} modules with different `attend`, and one mask; call "
            "the attribute of those that make their own mask otherwise"
        )
    return found[0] if found else None
