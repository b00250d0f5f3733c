"""Multi-head to multi-query attention. B batch, T tokens, N heads, K kv heads, H head dim, D model dim."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forge_model.attention.cache import LayerCache
from forge_model.attention.config import GroupedQueryConfig
from forge_model.attention.explicit import explicit_attention, sink_attention
from forge_model.attention.mask import Attend, softmax_attention
from forge_model.attention.rope import Rope, pairs_to_halves, rotate
from forge_model.layers import Linear, Sinks
from forge_model.norm_config import NormConfig


class Attention(nn.Module):
    """Self-attention with rotary positions and, if configured, normalized queries and keys.

    Attributes:
        attend: computes softmax attention; may be replaced.
    """

    residual_writers: ClassVar[tuple[str, ...]] = ("wo.weight",)
    projection_roles: ClassVar[dict[str, str]] = {
        "": "gather",
        "wq": "colwise",
        "wk": "colwise",
        "wv": "colwise",
        "wo": "rowwise",
        "sinks": "heads",
    }

    def __init__(self, config: GroupedQueryConfig, dim: int, norm: NormConfig) -> None:
        super().__init__()
        uncapped = sink_attention if config.sinks else softmax_attention
        self.attend: Attend = uncapped if config.softcap is None else explicit_attention
        self.scale, self.softcap = config.scale, config.softcap
        self.head_dim, self.rope_dim = config.head_width(dim), config.rotary_dim(dim)
        self.rope_pairs = config.rope_pairs
        width, kv_width = config.num_heads * self.head_dim, config.kv_heads * self.head_dim
        self.wq = Linear(dim, width, bias=config.bias)
        self.wk = Linear(dim, kv_width, bias=config.bias)
        self.wv = Linear(dim, kv_width, bias=config.bias)
        self.wo = Linear(width, dim, bias=config.output_bias)
        self.sinks = Sinks(config.num_heads) if config.sinks else None
        self.norm_heads = config.qk_norm_over == "head"
        widths = (self.head_dim, self.head_dim) if self.norm_heads else (width, kv_width)
        self.q_norm, self.k_norm = (norm.build(w) if config.qk_norm else None for w in widths)
        of_norm = "head_norm" if self.norm_heads else "cut_norm"
        self.tensor_roles = {"q_norm": of_norm, "k_norm": of_norm, **self.projection_roles}
        shared = ["wk", "wv"] if self.norm_heads else ["wk", "wv", "k_norm"]
        self.output_units = {name: [config.kv_heads] for name in shared}

    def forward(self, x: Tensor, rope: Rope | None, mask: Any, cache: LayerCache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D].

        Args:
            x: the normalized residual stream.
            rope: rotary table of these T positions; None rotates nothing.
            mask: result of `attend.resolve` for the window of this layer.
            cache: keys and values of earlier tokens; the new keys and values are added to it.
        """
        query = self._heads(self.wq(x), self.q_norm)
        key = self._heads(self.wk(x), self.k_norm)
        value = self._heads(self.wv(x), None)
        query, key = self.rotated(query, rope), self.rotated(key, rope)
        if cache is not None:
            key, value = cache.extend(key, value)
        out = self.attend(query, key, value, mask, self.scale, **self._options())
        return self.wo(out.transpose(1, 2).flatten(-2))

    def rotated(self, x: Tensor, rope: Rope | None) -> Tensor:
        """Rotate the first `rope_dim` numbers of each head of queries or keys [B, N, T, H] by position."""
        if rope is None:
            return x
        rotates_all = self.rope_dim == self.head_dim  # a split would copy gradients of nothing
        part, rest = (x, None) if rotates_all else x.split([self.rope_dim, self.head_dim - self.rope_dim], -1)
        part = rotate(pairs_to_halves(part) if self.rope_pairs else part, *rope)
        return part if rest is None else torch.cat([part, rest], -1)

    def _options(self) -> dict[str, Any]:
        """Options of `attend` beyond softmax attention: soft cap and sinks."""
        softcap = {} if self.softcap is None else {"softcap": self.softcap}
        return softcap if self.sinks is None else softcap | {"sinks": self.sinks()}

    def _heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """[B, T, N*H] -> [B, N, T, H], normalized."""
        if norm is not None and not self.norm_heads:
            x = norm(x)
        x = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return norm(x) if norm is not None and self.norm_heads else x
