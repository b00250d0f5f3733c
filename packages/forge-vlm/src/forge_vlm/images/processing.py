"""From image files to pixels and patches. H, W pixels, p size of a patch. Imports no torch."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from forge_vlm.images.config import Cut

ORIENTATION = 0x0112
"""The EXIF tag with the orientation of the camera, 1 to 8; from 5 on, height and width are swapped."""

DAMAGE = OSError, SyntaxError, ValueError, TypeError, struct.error
"""The exceptions that Pillow raises for a damaged image."""

TIFF_SIZE = 0x0100, 0x0101
"""The tags of a TIFF with the width and the height of the stored pixels."""


def opened(raw: bytes) -> Any:
    """Open an image with Pillow, reading only its header.

    Raises:
        ValueError: Pillow knows no such format, or the image is so large that it may be an attack.
        ImportError: Pillow is missing.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ImportError("images need Pillow: pip install 'forge-vlm[data]'") from None
    try:
        return Image.open(io.BytesIO(raw))
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError, SyntaxError) as error:
        raise ValueError(f"no image: {error}") from None


def size_of(raw: bytes) -> tuple[int, int]:
    """Return height and width in pixels of an image, oriented as its EXIF tag says, from its file header.

    Raises:
        ValueError: it is no image.
    """
    image = opened(raw)
    # Pillow may have turned the size of a TIFF already
    width, height = (int(image.tag_v2[tag]) for tag in TIFF_SIZE) if image.format == "TIFF" else image.size
    return (width, height) if _orientation(image) >= 5 else (height, width)


def _orientation(image: Any) -> int:
    """Return the EXIF orientation of an image; in a PNG only if it comes before the pixels."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    try:
        orientation = image.getexif().get(ORIENTATION)
        return orientation if orientation in range(1, 9) else 1
    except DAMAGE as error:
        raise ValueError(f"a damaged image: {error}") from None


def decoded(raw: bytes) -> Any:
    """Decode an image with Pillow, oriented as its EXIF tag says, as RGB; transparent parts become white.

    Raises:
        ValueError: it is damaged.
    """
    from PIL import Image, ImageOps

    image = opened(raw)
    try:
        if _orientation(image) != 1:
            image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            below = Image.new("RGBA", image.size, (255, 255, 255, 255))
            image = Image.alpha_composite(below, image.convert("RGBA"))
        return image.convert("RGB")
    # Pillow rewrites EXIF when it turns an image, and fails at values there that should be numbers
    except (*DAMAGE, Image.DecompressionBombError) as error:
        raise ValueError(f"a damaged image: {error}") from None


def pictures_of(
    image: Any, cuts: Sequence[Cut], resample: str, fill: tuple[int, int, int]
) -> list[np.ndarray]:
    """Return the cuts of an image of Pillow, each [H, W, 3] uint8.

    Args:
        image: an RGB image.
        cuts: see `ImagesConfig.cuts`.
        resample: see `ImagesConfig`.
        fill: colour of a canvas around an image.
    """
    from PIL import Image

    found, done = list[np.ndarray](), dict[tuple[tuple[int, int], tuple[int, int]], Any]()
    for cut in cuts:
        if (key := (cut.resized, cut.padded)) not in done:
            (height, width), canvas = cut.resized, cut.padded
            one = image
            if image.size != (width, height):
                one = image.resize((width, height), Image.Resampling[resample.upper()])
            if canvas != cut.resized:
                below = Image.new("RGB", (canvas[1], canvas[0]), (0, 0, 0) if cut.corner else fill)
                middle = (canvas[1] - width) // 2, (canvas[0] - height) // 2
                below.paste(one, (0, 0) if cut.corner else middle)
                one = below
            done[key] = one
        box = cut.left, cut.top, cut.left + cut.width, cut.top + cut.height
        found.append(np.asarray(done[key].crop(box)))
    return found


def patches_of(pixels: np.ndarray, size: int) -> np.ndarray:
    """[H, W, 3] -> [H/p * W/p, p * p * 3], row by row; within a patch row by row, colours last.

    Rows and columns that fill no patch, at the bottom and at the right, are cut off.
    """
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    cut = (
        pixels[: rows * size, : columns * size].reshape(rows, size, columns, size, 3).transpose(0, 2, 1, 3, 4)
    )
    return np.ascontiguousarray(cut).reshape(rows * columns, size * size * 3)
