"""Where samples come from: the registry of `[[data.sources]]`. Imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import xxhash
from forge_config import Config, Meta, Registry
from msgspec import structs

from forge_data.error import DataError
from forge_data.locks import locked
from forge_data.order.order import key
from forge_data.packing.packing import Packing
from forge_data.packing.stream import Streamed
from forge_data.packing.text import pack
from forge_data.sources.columns import Columns, TextColumn, named
from forge_data.sources.documents import were_text
from forge_data.sources.files import find_files, walk
from forge_data.sources.items import ItemReader
from forge_data.store.part import held_out_part
from forge_data.store.tokenize import ALONE, Held, Making, states_of, tokenize_files
from forge_data.store.tokens import FORMAT, TokenStore
from forge_data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, file_digest, is_named

if TYPE_CHECKING:
    from forge_data.config import DataConfig

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class Opening:
    """The arguments for opening a source.

    Attributes:
        split: the split of the samples.
        tokenizer: how text becomes tokens.
        cache: a folder for results that are expensive to make.
        making: number of processes, and the receiver of their progress.
        data: the section `[data]`: length of the sequences, packing, whether documents are masked.
        items: the reader of items such as images; None: there is none. A source that needs it raises a
            `DataError` where it is None, and includes its digest in that of the packing.
    """

    split: Split
    tokenizer: TokenizerConfig
    cache: Path
    making: Making
    data: DataConfig
    items: ItemReader | None = None


class SourceConfig(Config):
    """Interface of `[[data.sources]]`. A source has `packing`, or `open` if it has nothing but tokens.

    Attributes:
        weight: share of the sequences, relative to the other sources; 0 waits for a phase that names it.
        name: its name in phases and plans; absent means its place, from 0.
        max_epochs: number of passes over it at most; absent means any number.
    """

    weight: Annotated[float, Meta(ge=0, le=1e12)] = 1.0
    name: str | None = None
    max_epochs: Annotated[float, Meta(gt=0, le=1e12)] | None = None

    def has_validation(self) -> bool:
        """Whether there is text for validation; training needs none."""
        return False

    def has_tokens_only(self) -> bool:
        """Whether its sequences have no inputs beside tokens, such as images."""
        return type(self).packing is SourceConfig.packing

    def packing(self, opening: Opening) -> Packing:
        """Return the sequences of a split, made first if need be; by default of the tokens of `open`.

        Raises:
            DataError: the data are missing, were made with another tokenizer, or cannot be cut as asked.
        """
        store = self.open(opening.split, opening.tokenizer, opening.cache, opening.making)
        return pack(store, opening.data, opening.cache)

    def open(
        self, split: Split, tokenizer: TokenizerConfig, cache: Path, making: Making = ALONE
    ) -> TokenStore:
        """Return the tokens of a split, made first if need be.

        Raises:
            DataError: the data are missing, or were made with another tokenizer.
        """
        raise NotImplementedError

    def whole(self) -> SourceConfig:
        """Return the same source with nothing held out, for an evaluation on all of it."""
        return self

    def is_streamed(self) -> bool:
        """Whether the training text is read while training, by `open_stream` in place of `open`."""
        return False

    def pin_stream(self) -> str | None:
        """Return the version of the stream that a new run reads to its end; None if there is only one.

        Raises:
            DataError: it cannot be determined.
        """
        return None

    def open_stream(self, cache: Path, pin: str | None = None) -> Streamed:
        """Open the stream.

        Args:
            cache: a folder for results that are expensive to find.
            pin: from `pin_stream`, at the start of the run.

        Raises:
            DataError: the data are missing.
        """
        raise NotImplementedError


sources = Registry("source", SourceConfig)


class TextSourceConfig(SourceConfig):
    """Text that is tokenized at its first use and kept in the cache, named after the content of its files.

    Attributes:
        held_out: fraction of the documents kept for validation, chosen by their names.
    """

    held_out: Annotated[float, Meta(ge=0, lt=1)] = 0.02

    def root_and_files(self, split: Split) -> tuple[Path, list[Path]]:
        """Return the folder that names are relative to, and the files in the order they are read."""
        raise NotImplementedError

    def has_validation(self) -> bool:
        """See `SourceConfig.has_validation`."""
        return self.held_out > 0

    def whole(self) -> SourceConfig:
        """See `SourceConfig.whole`."""
        return structs.replace(self, held_out=0.0)

    def held(self, split: Split) -> Held:
        """Return which documents of these files belong to the split."""
        if split == "validation" and not self.has_validation():
            raise DataError(
                "this source holds nothing out for validation: held_out is 0; set it to e.g. 0.02"
            )
        return Held(split=split, fraction=self.held_out)

    def columns(self) -> Columns:
        """Return the parts of a row that make a document."""
        return TextColumn()

    def open(
        self, split: Split, tokenizer: TokenizerConfig, cache: Path, making: Making = ALONE
    ) -> TokenStore:
        """See `SourceConfig.open`. One process tokenizes while others that need the same wait.

        A killed process loses at most the last ten seconds of its work. If the text is gone, its last tokens
        are read, and a line on standard error says so.

        Raises:
            DataError: there is no such text, or the cache cannot be written.
        """
        built, held, columns = tokenizer.build(), self.held(split), self.columns()
        settings = structs.asdict(structs.replace(self, weight=1.0, name=None, max_epochs=None))
        kept = cache / "tokens" / f"{key(split, type(self), settings, file_digest(built)):016x}.last"
        try:
            root, files = self.root_and_files(split)
        except DataError as gone:
            if not kept.is_file() or not (last := cache / "tokens" / kept.read_text()).exists():
                raise
            sys.stderr.write(f"{gone}; the tokens that were made of it are read from {last}\n")
            return TokenStore(last)
        seen = states_of(files)
        what = f"the text of {self.name or 'a source'}"
        name = f"{_name(root, files, built, held, columns, making.contents):016x}"
        folder = cache / "tokens" / name
        if not folder.exists():
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
                with locked(folder.with_suffix(".lock"), f"{what} is tokenized") as alone:
                    if not folder.exists():
                        tokenize_files(
                            files,
                            folder,
                            tokenizer,
                            root=root,
                            columns=columns,
                            held=held,
                            workers=making.workers,
                            on_progress=making.saying(what),
                            restart=alone,
                            seen=seen,
                            what=what,
                        )
            except OSError as error:
                raise DataError(
                    f"the tokens cannot be kept in {cache}: {error}; set data.cache_dir or $FORGE_CACHE"
                ) from None
        if not kept.is_file() or kept.read_text() != name:
            with contextlib.suppress(OSError):  # a cache that others have made may be read-only
                written = kept.with_suffix(f".{os.getpid()}.tmp")
                written.write_text(name)
                written.replace(kept)
        return TokenStore(folder)


def _name(
    root: Path,
    files: list[Path],
    tokenizer: Tokenizer,
    held: Held,
    columns: Columns,
    contents: dict[Path, str] | None,
) -> int:
    """Name tokens after the text itself, because times and sizes of files do not identify it."""
    as_text, known = getattr(columns, "as_text", ()), {} if contents is None else contents
    known |= {file: _content(file) for file in files if file not in known}
    rows = {file: ("rows",) if were_text(file, as_text) else () for file in files}
    listed = [(str(f.relative_to(root)), known[f], *rows[f]) for f in files]
    return key(FORMAT, file_digest(tokenizer), held, named(columns, tokenizer), listed)


def _content(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()  # pyright: ignore[reportArgumentType]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None


_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@sources.register("python-stdlib")
class PythonStdlibConfig(TextSourceConfig):
    """The source files of the Python standard library on this machine: real text, offline, some 10 MB.

    Tests and installed packages are left out. The text is that of the running interpreter, so it differs
    between Python versions.
    """

    def root_and_files(self, split: Split) -> tuple[Path, list[Path]]:
        """See `TextSourceConfig.root_and_files`."""
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(walk(root, lambda name: name.endswith(".py"), _LEFT_OUT))
        if not files:
            raise DataError(f"{sys.executable} has no source files in {root}; use a source of type 'files'")
        return root, files


@sources.register("installed-docs")
class InstalledDocsConfig(TextSourceConfig):
    """The documentation that installed packages bring along: descriptions (METADATA), .md and .rst files.

    Prose about code, offline, some megabytes; which packages are installed differs between machines.
    """

    def root_and_files(self, split: Split) -> tuple[Path, list[Path]]:
        """See `TextSourceConfig.root_and_files`."""
        root = Path(sysconfig.get_paths()["purelib"])
        endings = (".md", ".rst", "METADATA")
        files = sorted(walk(root, lambda name: name.endswith(endings), {"test", "tests", "__pycache__"}))
        if not files:
            raise DataError(f"no package in {root} brings documentation; use a source of type 'files'")
        return root, files


@sources.register("files")
class FilesConfig(TextSourceConfig):
    """Files of text: .jsonl, .ndjson, .json, .parquet and .arrow hold a document a row, others one document.

    Attributes:
        paths: files, folders (everything in them but hidden names, also behind links) or patterns such as
            `corpus/**/*.py`.
        validation: the same for validation; absent holds out some of `paths`.
        field: the key of the text in rows.
        as_text: endings of files that are one document each, although such files usually hold rows: `.json`
            in a folder of code, or `.csv`, which is refused otherwise.
    """

    # Where text lies may change: the fingerprint of the stream says whether it is the same text.
    free_keys = ("paths", "validation", "as_text")
    path_keys = ("paths", "validation")

    paths: list[str]
    validation: list[str] | None = None
    field: str = "text"
    as_text: list[str] = []

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if not self.paths or self.validation == []:
            yield (
                f"given paths = {self.paths} and validation = {self.validation}; expected at least one path "
                "each, or no validation"
            )

    def root_and_files(self, split: Split) -> tuple[Path, list[Path]]:
        """See `TextSourceConfig.root_and_files`."""
        own = split == "validation" and self.validation is not None
        files = find_files(self.validation or [] if own else self.paths)
        return Path(os.path.commonpath([f.parent for f in files])), files

    def has_validation(self) -> bool:
        """See `SourceConfig.has_validation`."""
        return super().has_validation() or self.validation is not None

    def held(self, split: Split) -> Held:
        """See `TextSourceConfig.held`."""
        return super().held(split) if self.validation is None else Held()

    def columns(self) -> Columns:
        """See `TextSourceConfig.columns`."""
        return TextColumn(self.field, as_text=tuple(self.as_text))


@sources.register("tokens")
class TokensConfig(SourceConfig):
    """A token store made by `forge-data tokenize`.

    Attributes:
        path: the store with the training text.
        validation: the store with the held-out text; without it and `held_out` this source is not evaluated.
        held_out: fraction of the tokens of `path` that is kept for validation instead: its last whole
            documents.
    """

    free_keys = path_keys = ("path", "validation")

    path: str
    validation: str | None = None
    held_out: Annotated[float, Meta(ge=0, lt=1)] = 0.0

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.validation is not None and self.held_out:
            yield (
                f"given validation = {self.validation!r} and held_out = {self.held_out}; expected one of them"
            )

    def has_validation(self) -> bool:
        """See `SourceConfig.has_validation`."""
        return self.validation is not None or self.held_out > 0

    def whole(self) -> SourceConfig:
        """See `SourceConfig.whole`."""
        return structs.replace(self, held_out=0.0)

    def open(
        self, split: Split, tokenizer: TokenizerConfig, cache: Path, making: Making = ALONE
    ) -> TokenStore:
        """See `SourceConfig.open`."""
        path = self.path if split == "train" or self.held_out else self.validation
        if path is None:
            raise DataError(
                f"the source {self.path} has nothing to validate on; set `validation` to a store, or "
                "`held_out`"
            )
        store = TokenStore(path)
        if not is_named(tokenizer.build(), store.manifest.tokenizer):
            raise DataError(
                f"{path} was made with tokenizer {store.manifest.tokenizer}, [data.tokenizer] is another; "
                "name the one it was made with, or tokenize the text again"
            )
        return held_out_part(store, self.held_out, split) if self.held_out else store
