"""Rows with images and text: hub data sets, tables, and lines of JSON beside image files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from forge_data.error import DataError
from forge_data.locks import locked
from forge_data.order.order import key
from forge_data.packing.packing import Packing
from forge_data.packing.stream import Streamed
from forge_data.sources.config import Opening, sources
from forge_data.sources.documents import rows
from forge_data.sources.hf import HfConfig
from forge_data.sources.items import ItemReader
from forge_data.store.tokenize import Held
from forge_data.tokenizer.tokenizer import TokenizerConfig, file_digest

from forge_vlm.images.marks import MARK
from forge_vlm.samples.make import Preparation, Rows, image_reader, key_of, make_samples
from forge_vlm.samples.packing import SamplePacking
from forge_vlm.samples.rows import RowLayout
from forge_vlm.samples.store import SampleStore
from forge_vlm.samples.stream import StreamedSamples

VERSION = 1
"""Version of the preparation; changes whenever the same rows would become other samples."""


@sources.register("image-text")
class ImageTextConfig(HfConfig):
    """Rows with images and text, read as `hf` reads them; each row is a sample.

    The text is one of: `text`, all of it the target; `prompt` and `completion`, the target; `messages`, in
    which the assistant's messages are targets, also in LLaVA's form (`from`, `value`); or `texts`, the list
    of texts of an interleaved document, all of them targets.

    Attributes:
        images: the column with an image or a list of images: as `datasets` stores them, bytes, or names of
            files. A row without images is a sample of text.
        texts: the column of interleaved documents as in OBELICS: a list, with null at the place of each
            image.
        mark: the text that marks the place of an image; without marks, images stand before the text, or
            before the first message of the user.
        root: the folder of relative image file names; absent means that of the rows.
        check: what is read of each image before training: the header of its file, or all of it.
        damaged: whether a damaged image is an error, or its sample is left out, counted and named. The latter
            needs `check = "decode"`: every rank then leaves out the same samples.
    """

    free_keys = path_keys = ("root",)

    images: str = "image"
    texts: str | None = None
    mark: str = MARK
    root: str | None = None
    check: Literal["header", "decode"] = "header"
    damaged: Literal["error", "skip"] = "error"

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        yield from super().contradictions()
        if self.texts is not None and (self.text or self.messages or self.prompt):
            yield (
                f"{self.path}: given texts = {self.texts!r} beside text, messages or prompt; expected "
                "one of them"
            )
        if self.damaged == "skip" and self.check != "decode":
            yield (
                'damaged = "skip" with check = "header", which does not see all damage, so that ranks would '
                'differ while training; set check = "decode"'
            )

    def rows(self) -> Rows:
        """Return the reader of the files."""
        return rows

    def layout(self) -> RowLayout:
        """Return which columns are images, and which are text."""
        root = None if self.root is None else Path(self.root).expanduser().absolute()
        return RowLayout(self.columns(), self.images, self.texts, self.mark, root)

    def packing(self, opening: Opening) -> Packing:
        """See `SourceConfig.packing`.

        Raises:
            DataError: the model reads no images, or there are no samples.
        """
        reader = image_reader(opening.items)
        tokenizer = opening.tokenizer.build()
        how = self.preparation(opening.tokenizer, reader, self.held(opening.split))
        root, files = self.root_and_files(opening.split)
        settings = *how.named(tokenizer), how.held, self.split
        made_of = key(
            VERSION, reader.digest, file_digest(tokenizer), settings, str(root), key_of(files, root)
        )
        folder = opening.cache / "samples" / f"{made_of:016x}"
        what = f"the images of {self.name or self.path}"
        if not folder.exists():
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
                tasks = [task for file in files for task in self.tasks(file, root)]
                with locked(folder.with_suffix(".lock"), f"{what} are looked at"):
                    if not folder.exists():
                        make_samples(tasks, folder, how, opening.making, what)
            except OSError as error:
                raise DataError(
                    f"the samples cannot be kept in {opening.cache}: {error}; set data.cache_dir or "
                    "$FORGE_CACHE"
                ) from None
        return SamplePacking(SampleStore(folder), reader, opening.data, tokenizer.eos_id)

    def preparation(self, tokenizer: TokenizerConfig, reader: ItemReader, held: Held) -> Preparation:
        """Return how rows become samples."""
        decode, skip = self.check == "decode", self.damaged == "skip"
        return Preparation(self.layout(), tokenizer, reader, held, decode, skip, self.rows())

    def streamed(self, **dealt: Any) -> Streamed:
        """See `HfConfig.streamed`."""
        return StreamedSamples(prepares=self.preparation, version=VERSION, **dealt)
