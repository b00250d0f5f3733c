"""Multi-head to multi-query attention. B batch, T tokens, N heads, K kv heads, H head dim, D model dim."""

from typing import Any

from torch import Tensor, nn

from forge_model.attention_config import GroupedQueryConfig
from forge_model.cache import LayerCache
from forge_model.layers import Linear
from forge_model.mask import Attend, softmax_attention
from forge_model.norm_config import NormConfig
from forge_model.rope import Rope, rotate


class Attention(nn.Module):
    """Self-attention with rotary positions and, when asked for, normalized queries and keys.

    Attributes:
        attend: computes softmax attention; may be replaced.
    """

    def __init__(self, config: GroupedQueryConfig, dim: int, norm: NormConfig) -> None:
        super().__init__()
        self.attend: Attend = softmax_attention
        self.head_dim = config.rotary_dim(dim)
        width, kv_width = config.num_heads * self.head_dim, config.kv_heads * self.head_dim
        self.wq = Linear(dim, width, bias=config.bias)
        self.wk = Linear(dim, kv_width, bias=config.bias)
        self.wv = Linear(dim, kv_width, bias=config.bias)
        self.wo = Linear(width, dim, bias=config.output_bias)
        self.q_norm = norm.build(self.head_dim) if config.qk_norm else None
        self.k_norm = norm.build(self.head_dim) if config.qk_norm else None

    def forward(self, x: Tensor, rope: Rope, mask: Any, cache: LayerCache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D].

        Args:
            x: the residual stream, normalized.
            rope: of these T positions.
            mask: what `attend.resolve` made for the window of this layer.
            cache: keys and values of earlier tokens; these are added to it.
        """
        query, key, value = (self._heads(w(x)) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, *rope), rotate(key, *rope)
        if cache is not None:
            key, value = cache.extend(key, value)
        out = self.attend(query, key, value, mask)
        return self.wo(out.transpose(1, 2).flatten(-2))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, N*H] -> [B, N, T, H]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
