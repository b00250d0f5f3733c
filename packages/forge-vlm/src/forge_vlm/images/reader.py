"""The `ItemReader` of vision-language models: images to patches and places. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from forge_config import digest

from forge_vlm.connectors.config import ConnectorConfig
from forge_vlm.encoders.config import EncoderConfig
from forge_vlm.fusion.config import FusionConfig
from forge_vlm.images.config import Cut, ImagesConfig
from forge_vlm.images.positions import PositionKind, grid_of, position_offsets
from forge_vlm.images.processing import decoded, patches_of, pictures_of, size_of
from forge_vlm.images.video import VideoConfig, frames_of, is_video, measured

if TYPE_CHECKING:
    from forge_data.sources.items import Size

VERSION = 2
"""Version of the conversion; changes whenever the same image would become other patches."""


class ImageReader:
    """Converts images to pictures for the tower. See `forge_data.sources.items.ItemReader`.

    Attributes:
        digest: names everything that decides about the result for an image.
        ragged: the arrays of `read`, empty.
        host: names of inputs that stay on the host.
    """

    def __init__(
        self,
        encoder: EncoderConfig,
        connector: ConnectorConfig,
        fusion: FusionConfig,
        images: ImagesConfig,
        positions: PositionKind,
        video: VideoConfig | None = None,
    ) -> None:
        self.positions: PositionKind = positions
        self.encoder, self.connector, self.fusion = encoder, connector, fusion
        self.images, self.video, self.tokens_beside = images, video, fusion.tokens_beside
        parts = [encoder, connector, fusion, images, *([] if video is None else [video])]
        self.digest = " ".join([str(VERSION), positions, *map(digest, parts)])
        self.host = frozenset({"grids"}) | fusion.host
        self.image_size = encoder.side * encoder.patch_size

    @property
    def ragged(self) -> Mapping[str, np.ndarray]:
        """Empty arrays with the names, dtypes and row shapes of the arrays of `read`."""
        pixels = 3 * self.encoder.patch_size**2
        return {"patches": np.empty((0, pixels), np.uint8), "grids": np.empty((0, 3), np.int64)}

    @property
    def by_token(self) -> tuple[str, ...]:
        """The names of the inputs from `sequence` with a value for each token, [..., T]."""
        offsets = () if self.positions == "sequential" else ("position_offsets",)
        return ("image_index", *self.fusion.by_token(), *offsets)

    def measure(self, raw: bytes) -> Size:
        """See `ItemReader.measure`."""
        from forge_data.sources.items import Size

        if not is_video(raw):
            return Size(1, *size_of(raw))
        if self.video is None:
            raise ValueError("a video, and the model reads none; set model.video")
        return Size(*measured(raw, self.video))

    def cuts(self, size: Size) -> list[Cut]:
        """Return the pictures that the tower gets from an image, or from each frame, of that size."""
        target = self.encoder.resized(size.height, size.width)
        cuts = self.images.cuts(size.height, size.width, target, self.image_size)
        # the last one is all of the image
        return cuts[-1:] if size.frames > 1 else cuts

    def grids(self, size: Size) -> list[tuple[int, int]]:
        """Return rows and columns of patches of each picture of `cuts`."""
        patch = self.encoder.patch_size
        return [(cut.height // patch, cut.width // patch) for cut in self.cuts(size)]

    def merged(self, frames: int) -> int:
        """Return the number of frames after merging so many."""
        return frames if self.video is None else -(-frames // self.video.merge)

    def layout(self, size: Size) -> list[str | int]:
        """See `ItemReader.layout`; has as many places as the fusion needs for the visual tokens."""
        around = [self.images.before, self.fusion.places(self.visual_tokens(size)), self.images.after]
        return [part for part in around if part]

    def visual_tokens(self, size: Size) -> int:
        """Return the number of visual tokens of all pictures of an image, or of a video after merging."""
        return self.merged(size.frames) * sum(map(self._tokens, self.grids(size)))

    def read(self, raw: bytes | np.ndarray, size: Size) -> dict[str, np.ndarray]:
        """See `ItemReader.read`; `raw` may be pixels [H, W, 3] uint8."""
        cuts, patch = self.cuts(size), self.encoder.patch_size
        fill = tuple(int(255 * mean) for mean in self.encoder.mean)
        pictures = [
            picture
            for image in self._opened(raw, size)
            for picture in pictures_of(image, cuts, self.images.resample, fill)  # type: ignore[arg-type]
        ]
        return {
            "patches": np.concatenate([patches_of(picture, patch) for picture in pictures]),
            "grids": np.array([[size.frames, *grid] for grid in self.grids(size)]),
        }

    def _opened(self, raw: bytes | np.ndarray, size: Size) -> list[Any]:
        """Return the image, or the frames of a video."""
        from PIL import Image

        if isinstance(raw, bytes) and not is_video(raw):
            images = [decoded(raw)]
        else:
            frames = frames_of(raw, size.frames) if isinstance(raw, bytes) else [raw]
            images = [Image.fromarray(frame) for frame in frames]
        if images[0].size != (size.width, size.height):
            raise ValueError(
                f"the image has {images[0].size[1]} x {images[0].size[0]} pixels; expected {size.height} x "
                f"{size.width}, as it had when its text was tokenized"
            )
        return images

    def sequence(
        self,
        places: np.ndarray,
        sizes: Sequence[Size],
        doc_ids: np.ndarray,
        prompt: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """See `ItemReader.sequence`."""
        grids = [(self.merged(size.frames), self.grids(size)) for size in sizes]
        counts = [self.visual_tokens(size) for size in sizes]
        ends = np.cumsum([self.fusion.places(count) for count in counts], dtype=np.int64)
        images = np.where(places > 0, 1 + np.searchsorted(ends, places, side="left"), 0)
        given = {"image_index": places, "image_places": np.array(places.max(initial=0))}
        if self.positions != "sequential":
            pooled = [[(frames, *self._pooled(grid)) for grid in one] for frames, one in grids]
            rising = np.where(doc_ids < 0, doc_ids.max(initial=0) + 1, doc_ids)
            given |= position_offsets(self.positions, places, images, pooled, rising)
        given |= self.fusion.prompt_arrays(np.zeros_like(places, bool) if prompt is None else prompt, doc_ids)
        return given | self.fusion.arrays(places, images, doc_ids, counts)

    def _pooled(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return rows and columns of the visual tokens of a picture."""
        return grid_of(self.connector, *grid) if self.positions == "grid" else (1, self._tokens(grid))

    def _tokens(self, grid: tuple[int, int]) -> int:
        """Return the number of visual tokens of a picture with so many rows and columns of patches."""
        return self.connector.tokens(*grid, self.encoder.extras(*grid))
