"""Rendered shapes and questions: a task whose answers only the images have; the same on every machine."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
from forge_config import Meta
from forge_data.error import DataError
from forge_data.order.order import key
from forge_data.packing.packing import Packing
from forge_data.sources.config import Opening, SourceConfig, sources
from forge_data.sources.items import ItemReader, Size
from forge_data.tokenizer.tokenizer import Tokenizer, file_digest

from forge_vlm.images.marks import PLACE
from forge_vlm.samples.packing import SamplePacking
from forge_vlm.samples.sequences import Sample

VERSION = 1
COLOURS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 80, 230), "yellow": (230, 210, 40)}
KINDS = ("circle", "square", "triangle")
COUNTS = ("one", "two", "three", "four")
SIZES = {"small": 0.28, "large": 0.45}
PLACES = ("top left", "top right", "bottom left", "bottom right")


class Scene(NamedTuple):
    """The content of an image: shapes of one kind, colour and size in some of its four quarters."""

    colour: str
    kind: str
    size: str
    quarters: tuple[int, ...]

    def caption(self) -> str:
        """A description of the scene without its quarters."""
        many = "s" if len(self.quarters) > 1 else ""
        return f"{COUNTS[len(self.quarters) - 1]} {self.size} {self.colour} {self.kind}{many}"


def drawn(random: np.random.Generator) -> Scene:
    """Draw a random scene."""
    count = int(random.integers(1, 5))
    quarters = tuple(sorted(random.permutation(4)[:count].tolist()))
    return Scene(
        str(random.choice(list(COLOURS))),
        str(random.choice(KINDS)),
        str(random.choice(list(SIZES))),
        quarters,
    )


def question(scenes: list[Scene], random: np.random.Generator) -> tuple[str, str]:
    """Return a question about one or two scenes, and its answer."""
    if len(scenes) == 2:
        one, other = scenes
        if random.random() < 0.5:
            return "same colour?", "yes" if one.colour == other.colour else "no"
        more = np.sign(len(one.quarters) - len(other.quarters))
        return "which has more?", ("second", "neither", "first")[int(more) + 1]
    (scene,) = scenes
    asked = {
        "colour?": scene.colour,
        "how many?": COUNTS[len(scene.quarters) - 1],
        "shape?": scene.kind,
        "size?": scene.size,
        "describe": scene.caption(),
    }
    if len(scene.quarters) == 1:
        asked["where?"] = PLACES[scene.quarters[0]]
    chosen = str(random.choice(list(asked)))
    return chosen, asked[chosen]


def rendered(scene: Scene, size: int) -> np.ndarray:
    """Render a scene, [size, size, 3] uint8."""
    image = np.full((size, size, 3), 30, dtype=np.uint8)
    half = size / 2
    y, x = np.mgrid[0:size, 0:size] + 0.5
    reach = SIZES[scene.size] * half
    for quarter in scene.quarters:
        dy, dx = y - (quarter // 2 + 0.5) * half, x - (quarter % 2 + 0.5) * half
        if scene.kind == "circle":
            inside = dy**2 + dx**2 <= reach**2
        elif scene.kind == "square":
            inside = np.maximum(abs(dy), abs(dx)) <= 0.9 * reach
        else:
            inside = (abs(dy) <= reach) & (abs(dx) <= (dy + reach) / 2)
        image[inside] = COLOURS[scene.colour]
    return image


class Shapes:
    """The samples of a split. See `forge_vlm.samples.packing.Samples`."""

    def __init__(
        self, reader: ItemReader, tokenizer: Tokenizer, count: int, pairs: float, size: int, seed: int
    ) -> None:
        self._reader, self._tokenizer, self._pairs = reader, tokenizer, pairs
        self._size, self._seed = size, seed
        self.digest = f"shapes {VERSION} {file_digest(tokenizer)} {count} {pairs} {size} {seed}"
        texts = [self._text(number) for number in range(count)]
        self.lengths = np.array([len(tokens) for tokens, _, _ in texts], dtype=np.int64)
        self._images = [len(scenes) for _, _, scenes in texts]

    def sizes(self, number: int) -> list[Size]:
        """See `Samples.sizes`."""
        return [Size(1, self._size, self._size)] * self._images[number]

    def sample(self, number: int) -> Sample:
        """See `Samples.sample`."""
        tokens, targets, scenes = self._text(number)
        size = Size(1, self._size, self._size)
        return Sample(tokens, targets, [(rendered(scene, self._size), size) for scene in scenes])

    def _text(self, number: int) -> tuple[np.ndarray, np.ndarray, list[Scene]]:
        random = np.random.default_rng((self._seed, number))
        scenes = [drawn(random) for _ in range(2 if random.random() < self._pairs else 1)]
        asked, answer = question(scenes, random)
        parts = self._reader.layout(Size(1, self._size, self._size)) * len(scenes)
        bos = np.array(getattr(self._tokenizer, "bos_ids", ()), dtype=np.int64)
        given = [bos, *(self._ids(part) for part in (*parts, f"{asked} "))]
        target = np.append(self._ids(answer), self._tokenizer.eos_id)
        tokens = np.concatenate([*given, target])
        return tokens, np.arange(len(tokens)) >= len(tokens) - len(target), scenes

    def _ids(self, part: str | int) -> np.ndarray:
        if isinstance(part, int):
            return np.full(part, PLACE, dtype=np.int64)
        return self._tokenizer.encode(part).astype(np.int64)


@sources.register("shapes")
class ShapesConfig(SourceConfig):
    """Images with one to four shapes, and questions about their colour, number, kind, size and place.

    Attributes:
        samples: number of samples for training; each has one or two images, a question and its answer, which
            is the target.
        held_out: number of samples for validation, which differ from those for training.
        pairs: fraction of the samples that have two images and ask to compare them.
        seed: seed of the samples.
    """

    samples: Annotated[int, Meta(ge=1)] = 20000
    held_out: Annotated[int, Meta(ge=0)] = 512
    pairs: Annotated[float, Meta(ge=0, le=1)] = 0.2
    seed: Annotated[int, Meta(ge=0)] = 0

    def has_validation(self) -> bool:
        """See `SourceConfig.has_validation`."""
        return self.held_out > 0

    def packing(self, opening: Opening) -> Packing:
        """See `SourceConfig.packing`.

        Raises:
            DataError: the model reads no images.
        """
        if opening.items is None:
            raise DataError(
                'a source of images, and a model that takes none; use model.type = "vision-language"'
            )
        tokenizer, train = opening.tokenizer.build(), opening.split == "train"
        size: int = opening.items.image_size  # type: ignore[attr-defined]
        count, seed = (self.samples, 0) if train else (self.held_out, 1)
        shapes = Shapes(opening.items, tokenizer, count, self.pairs, size, key(self.seed, seed) % (1 << 32))
        return SamplePacking(shapes, opening.items, opening.data, tokenizer.eos_id)
