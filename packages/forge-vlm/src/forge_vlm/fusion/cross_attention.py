"""Gated layers that attend to visual tokens. B batch, T tokens, S visual tokens of a row, D width, H head."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from forge_model.attention.cache import LayerCache
from forge_model.config import GroupedQueryConfig, LayerConfig, NormConfig
from forge_model.decoder.block import Block
from forge_model.decoder.context import Context
from forge_model.error import ModelError
from forge_model.init import Init
from forge_model.layers import Linear
from forge_model.roles import Role
from torch import Tensor, nn

from forge_vlm.fusion.cross_attention_config import CrossBlockConfig


class Place(nn.Module):
    """The embedding [D] of an image place."""

    roles: ClassVar[dict[str, Role]] = {"weight": "embedding"}

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        """Replace [B, T, D] by the embedding wherever index [B, T] is not 0."""
        return torch.where(index[..., None] > 0, self.weight, x)


class Beside(nn.Module):
    """Passes visual tokens beside the embeddings; a `Place` changes these if `place` sets its width."""

    def __init__(self, room: int, place: int | None = None) -> None:
        super().__init__()
        self.room = room
        self.place = None if place is None else Place(place)
        self.tensor_roles = {} if place is None else {"place": "unsharded"}

    def forward(self, x: Tensor, features: Tensor, index: Tensor, counts: Tensor) -> dict[str, Tensor]:
        """Return decoder inputs with `image_features` [B, S, D]: the visual tokens of each row, then zeros.

        Args:
            x: [B, T, D] embeddings.
            features: [V, D] visual tokens of all sequences in their order; at least one.
            index: [B, T] 0 for text.
            counts: [B] number of visual tokens of each row.
        """
        place = torch.arange(self.room, device=x.device)
        before = counts.cumsum(0) - counts
        taken = features[(before[:, None] + place).clamp(max=len(features) - 1)]
        is_real = (place < counts[:, None])[..., None]
        x = x if self.place is None else self.place(x, index)
        return {"hidden": x, "image_features": torch.where(is_real, taken, 0).to(x.dtype)}


class Sight(NamedTuple):
    """The visual tokens that each token may attend to.

    Attributes:
        visible: [B, 1, T, S] bool; all true for a token that may attend to none.
        attends: [B, T, 1] bool, whether the output of attention is used for a token.
        sees: [B, T, 1] bool, whether a token sees an image.
    """

    visible: Tensor
    attends: Tensor
    sees: Tensor

    @classmethod
    def of(cls, window: Tensor, room: int, blind: str) -> Sight:
        """Build it from `image_window` [B, 2, T]; see `CrossAttentionConfig.arrays`."""
        first, end = window[..., None].unbind(1)
        sees = attends = end > first
        if blind == "mllama":
            attends = end != first
            first, end = torch.minimum(first, end), torch.maximum(first, end)
        place = torch.arange(room, device=window.device)
        visible = ((place >= first) & (place < end)) | ~attends
        return cls(visible[:, None], attends, sees)


class Gate(nn.Module):
    """tanh(weight) x, with one weight for all channels."""

    roles: ClassVar[dict[str, Role]] = {"weight": "bias"}

    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))
        self.initial = {"weight": Init("constant", start)}

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.weight.tanh() * x


class CrossAttention(nn.Module):
    """Attention from tokens to visual tokens: queries and keys are normalized and have no positions."""

    residual_writers: ClassVar[tuple[str, ...]] = ("wo.weight",)
    tensor_roles: ClassVar[dict[str, str]] = {
        "": "gather",
        "wq": "colwise",
        "wk": "colwise",
        "wv": "colwise",
        "wo": "rowwise",
        "q_norm": "head_norm",
        "k_norm": "head_norm",
    }

    def __init__(self, config: GroupedQueryConfig, dim: int, norm: NormConfig) -> None:
        super().__init__()
        self.head_dim = config.head_width(dim)
        width, kv_width = config.num_heads * self.head_dim, config.kv_heads * self.head_dim
        self.wq, self.wo = Linear(dim, width, bias=False), Linear(width, dim, bias=False)
        self.wk, self.wv = (Linear(dim, kv_width, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = norm.build(self.head_dim), norm.build(self.head_dim)
        self.output_units = {name: [config.kv_heads] for name in ("wk", "wv")}

    def forward(self, x: Tensor, features: Tensor, visible: Tensor, cache: LayerCache | None) -> Tensor:
        """[B, T, D] and [B, S, D] -> [B, T, D].

        Args:
            x: the normalized residual stream.
            features: visual tokens.
            visible: [B, 1, T, S] bool, at least one true for each token.
            cache: keeps keys and values of the visual tokens, so that they are computed once.
        """
        query = self.q_norm(self._heads(self.wq(x)))
        if cache is None:
            key, value = self._keys(features)
        else:
            key, value = cache.once("images", lambda: self._keys(features))
        grouped = {"enable_gqa": True} if key.shape[1] != query.shape[1] else {}
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, **grouped)
        return self.wo(out.transpose(1, 2).flatten(-2))

    def _keys(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.k_norm(self._heads(self.wk(features))), self._heads(self.wv(features))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, N*H] -> [B, N, T, H]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class CrossLayer(nn.Module):
    """x + gate(attention(norm(x))), then x + gate(ffn(norm(x))), for tokens that see an image.

    As `MllamaCrossAttentionDecoderLayer` of transformers.
    """

    tensor_roles: ClassVar[dict[str, str]] = {
        "attention_norm": "norm",
        "attention_gate": "tokenwise",
        "ffn_norm": "norm",
        "ffn_gate": "tokenwise",
    }

    def __init__(self, config: CrossBlockConfig, layer: LayerConfig, dim: int) -> None:
        super().__init__()
        self.attention_norm = layer.norm.build(dim)
        self.attention = CrossAttention(config.attention(layer, dim), dim, layer.norm)
        self.attention_gate = Gate(config.gate_init)
        self.ffn_norm, self.ffn = layer.norm.build(dim), config.feed_forward(layer).build(dim)
        self.ffn_gate = Gate(config.gate_init)

    def forward(self, x: Tensor, features: Tensor, sight: Sight, cache: LayerCache | None) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        attended = self.attention(self.attention_norm(x), features, sight.visible, cache)
        x = x + self.attention_gate(torch.where(sight.attends, attended, 0))
        fed = self.ffn(self.ffn_norm(x))
        return x + self.ffn_gate(torch.where(sight.sees, fed, 0))


class CrossBlock(Block):
    """A gated layer, then a standard block, whose parameters keep the names of a plain standard block.

    Attributes:
        cross: the gated layer.
    """

    def __init__(self, config: CrossBlockConfig, layer: LayerConfig, dim: int) -> None:
        super().__init__(layer, dim)
        self.cross = CrossLayer(config, layer, dim)
        self.room, self.blind = config.visual_tokens, config.blind

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        features, window = context.side["image_features"], context.side["image_window"]
        if features.shape[1] != self.room:
            raise ModelError(
                f"given image_features with {features.shape[1]} rows for each sequence; expected {self.room} "
                "(model.fusion.max_visual_tokens)"
            )
        sight = Sight.of(window, self.room, self.blind)
        return super().forward(self.cross(x, features, sight, context.cache), context)
