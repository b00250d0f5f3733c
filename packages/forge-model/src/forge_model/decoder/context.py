"""Inputs of a block besides the hidden state in one forward pass. B batch, T tokens, D model dim."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from forge_model.attention.cache import LayerCache
from forge_model.attention.rope import Rope


class Context(NamedTuple):
    """The inputs of one block in one forward pass besides the hidden state.

    It is a named tuple so that FSDP2 and the compiler find its tensors: `side` may have inputs with
    gradients.

    Attributes:
        rope: rotary table of the tokens; None if the layer has no positions.
        mask: result of `Attend.resolve` of the attention of the layer.
        cache: keys and values of earlier tokens, to which these tokens are added; None in training.
        side: the model inputs that something in this layer needs, by name.
        padding: [B, T] bool, true for padding, for parts that declare `takes_padding`; None if there is none.
    """

    rope: Rope | None
    mask: Any
    cache: LayerCache | None = None
    side: Mapping[str, Tensor] = {}
    padding: Tensor | None = None

    def call(self, part: nn.Module, needs: Iterable[str], x: Tensor) -> Tensor:
        """Apply a feed-forward or a norm to [B, T, D], with the side inputs that it needs by keyword."""
        sides = {name: self.side[name] for name in needs}
        if self.padding is not None and getattr(part, "takes_padding", False):
            sides["padding"] = self.padding
        return part(x, **sides)
