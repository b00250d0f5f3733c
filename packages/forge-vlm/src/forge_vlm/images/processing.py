"""From the file of an image to pixels, and to patches. H, W pixels, p size of a patch. No torch."""

from __future__ import annotations

import io
from typing import Any

import numpy as np


def opened(raw: bytes) -> Any:
    """An image of Pillow, of which only the header was read.

    Raises:
        ValueError: it is no image that Pillow knows.
        ImportError: Pillow is missing.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ImportError("images need Pillow: pip install 'forge-vlm[data]'") from None
    try:
        return Image.open(io.BytesIO(raw))
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"no image: {error}") from None


def pixels_of(raw: bytes, height: int, width: int) -> np.ndarray:
    """[height, width, 3] uint8: an image turned as its camera says, in colour, resized (bicubic).

    Raises:
        ValueError: it is damaged.
    """
    from PIL import Image, ImageOps

    try:
        image = ImageOps.exif_transpose(opened(raw)).convert("RGB")
    except (OSError, SyntaxError) as error:
        raise ValueError(f"a damaged image: {error}") from None
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)


def patches_of(pixels: np.ndarray, size: int) -> np.ndarray:
    """[H, W, 3] -> [H/p * W/p, p * p * 3], row by row; in a patch row by row, colours last.

    What is over at the bottom and at the right is cut off.
    """
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    cut = (
        pixels[: rows * size, : columns * size].reshape(rows, size, columns, size, 3).transpose(0, 2, 1, 3, 4)
    )
    return np.ascontiguousarray(cut).reshape(rows * columns, size * size * 3)
