"""Frames of videos: images for the tower, fewer afterwards. n images and videos, V visual tokens, D width."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def frame_by_frame(grids: Tensor) -> Tensor:
    """[n, 3] frames, rows, columns -> [sum of frames, 3] with one frame each; both on the host."""
    each = grids.repeat_interleave(grids[:, 0], 0)
    return torch.cat([torch.ones_like(each[:, :1]), each[:, 1:]], 1)


def merged(features: Tensor, grids: Tensor, tokens: Callable[[int, int], int], merge: int) -> Tensor:
    """Visual tokens of frames [V, D], of which `merge` that follow each other are averaged.

    Args:
        features: of all frames in their order.
        grids: [n, 3] on the host.
        tokens: of a frame with so many rows and columns of patches.
        merge: frames; the last ones of a video may be fewer.
    """
    if merge == 1:
        return features
    shapes = [(frames, tokens(rows, columns)) for frames, rows, columns in grids.tolist()]
    parts = features.split([frames * count for frames, count in shapes])
    return torch.cat(
        [
            group.mean(0)
            for part, (frames, count) in zip(parts, shapes, strict=True)
            for group in part.unflatten(0, (frames, count)).split(merge)
        ]
    )
