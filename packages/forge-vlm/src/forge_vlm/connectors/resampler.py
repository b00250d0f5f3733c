"""Learnt tokens that attend to all features of an image. n images, N features of one, L latents, D width."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from forge_model.attention.mask import LastKeys, softmax_attention
from forge_model.ffn.dense import GatedFfn
from forge_model.layers import Linear
from forge_model.roles import Role
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from forge_vlm.connectors.config import ResamplerConfig
from forge_vlm.encoders.positions import images_of


class Layer(nn.Module):
    """Attention of latents to features and latents, then a feed-forward; norms before both."""

    def __init__(self, config: ResamplerConfig, dim: int) -> None:
        super().__init__()
        width, kv_width = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        self.head_dim = config.head_dim
        self.latents_norm, self.features_norm, self.ffn_norm = (
            nn.RMSNorm(dim, eps=config.eps) for _ in range(3)
        )
        self.wq, self.wo = Linear(dim, width, bias=False), Linear(width, dim, bias=False)
        self.wk, self.wv = (Linear(dim, kv_width, bias=False) for _ in range(2))
        self.ffn = GatedFfn(dim, 4 * dim, "silu", bias=False)

    def forward(self, latents: Tensor, features: Tensor, mask: Tensor | LastKeys) -> Tensor:
        """Update latents [n, L, D] from features [n, N, D], with a mask over features and latents."""
        normed = self.latents_norm(latents)
        seen = torch.cat([self.features_norm(features), normed], 1)
        query, key, value = (
            self._heads(self.wq(normed)),
            self._heads(self.wk(seen)),
            self._heads(self.wv(seen)),
        )
        out = softmax_attention(query, key, value, mask)
        latents = latents + self.wo(out.transpose(1, 2).flatten(-2))
        return latents + self.ffn(self.ffn_norm(latents))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class Resampler(nn.Module):
    """A connector like `Idefics2Connector` of `transformers`."""

    roles: ClassVar[dict[str, Role]] = {"latents": "embedding"}

    def __init__(self, config: ResamplerConfig, width: int, dim: int, extra: int) -> None:
        super().__init__()
        self.extra = extra
        self.up, self.gate = (Linear(width, config.hidden or 4 * dim, bias=False) for _ in range(2))
        self.down = Linear(config.hidden or 4 * dim, dim, bias=False)
        self.latents = nn.Parameter(torch.empty(config.latents, dim))
        self.layers = nn.ModuleDict({str(i): Layer(config, dim) for i in range(config.num_layers)})
        self.norm = nn.RMSNorm(dim, eps=config.eps)

    def forward(self, features: Tensor, grids: Tensor) -> Tensor:
        """[P + n extra, width] -> [n L, D]."""
        sizes = [rows * columns + self.extra for rows, columns in images_of(grids)]
        features = self.down(F.silu(self.gate(features)) * self.up(features))
        if len(set(sizes)) == 1:
            padded, mask = features.unflatten(0, (len(sizes), -1)), LastKeys(None)
        else:
            padded = pad_sequence(list(features.split(sizes)), batch_first=True)
            index = torch.arange(padded.shape[1], device=padded.device)
            mask = torch.stack([index < size for size in sizes])  # no copy from the host
            mask = F.pad(mask, (0, len(self.latents)), value=True)[:, None, None]
        x = self.latents.repeat(len(sizes), 1, 1)
        for layer in self.layers.values():
            x = layer(x, padded, mask)
        return self.norm(x).flatten(0, 1)
