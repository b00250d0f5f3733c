"""Tokens sorted by modality, and modules of each modality. B batch, T tokens, N = B T rows, D width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forge_vlm.fusion.modalities_config import MODALITIES


class Sorted(NamedTuple):
    """The order of tokens sorted by modality, computed once per forward pass.

    Attributes:
        order: [N] the token of each row: text first, then visual tokens, then padding.
        inverse: [N] the row of each token.
        counts: [text, image, padding, 0], without elements: its shape has the number of rows of each, so that
            nothing is read from a device and no compiler sees a number.
    """

    order: Tensor
    inverse: Tensor
    counts: Tensor

    @classmethod
    def of(cls, tokens: Tensor, modality: Tensor | None, sizes: Tensor | None, padding: bool) -> Sorted:
        """Build it from the inputs of `ModalitiesConfig.arrays`; without these, all tokens are text.

        Args:
            tokens: [B, T].
            modality: [B, T].
            sizes: [B, 2], on the host.
            padding: whether padding is kept apart; otherwise it counts as text.
        """
        if modality is None or sizes is None:
            modality, image, unused = torch.zeros_like(tokens), 0, 0
        else:
            image, unused = sizes.sum(0).tolist()
        if not padding:
            modality, unused = (modality == 1).to(modality.dtype), 0
        order = modality.flatten().argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        there = ((modality == 1).sum() == image) & ((modality == 2).sum() == unused)
        torch._assert_async(there, "modality_sizes are not those of modality")  # pyright: ignore[reportPrivateImportUsage]
        return cls(order, inverse, tokens.new_empty(tokens.numel() - image - unused, image, unused, 0))

    @classmethod
    def given(cls, side: Mapping[str, Tensor]) -> Sorted:
        """Build it from the side inputs of a block."""
        return cls(*(side[f"modality_{name}"] for name in cls._fields))

    def side_inputs(self) -> dict[str, Tensor]:
        """The tensors by name, as in `SORTED`."""
        return {f"modality_{name}": tensor for name, tensor in self._asdict().items()}

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows of text, image and padding."""
        return list(self.counts.shape[:3])

    def sort(self, x: Tensor) -> Tensor:
        """Sort tokens, [B, T, ...] -> [N, ...]."""
        return _Permuted.apply(x.flatten(0, 1), self.order, self.inverse)

    def restore(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """Restore the order of tokens, [N, ...] -> [B, T, ...], with `shape` (B, T)."""
        return _Permuted.apply(rows, self.inverse, self.order).unflatten(0, tuple(shape))


class _Permuted(torch.autograd.Function):
    """A permutation of rows whose backward gathers instead of adding."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        order, inverse = ctx.saved_tensors
        return _Permuted.apply(gradient, inverse, order), None, None


class ByModality(nn.Module):
    """A module for each modality, `text` and `image`."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        for name in MODALITIES:
            self.add_module(name, build())

    def forward(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Apply to each sorted row [N, ...] the module of its modality; a modality may have no rows."""
        parts = rows.split(tuple(sizes)[: len(MODALITIES)])
        return torch.cat([module(some) for module, some in zip(self.each(), parts, strict=True)])

    def each(self) -> Iterator[nn.Module]:
        """Return the modules of text and of images."""
        return (getattr(self, name) for name in MODALITIES)
