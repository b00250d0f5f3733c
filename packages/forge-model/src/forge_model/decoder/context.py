"""What a block is given of one forward pass beside the hidden state. B batch, T tokens, D model dim."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from forge_model.attention.cache import LayerCache
from forge_model.attention.rope import Rope


class Context(NamedTuple):
    """Of one layer in one pass.

    A named tuple, whose tensors FSDP2 and the compiler find: features that need a gradient may be in `side`.

    Attributes:
        rope: rotations of the tokens; None where the layer has no positions.
        mask: what the attention of the layer made of the description.
        cache: keys and values of earlier tokens, to which those of these tokens are added; None in training.
        side: the inputs of the model that something in this layer needs, by name.
        padding: [B, T] bool, tokens that are padding, for parts that say `takes_padding`; None if none is.
    """

    rope: Rope | None
    mask: Any
    cache: LayerCache | None = None
    side: Mapping[str, Tensor] = {}
    padding: Tensor | None = None

    def call(self, part: nn.Module, needs: Iterable[str], x: Tensor) -> Tensor:
        """[B, T, D] through a feed-forward or a norm, with the side inputs that it needs by keyword."""
        sides = {name: self.side[name] for name in needs}
        if self.padding is not None and getattr(part, "takes_padding", False):
            sides["padding"] = self.padding
        return part(x, **sides)
