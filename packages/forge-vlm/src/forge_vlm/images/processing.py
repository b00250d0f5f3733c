"""From the file of an image to pixels, and to patches. H, W pixels, p size of a patch. No torch."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from forge_vlm.images.config import Cut

ORIENTATION = 0x0112
"""The EXIF tag in which a camera says how it was held, 1 to 8; from 5 on, height and width change places."""

DAMAGE = OSError, SyntaxError, ValueError, TypeError, struct.error
"""What Pillow raises of a damaged image."""

TIFF_SIZE = 0x0100, 0x0101
"""The tags of a TIFF with the width and the height of what is stored."""


def opened(raw: bytes) -> Any:
    """An image of Pillow, of which only the header was read.

    Raises:
        ValueError: it is no image that Pillow knows, or one so large that reading it would be an attack.
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
    """Height and width in pixels of an image turned as its camera says, from the header of its file.

    Raises:
        ValueError: it is no image.
    """
    image = opened(raw)
    # Pillow may have turned the size of a TIFF already
    width, height = (int(image.tag_v2[tag]) for tag in TIFF_SIZE) if image.format == "TIFF" else image.size
    return (width, height) if _orientation(image) >= 5 else (height, width)


def _orientation(image: Any) -> int:
    """How an image is turned, from the header of its file; what PNG says behind its pixels is ignored."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    try:
        said = image.getexif().get(ORIENTATION)
        return said if said in range(1, 9) else 1
    except DAMAGE as error:
        raise ValueError(f"a damaged image: {error}") from None


def decoded(raw: bytes) -> Any:
    """An image of Pillow turned as its camera says, in colour; what is transparent is laid on white.

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
    # Pillow writes EXIF anew when it turns an image, and stumbles over what is no number there
    except (*DAMAGE, Image.DecompressionBombError) as error:
        raise ValueError(f"a damaged image: {error}") from None


def pictures_of(
    image: Any, cuts: Sequence[Cut], resample: str, fill: tuple[int, int, int]
) -> list[np.ndarray]:
    """The cuts of an image of Pillow, each [H, W, 3] uint8.

    Args:
        image: in colour.
        cuts: see `ImagesConfig.cuts`.
        resample: see `ImagesConfig`.
        fill: the colour around an image that is laid on a canvas.
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
    """[H, W, 3] -> [H/p * W/p, p * p * 3], row by row; in a patch row by row, colours last.

    What is over at the bottom and at the right is cut off.
    """
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    cut = (
        pixels[: rows * size, : columns * size].reshape(rows, size, columns, size, 3).transpose(0, 2, 1, 3, 4)
    )
    return np.ascontiguousarray(cut).reshape(rows * columns, size * size * 3)
