"""Positions of visual tokens and of the text after them. T tokens of a sequence. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from forge_vlm.connectors.config import ConnectorConfig

PositionKind = Literal["sequential", "image", "grid"]
"""`sequential` counts all tokens; the visual tokens of an image share one position (`image`); or each picture
has positions by frame, row and column (`grid`, M-RoPE of Qwen2-VL, arXiv:2409.12191 section 2.1)."""

AXES: dict[PositionKind, int] = {"sequential": 0, "image": 1, "grid": 3}


def position_offsets(
    kind: PositionKind,
    places: np.ndarray,
    images: np.ndarray,
    grids: Sequence[Sequence[tuple[int, int, int]]],
    doc_ids: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return `position_offsets` [axes, T] int64, added to the index of each token in its document.

    The text after a picture continues after its largest row or column, also after those of a video, as in
    `transformers`. Text alone has offsets of zero.

    Args:
        kind: kind of positions.
        places: [T] 0 for text, else 1 + the number of the visual token in the sequence.
        images: [T] 0 for text, else 1 + the number of the image.
        grids: for each image, frames, rows and columns of the visual tokens of its pictures.
        doc_ids: [T] the document of each token.
    """
    if kind == "sequential":
        return {}
    offsets = np.zeros((AXES[kind], len(places)), dtype=np.int64)
    firsts = np.flatnonzero(np.diff(images, prepend=0) * (images > 0))
    for first in firsts.tolist():
        last_of_document = np.searchsorted(doc_ids, doc_ids[first], side="right")
        at = first
        pictures = grids[images[first] - 1]
        for frames, rows, columns in pictures if kind == "grid" else _all(pictures):
            count = min(frames * rows * columns, len(places) - at)
            nth = np.arange(count)
            frame, place = nth // (rows * columns), nth % (rows * columns)
            turns = np.stack([frame, place // columns, place % columns]) if kind == "grid" else 0 * nth[None]
            offsets[:, at : at + count] += turns - nth
            used = max(rows, columns) if kind == "grid" else 1
            offsets[:, at + count : last_of_document] += used - count
            at += count
    return {"position_offsets": offsets}


def _all(grids: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return the grid of an image whose visual tokens are in one row."""
    return [(1, 1, sum(frames * rows * columns for frames, rows, columns in grids))]


def grid_of(connector: ConnectorConfig, rows: int, columns: int) -> tuple[int, int]:
    """Return rows and columns of the visual tokens that a connector makes of so many patches.

    Raises:
        ValueError: its tokens form no grid.
    """
    tokens = connector.tokens(rows, columns)
    for pooled in range(1, max(rows, columns) + 1):
        if (grid := (-(-rows // pooled), -(-columns // pooled)))[0] * grid[1] == tokens:
            return grid
    raise ValueError(
        f'positions = "grid", and the connector makes {tokens} tokens of {rows} x {columns} patches, which '
        'are no grid; use positions = "sequential" or "image"'
    )
