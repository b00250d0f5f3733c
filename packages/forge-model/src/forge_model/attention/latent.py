"""Multi-head latent attention: keys and values of all heads follow from one short latent per token.

B batch, T queries, S keys, N heads, D model dim; L width of the latent; widths within a head: P of the part
without position, R of the rotated part, V of a value.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forge_model.attention.cache import LayerCache
from forge_model.attention.config import LatentConfig
from forge_model.attention.mask import Attend, softmax_attention
from forge_model.attention.rope import Rope, pairs_to_halves, rotate
from forge_model.layers import Linear
from forge_model.norm_config import NormConfig


class LatentAttention(nn.Module):
    """DeepSeek-V3, arXiv:2412.19437 eq. 1-11; the names used there are in brackets.

    A cache keeps the normalized latents and the rotated keys, which all heads share: L + R numbers per token.
    After cached tokens, queries attend to the latents directly ("absorbed": arXiv:2405.04434 section 2.1.2).

    Attributes:
        attend: computes softmax attention; may be replaced.
        wq: projection to queries if these are not compressed; otherwise None.
        wq_down: projection to the latent of queries (W^DQ), then `q_norm`, `wq_up` to queries (W^UQ, W^QR).
        wkv_down: projection to the latent of keys and values and to the rotated key (W^DKV, W^KR).
        wkv_up: projection of the latent to keys and values, head by head (W^UK, W^UV).
    """

    residual_writers: ClassVar[tuple[str, ...]] = ("wo.weight",)

    def __init__(self, config: LatentConfig, dim: int, norm: NormConfig) -> None:
        super().__init__()
        self.attend: Attend = softmax_attention
        self.rope_dim, self.nope_dim, self.value_dim = config.rope_dim, config.nope_dim, config.value_dim
        self.scale: float = config.head_dim**-0.5 if config.scale is None else config.scale
        self.rope_pairs = config.rope_pairs
        heads, rank = config.num_heads, config.kv_rank
        width = heads * (config.nope_dim + config.rope_dim)
        self.wq = None if config.q_rank else Linear(dim, width, bias=False)
        self.tensor_roles = {"": "gather", "wkv_down": "replicated", "kv_norm": "replicated"}
        self.tensor_roles |= {"wq": "colwise", "wkv_up": "colwise", "wo": "rowwise"}
        if config.q_rank:
            self.tensor_roles |= {"wq_down": "replicated", "q_norm": "head_norm", "wq_up": "colwise"}
            self.wq_down = Linear(dim, config.q_rank, bias=config.bias)
            self.q_norm = config.latent_norm(norm).build(config.q_rank)
            self.wq_up = Linear(config.q_rank, width, bias=False)
        self.wkv_down = Linear(dim, rank + config.rope_dim, bias=config.bias)
        self.kv_norm = config.latent_norm(norm).build(rank)
        self.wkv_up = Linear(rank, heads * (config.nope_dim + config.value_dim), bias=False)
        self.wo = Linear(heads * config.value_dim, dim, bias=config.bias)

    def forward(self, x: Tensor, rope: Rope | None, mask: Any, cache: LayerCache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; arguments as in `forge_model.attention.grouped_query.Attention`."""
        query = self.wq_up(self.q_norm(self.wq_down(x))) if self.wq is None else self.wq(x)
        query = query.unflatten(-1, (-1, self.nope_dim + self.rope_dim)).transpose(1, 2)
        plain, rotated = query.split([self.nope_dim, self.rope_dim], -1)
        latent, shared = self.wkv_down(x)[:, None].split([self.wkv_up.in_features, self.rope_dim], -1)
        latent = self.kv_norm(latent)
        rotated, shared = self._rotated(rotated, rope), self._rotated(shared, rope)
        absorbed = cache is not None and cache.length > 0
        if cache is not None:
            latent, shared = cache.extend(latent, shared)
        look = self._absorbed if absorbed else self._expanded
        return self.wo(look(plain, rotated, latent, shared, mask).transpose(1, 2).flatten(-2))

    def _rotated(self, x: Tensor, rope: Rope | None) -> Tensor:
        return x if rope is None else rotate(pairs_to_halves(x) if self.rope_pairs else x, *rope)

    def _expanded(self, plain: Tensor, rotated: Tensor, latent: Tensor, shared: Tensor, mask: Any) -> Tensor:
        """Compute keys and values: [B, N, T, P], [B, N, T, R], [B, 1, S, L], [B, 1, S, R] -> [B, N, T, V]."""
        both = self.wkv_up(latent[:, 0]).unflatten(-1, (-1, self.nope_dim + self.value_dim)).transpose(1, 2)
        key, value = both.split([self.nope_dim, self.value_dim], -1)
        key = torch.cat([key, shared.expand(-1, key.shape[1], -1, -1)], -1)
        return self.attend(torch.cat([plain, rotated], -1), key, value, mask, self.scale)

    def _absorbed(self, plain: Tensor, rotated: Tensor, latent: Tensor, shared: Tensor, mask: Any) -> Tensor:
        """Return the same from the latents themselves: q W^UK is the query, W^UV projects the result."""
        up = self.wkv_up.weight.unflatten(0, (-1, self.nope_dim + self.value_dim))
        to_key, to_value = up.split([self.nope_dim, self.value_dim], 1)
        query = torch.cat([plain @ to_key, rotated], -1)
        out = self.attend(query, torch.cat([latent, shared], -1), latent, mask, self.scale)
        return out @ to_value.transpose(1, 2)
