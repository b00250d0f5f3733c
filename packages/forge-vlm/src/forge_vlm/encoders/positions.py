"""Learnt positions of patches, also for images of another size than the table. D width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from forge_model.roles import Role
from torch import Tensor, nn


def images_of(grids: Tensor) -> list[tuple[int, int]]:
    """Return rows and columns of patches for each frame of grids [n, 3] (frames, rows, columns)."""
    return [(rows, columns) for frames, rows, columns in grids.tolist() for _ in range(frames)]


class Positions(nn.Module):
    """A learnt vector for each place of a square image, after one for the class token.

    Args:
        side: rows and columns of the table.
        extra: number of vectors before those of the places.
        dim: D.
        resize: how the table is resized for an image of another size: `bicubic`, as DINOv2, and as CLIP and
            SigLIP if they are asked to interpolate; `bilinear` with antialiasing, as SigLIP 2, also for
            the same size; or `nearest`, by the fraction of the image, as Idefics2 and 3.
    """

    roles: ClassVar[dict[str, Role]] = {"weight": "embedding"}

    def __init__(self, side: int, extra: int, dim: int, resize: str) -> None:
        super().__init__()
        self.side, self.extra, self.resize = side, extra, resize
        self.weight = nn.Parameter(torch.empty(extra + side * side, dim))

    def forward(self, x: Tensor, images: Sequence[tuple[int, int]]) -> Tensor:
        """Add positions to patches [P, D] of images of these sizes or, without images, to class tokens."""
        if not images:
            return x + self.weight[: self.extra]
        if len(set(images)) == 1:
            return (x.unflatten(0, (len(images), -1)) + self.table(*images[0])).flatten(0, 1)
        return x + torch.cat([self.table(*image) for image in images])

    def table(self, rows: int, columns: int) -> Tensor:
        """Return [rows * columns, D]; interpolation runs in float32, as in `transformers`."""
        places = self.weight[self.extra :]
        if self.resize == "nearest":
            return places[self._nearest(rows)[:, None] * self.side + self._nearest(columns)].flatten(0, 1)
        if self.resize == "bicubic" and rows == columns == self.side:
            return places
        table = places.float().unflatten(0, (self.side, self.side)).permute(2, 0, 1)[None]
        resized = F.interpolate(
            table,
            (rows, columns),
            mode=self.resize,
            align_corners=False,
            antialias=self.resize == "bilinear",
        )
        return resized[0].flatten(1).T.to(places.dtype)

    def _nearest(self, number: int) -> Tensor:
        """Return the row (or column) of the table for each of `number` rows, rounded as in `transformers`."""
        device = self.weight.device
        bounds = torch.arange(1 / self.side, 1.0, 1 / self.side, device=device)
        step = 1.0 / torch.full((), float(number), device=device)
        places = torch.arange(number, device=device, dtype=torch.float32) * step
        return torch.bucketize(places.clamp(max=1.0 - 1e-6), bounds, right=True)
