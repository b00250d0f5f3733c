"""Samples of text and images on disk: their tokens, and where their images are. Needs forge-data.

A folder with raw arrays: `tokens.bin` (int32, `PLACE` for places), `targets.bin` (a byte each), `samples.bin`
(`SAMPLE`), `names.bin`, `items.bin` (`ITEM`), `files.bin` and `file_ends.bin` (names of the files of images),
`images.bin` (images that are no files) and `manifest.json`. It is written under another name and renamed once
it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from forge_config import Config
from forge_data.error import DataError
from forge_data.sources.items import Size

from forge_vlm.samples.rows import Image, InFile
from forge_vlm.samples.sequences import Sample

HEAD = 64 << 10
"""Number of first bytes of an image that are hashed, to detect another file with the same name."""

SAMPLE = np.dtype([("tokens", "<i8"), ("items", "<i8"), ("name", "<i8")])
"""The indices at which the tokens, images and name of a sample end."""

ITEM = np.dtype(
    [
        *((name, "<i8") for name in ("file", "offset", "length")),
        ("hash", "<u8"),
        *((name, "<i8") for name in ("frames", "height", "width")),
    ]
)
"""The record of an image; file -1 is `images.bin`."""


class Prepared(NamedTuple):
    """A sample as the store keeps it.

    Attributes:
        name: name of its row.
        tokens: [L] int64, `PLACE` at places of visual tokens.
        targets: [L] bool.
        images: images in the order of their places.
        sizes: sizes of the images.
    """

    name: str
    tokens: np.ndarray
    targets: np.ndarray
    images: Sequence[Image]
    sizes: Sequence[Size]


class Manifest(Config):
    """The file `manifest.json`.

    Attributes:
        digest: names the content of the samples.
        samples: number of samples.
        skipped: number of rows that were left out because an image is damaged.
    """

    digest: str
    samples: int
    skipped: int


def head_of(raw: bytes) -> int:
    """Return the hash of the first bytes of an image."""
    return xxhash.xxh3_64_intdigest(raw[:HEAD])


class SampleWriter:
    """Writes samples into a folder that appears when all are written.

    Attributes:
        samples: number of samples added.
        images: number of their images.
        has_targets: whether any of them has a target.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._partial = folder, folder.with_name(f".{folder.name}.{os.getpid()}.partial")
        self._content = xxhash.xxh3_128()
        self._tokens = self.images = self._names = self._bytes = self.samples = 0
        self._files: dict[Path, int] = {}
        self.has_targets = False

    def __enter__(self) -> SampleWriter:
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self._open = {name: (self._partial / f"{name}.bin").open("wb") for name in NAMES}
        return self

    def add(self, sample: Prepared) -> None:
        """Append a sample."""
        items = np.zeros(len(sample.images), dtype=ITEM)
        for item, image, size in zip(items, sample.images, sample.sizes, strict=True):
            item["frames"], item["height"], item["width"] = size
            if isinstance(image, InFile):
                raw = read_file(image)
                item["file"] = self._files.setdefault(image.path, len(self._files))
                item["offset"] = image.offset
            else:
                raw = image
                item["file"], item["offset"] = -1, self._bytes
                self._bytes += self._open["images"].write(raw)
            item["length"], item["hash"] = len(raw), head_of(raw)
        tokens, name = sample.tokens.astype("<i4"), sample.name.encode()
        self._tokens, self.images = self._tokens + len(tokens), self.images + len(items)
        self._names += len(name)
        ends = np.array([(self._tokens, self.images, self._names)], dtype=SAMPLE)
        fields = [items[one].astype("<u8") for one in ("length", "hash", "frames", "height", "width")]
        for part in (tokens, sample.targets, np.array([self._tokens, self.images]), *fields):
            self._content.update(part.tobytes())
        arrays = {"tokens": tokens, "targets": sample.targets, "samples": ends, "items": items}
        for kind, array in arrays.items():
            self._open[kind].write(array.tobytes())
        self._open["names"].write(name)
        self.samples += 1
        # the first token of a sample follows nothing
        self.has_targets |= bool(sample.targets[1:].any())

    def publish(self, skipped: int) -> None:
        """Complete the folder and give it its name."""
        names = [os.fsencode(path.resolve()) for path in self._files]
        self._open["files"].write(b"".join(names))
        self._open["file_ends"].write(np.cumsum([len(name) for name in names], dtype="<i8").tobytes())
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())
        manifest = Manifest(digest=self._content.hexdigest(), samples=self.samples, skipped=skipped)
        (self._partial / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        self._partial.rename(self._folder)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            file.close()
        shutil.rmtree(self._partial, ignore_errors=True)


NAMES = ("tokens", "targets", "samples", "items", "images", "names", "files", "file_ends")


class SampleStore:
    """Reads the folder of a `SampleWriter`. See `forge_vlm.samples.packing.Samples`.

    Raises:
        DataError: it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self.manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
            self._samples = self._array("samples", SAMPLE)
            ends = self._samples["tokens"]
            self.lengths = np.diff(ends, prepend=0)
            self._tokens, self._targets = self._array("tokens", "<i4"), self._array("targets", "?")
            self._items, self._names = self._array("items", ITEM), self._array("names", "u1")
            self._files, self._file_ends = self._array("files", "u1"), self._array("file_ends", "<i8")
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise DataError(f"the samples in {folder} are damaged: {error}; remove the folder") from None
        last = self._samples[-1] if len(self._samples) else np.zeros(1, SAMPLE)[0]
        sizes = len(self._tokens), len(self._items), len(self._names), len(self._targets)
        if len(self._samples) != self.manifest.samples or sizes != (*last.tolist(), len(self._tokens)):
            raise DataError(f"the samples in {folder} are not as long as they were; remove the folder")
        self.digest = self.manifest.digest

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleStore, (self._folder,)

    def sizes(self, number: int) -> list[Size]:
        """See `Samples.sizes`."""
        first = self._samples["items"][number - 1] if number else 0
        return [size_of(item) for item in self._items[first : self._samples["items"][number]]]

    def sample(self, number: int) -> Sample:
        """See `Samples.sample`."""
        first = self._samples[number - 1] if number else np.zeros(1, SAMPLE)[0]
        (tokens, items, name), last = first.tolist(), self._samples[number]
        sample_name = self._names[name : last["name"]].tobytes().decode()
        found = [self._item(item, sample_name) for item in self._items[items : last["items"]]]
        ids = self._tokens[tokens : last["tokens"]].astype(np.int64)
        return Sample(ids, np.array(self._targets[tokens : last["tokens"]]), found, sample_name)

    def _item(self, item: np.void, sample: str) -> tuple[bytes, Size]:
        path = self._folder / "images.bin"
        if (file := int(item["file"])) >= 0:
            start = int(self._file_ends[file - 1]) if file else 0
            path = Path(os.fsdecode(self._files[start : self._file_ends[file]].tobytes()))
        raw = read_file(InFile(path, int(item["offset"]), int(item["length"])))
        if len(raw) != item["length"] or head_of(raw) != item["hash"]:
            raise DataError(
                f"{path} holds another image than when the sample {sample} was tokenized; put it back, or "
                f"remove {self._folder}"
            )
        return raw, size_of(item)

    def _array(self, name: str, dtype: Any) -> np.ndarray:
        path = self._folder / f"{name}.bin"
        return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype=dtype)


def size_of(item: np.void) -> Size:
    """Return the size that an image had when it was tokenized."""
    return Size(*(int(item[name]) for name in ("frames", "height", "width")))


class Unreadable(DataError):
    """A file exists but cannot be read; another process might read it, or this one later."""


def read_file(image: InFile) -> bytes:
    """Return the bytes of an image in a file.

    Raises:
        DataError: there is no such file.
        Unreadable: it cannot be read.
    """
    try:
        with image.path.open("rb") as file:
            file.seek(image.offset)
            return file.read(image.length)
    except FileNotFoundError as error:
        raise DataError(f"{image.path} cannot be read: {error}") from None
    except OSError as error:
        raise Unreadable(f"{image.path} cannot be read: {error}") from None
