"""Connectors that compute one token from a window of patches. P patches, V windows, W window, C width."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from forge_model.attention.mask import softmax_attention
from forge_model.layers import Linear
from torch import Tensor, nn

from forge_vlm.encoders.positions import images_of


def by_image(features: Tensor, grids: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `make` to images of equal size, [n, rows, columns, C] -> [n, tokens, ...]; keep their order."""
    images = images_of(grids)
    if len(set(images)) == 1:
        return make(features.unflatten(0, (-1, *images[0]))).flatten(0, 1)
    parts = features.split([rows * columns for rows, columns in images])
    return torch.cat(
        [make(part.unflatten(0, image)[None])[0] for part, image in zip(parts, images, strict=True)]
    )


def windows(x: Tensor, window: int) -> Tensor:
    """[n, rows, columns, C] -> [n, V, W * W, C], row by row in each window; zeros outside of the image."""
    x = F.pad(x, (0, 0, 0, -x.shape[2] % window, 0, -x.shape[1] % window))
    cut = x.unflatten(2, (-1, window)).unflatten(1, (-1, window))
    return cut.transpose(2, 3).flatten(1, 2).flatten(2, 3)


def is_inside(x: Tensor, window: int) -> Tensor:
    """Return [1, V, W * W] bool, which places in the windows of x [n, rows, columns, C] are in the image."""
    return windows(torch.ones_like(x[:1, :, :, :1]), window)[..., 0] > 0


def means(cut: Tensor, inside: Tensor) -> Tensor:
    """Return the mean over the places inside of the image, [n, V, W * W, C] -> [n, V, C]."""
    return cut.sum(2) / inside.sum(-1, keepdim=True)


class Pooled(nn.Module):
    """The base of connectors that pool each window and project it."""

    def __init__(self, window: int, projection: nn.Module) -> None:
        super().__init__()
        self.window, self.projection = window, projection

    def forward(self, features: Tensor, grids: Tensor) -> Tensor:
        """[P, C] -> [V, dim]."""
        return self.projection(by_image(features, grids, self.pooled))

    def pooled(self, x: Tensor) -> Tensor:
        """[n, rows, columns, C] -> [n, V, pooled width]."""
        raise NotImplementedError


class AveragePool(Pooled):
    """A connector that averages each window."""

    def pooled(self, x: Tensor) -> Tensor:
        """See `Pooled.pooled`."""
        return means(windows(x, self.window), is_inside(x, self.window))


class PixelShuffle(Pooled):
    """A connector that concatenates the patches of a window, in the order of `Idefics3Connector`."""

    def pooled(self, x: Tensor) -> Tensor:
        """See `Pooled.pooled`."""
        return windows(x, self.window).flatten(2)


class AttentionalPool(Pooled):
    """A connector with attention over the patches of a window; their mean is the query."""

    def __init__(self, window: int, width: int, num_heads: int, projection: nn.Module) -> None:
        super().__init__(window, projection)
        self.num_heads = num_heads
        self.wq, self.wk, self.wv, self.wo = (Linear(width, width, bias=True) for _ in range(4))

    def pooled(self, x: Tensor) -> Tensor:
        """See `Pooled.pooled`."""
        cut, inside = windows(x, self.window), is_inside(x, self.window)
        query = self._heads(self.wq(means(cut, inside))[:, :, None])
        key, value = self._heads(self.wk(cut)), self._heads(self.wv(cut))
        mask = inside.expand(len(x), -1, -1).flatten(0, 1)[:, None, None]
        out = softmax_attention(query, key, value, mask)
        return self.wo(out.transpose(1, 2).flatten(1)).unflatten(0, (len(x), -1))

    def _heads(self, x: Tensor) -> Tensor:
        """[n, V, T, C] -> [n V, N, T, H]."""
        return x.flatten(0, 1).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
