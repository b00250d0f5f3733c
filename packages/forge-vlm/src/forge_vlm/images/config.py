"""The section `[model.images]`: how an image becomes the pixels of a tower. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from forge_config import Config, Meta

Count = Annotated[int, Meta(ge=1)]


class Cut(NamedTuple):
    """One picture for a tower, cut out of an image.

    Attributes:
        resized: height and width to which the image is resized.
        padded: height and width of the canvas around the resized image; `resized` without padding.
        top: first row of the picture.
        left: first column of the picture.
        height: height of the picture, in pixels.
        width: width of the picture, in pixels.
        corner: whether the image is at the top left of a black canvas; otherwise it is in the middle.
    """

    resized: tuple[int, int]
    padded: tuple[int, int]
    top: int
    left: int
    height: int
    width: int
    corner: bool = False


class ImagesConfig(Config):
    """How images become pictures of the size that the tower takes.

    Attributes:
        fit: an image of another shape is stretched (`stretch`); or its shorter side is resized and the middle
            is taken (`crop`); or it is laid on a square of the mean colour of the tower (`pad`), or on black
            at the top left of the picture (`corner`, as Mllama).
        shorter_side: length of the shorter side for `crop`, in pixels; absent means that of the tower.
        resample: how pixels are interpolated.
        tiles: largest number of tiles that are read besides the image as a whole, each as large as the tower
            takes, so that small things stay visible (AnyRes; chosen as in InternVL 1.5, arXiv:2404.16821
            section 3.3); 1 reads only the image as a whole.
        before: text in front of an image, such as `<|vision_start|>`.
        after: text after an image.
    """

    fit: Literal["stretch", "crop", "pad", "corner"] = "stretch"
    shorter_side: Count | None = None
    resample: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bicubic"
    tiles: Annotated[int, Meta(ge=1, le=64)] = 1
    before: str = ""
    after: str = ""

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.shorter_side is not None and self.fit != "crop":
            yield (f'images.shorter_side = {self.shorter_side} with fit = "{self.fit}"; it belongs to "crop"')

    def cuts(self, height: int, width: int, target: tuple[int, int], tile: int = 0) -> list[Cut]:
        """Return the pictures of an image: tiles row by row, then the image as a whole.

        Args:
            height: height of the image, in pixels.
            width: width of the image, in pixels.
            target: height and width of a picture.
            tile: with `corner`, the size in pixels up to which an image is enlarged.
        """
        if self.fit == "corner":
            return [self._corner(height, width, target, tile)]
        rows, columns = self._grid(height, width, target) if self.tiles > 1 else (1, 1)
        if rows * columns == 1:
            return [self._whole(height, width, target)]
        large = rows * target[0], columns * target[1]
        tiles = [
            Cut(large, large, row * target[0], column * target[1], *target)
            for row in range(rows)
            for column in range(columns)
        ]
        return [*tiles, self._whole(height, width, target)]

    def _grid(self, height: int, width: int, target: tuple[int, int]) -> tuple[int, int]:
        """Return rows and columns of the tile grid nearest in shape to the image.

        Among grids of one shape, takes the largest with less than twice the pixels of the image, else the
        smallest.
        """
        grids = [(n // columns, columns) for n in range(1, self.tiles + 1) for columns in divisors(n)]
        ratios = [abs(width / height - columns * target[1] / (rows * target[0])) for rows, columns in grids]
        alike = [grid for grid, ratio in zip(grids, ratios, strict=True) if ratio == min(ratios)]
        small = [grid for grid in alike if grid[0] * grid[1] * target[0] * target[1] < 2 * height * width]
        return small[-1] if small else alike[0]

    def _corner(self, height: int, width: int, target: tuple[int, int], tile: int) -> Cut:
        """Cut as `get_image_size_fit_to_canvas` of transformers: not beyond the image size or `tile`."""
        high, wide = min(max(height, tile), target[0]), min(max(width, tile), target[1])
        if wide / width < high / height:
            scaled = min(int(height * (wide / width)) or 1, high), wide
        else:
            scaled = high, min(int(width * (high / height)) or 1, wide)
        return Cut(scaled, target, 0, 0, *target, corner=True)

    def _whole(self, height: int, width: int, target: tuple[int, int]) -> Cut:
        if self.fit == "pad":
            side = max(height, width)
            scaled = max(1, round(target[0] * height / side)), max(1, round(target[1] * width / side))
            return Cut(scaled, target, 0, 0, *target)
        if self.fit == "crop":
            short = self.shorter_side or min(target)
            long = int(short * max(height, width) / min(height, width))
            resized = (short, long) if height <= width else (long, short)
            padded = max(resized[0], target[0]), max(resized[1], target[1])
            top, left = ((padded[axis] - target[axis]) // 2 for axis in (0, 1))
            return Cut(resized, padded, top, left, *target)
        return Cut(target, target, 0, 0, *target)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in rising order."""
    return [one for one in range(1, number + 1) if number % one == 0]
