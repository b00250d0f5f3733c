"""Videos as frames, each an image for the tower. n images and videos, V visual tokens, D width."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def frame_by_frame(grids: Tensor) -> Tensor:
    """Split [n, 3] frames, rows, columns into [sum of frames, 3] with one frame each; both on the host."""
    each = grids.repeat_interleave(grids[:, 0], 0)
    return torch.cat([torch.ones_like(each[:, :1]), each[:, 1:]], 1)


def merged(features: Tensor, grids: Tensor, tokens: Callable[[int, int], int], merge: int) -> Tensor:
    """Average the visual tokens [V, D] of `merge` consecutive frames.

    Args:
        features: visual tokens of all frames in their order.
        grids: [n, 3] on the host.
        tokens: returns the number of visual tokens of a frame with so many rows and columns of patches.
        merge: number of frames; the last group of a video may have fewer.
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
