"""Blocks with separate weights for each modality. B batch, T tokens, N = B T rows, D width, H head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from forge_model.attention.grouped_query import Attention
from forge_model.config import GroupedQueryConfig, LayerConfig, NormConfig
from forge_model.decoder.context import Context
from torch import Tensor, nn

from forge_vlm.fusion.modalities import ByModality, Sorted
from forge_vlm.fusion.modalities_config import MODALITIES


class ModalityNorm(ByModality):
    """A norm for each modality, applied to unsorted tokens."""

    tensor_roles: ClassVar[dict[str, str]] = dict.fromkeys(MODALITIES, "norm")

    def __init__(self, norm: NormConfig, dim: int) -> None:
        super().__init__(partial(norm.build, dim))

    def forward(self, x: Tensor, modality: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[B, T, D] and [B, T] -> [B, T, D]."""
        text, image = (norm(x) for norm in self.each())
        return torch.where(modality[..., None] == 1, image, text)


class ModalityAttention(Attention):
    """Attention with projections and norms for each modality; tokens see earlier tokens of both."""

    residual_writers: ClassVar[tuple[str, ...]] = tuple(f"wo.{name}.weight" for name in MODALITIES)
    parts: ClassVar[tuple[str, ...]] = ("wq", "wk", "wv", "wo", "q_norm", "k_norm")

    def __init__(self, config: GroupedQueryConfig, dim: int, norm: NormConfig) -> None:
        super().__init__(config, dim, norm)
        roles = self.tensor_roles
        for name in self.parts:
            if getattr(self, name) is not None:
                setattr(self, name, ByModality(lambda name=name: getattr(Attention(config, dim, norm), name)))
        each = {f"{name}.{m}": roles[name] for name in self.parts for m in MODALITIES if getattr(self, name)}
        self.tensor_roles = {"": roles[""]} | each
        self.output_units = {
            name: self.output_units[key] for name in each if (key := name.split(".")[0]) in self.output_units
        }

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, rows: Tensor, places: Sorted, shape: Sequence[int], context: Context
    ) -> Tensor:
        """[N, D] sorted -> [N, D].

        Args:
            rows: the normalized residual stream.
            places: the order of the rows.
            shape: (B, T).
            context: the context of the block.
        """

        def heads(projection: nn.Module, norm: nn.Module | None) -> Tensor:
            made = projection(rows, places.sizes)
            if norm is not None:
                made = made.unflatten(-1, (-1, self.head_dim)) if self.norm_heads else made
                made = norm(made, places.sizes).flatten(1)
            return places.restore(made, shape).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        query, key = heads(self.wq, self.q_norm), heads(self.wk, self.k_norm)
        value = heads(self.wv, None)
        query, key = self.rotated(query, context.rope), self.rotated(key, context.rope)
        if context.cache is not None:
            key, value = context.cache.extend(key, value)
        out = self.attend(query, key, value, context.mask, self.scale, **self._options())
        return self.wo(places.sort(out.transpose(1, 2).flatten(-2)), places.sizes)


class ModalityBlock(nn.Module):
    """A `forge_model.decoder.block.Block` with separate parts for text and images."""

    norms: ClassVar[tuple[str, ...]] = ("attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm")
    tensor_roles: ClassVar[dict[str, Any]] = {f"{name}.{m}": "norm" for name in norms for m in MODALITIES}

    def __init__(self, config: LayerConfig, dim: int) -> None:
        super().__init__()
        before, after = config.norm_order != "reordered", config.norm_order != "pre"

        def norm(exists: bool) -> nn.Module | None:
            return ByModality(partial(config.norm.build, dim)) if exists else None

        assert isinstance(config.attention, GroupedQueryConfig)
        self.attention_norm, self.attention_post_norm = norm(before), norm(after)
        self.attention = ModalityAttention(config.attention, dim, config.norm)
        self.ffn_norm, self.ffn_post_norm = norm(before), norm(after)
        self.ffn = ByModality(partial(config.ffn.build, dim))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        places, shape = Sorted.given(context.side), x.shape[:2]

        def normed(norm: nn.Module | None, rows: Tensor) -> Tensor:
            return rows if norm is None else norm(rows, places.sizes)

        rows = places.sort(x)
        attended = self.attention(normed(self.attention_norm, rows), places, shape, context)
        rows = rows + normed(self.attention_post_norm, attended)
        fed = self.ffn(normed(self.ffn_norm, rows), places.sizes)
        return places.restore(rows + normed(self.ffn_post_norm, fed), shape)
