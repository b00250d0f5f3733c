"""What a vision-language model makes of images: an `ItemReader` of forge-data. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from forge_config import digest

from forge_vlm.connectors.config import ConnectorConfig
from forge_vlm.encoders.config import EncoderConfig
from forge_vlm.fusion.config import FusionConfig
from forge_vlm.images.processing import opened, patches_of, pixels_of

if TYPE_CHECKING:
    from forge_data.sources.items import Size

VERSION = 1
"""Another number when the same image would become other patches."""


class ImageReader:
    """Images as the tower wants them. See `forge_data.sources.items.ItemReader`.

    Attributes:
        digest: names all that decides what is made of an image.
        ragged: what `read` returns of no image.
        host: of these, what stays on the host.
    """

    def __init__(self, encoder: EncoderConfig, connector: ConnectorConfig, fusion: FusionConfig) -> None:
        self.encoder, self.connector, self.fusion = encoder, connector, fusion
        self.digest = f"{VERSION} {digest(encoder)} {digest(connector)} {digest(fusion)}"
        self.host = frozenset({"grids"})
        self.image_size = encoder.side * encoder.patch_size

    @property
    def ragged(self) -> Mapping[str, np.ndarray]:
        """Dtype and shape of the rows of each array of `read`."""
        pixels = 3 * self.encoder.patch_size**2
        return {"patches": np.empty((0, pixels), np.uint8), "grids": np.empty((0, 3), np.int64)}

    def measure(self, raw: bytes) -> Size:
        """See `ItemReader.measure`."""
        from forge_data.sources.items import Size

        width, height = opened(raw).size
        return Size(1, height, width)

    def layout(self, size: Size) -> list[str | int]:
        """See `ItemReader.layout`: as many places as the connector makes tokens."""
        return [self._tokens(size)]

    def read(self, raw: bytes | np.ndarray, size: Size) -> dict[str, np.ndarray]:
        """See `ItemReader.read`; pixels [H, W, 3] uint8 of the size of the encoder are taken as they are."""
        height, width = self.encoder.resized(size.height, size.width)
        pixels = raw if isinstance(raw, np.ndarray) else pixels_of(raw, height, width)
        grid = np.array([[1, *self.encoder.grid(size.height, size.width)]])
        return {"patches": patches_of(pixels, self.encoder.patch_size), "grids": grid}

    def sequence(
        self, places: np.ndarray, sizes: Sequence[Size], doc_ids: np.ndarray
    ) -> dict[str, np.ndarray]:
        """See `ItemReader.sequence`."""
        ends = np.cumsum([self._tokens(size) for size in sizes], dtype=np.int64)
        images = np.where(places > 0, 1 + np.searchsorted(ends, places - 1, "right"), 0)
        more = self.fusion.arrays(places, images, doc_ids)
        return {"image_index": places, "image_places": np.array(places.max(initial=0)), **more}

    def _tokens(self, size: Size) -> int:
        return self.connector.tokens(*self.encoder.grid(size.height, size.width), self.encoder.extra)
