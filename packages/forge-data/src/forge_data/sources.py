"""Where text comes from: the registry of `[[data.sources]]`. Imports no torch."""

from __future__ import annotations

import fcntl
import glob
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from forge_config import Config, Meta, Registry

from forge_data.error import DataError
from forge_data.order import key
from forge_data.tokenize import Held, tokenize
from forge_data.tokenizer import Tokenizer, TokenizerConfig
from forge_data.tokens import TokenStore

Split = Literal["train", "validation"]


class SourceConfig(Config):
    """Interface of `[[data.sources]]`.

    Attributes:
        weight: share of the sequences, relative to the other sources.
    """

    weight: Annotated[float, Meta(gt=0)] = 1.0

    def open(self, split: Split, tokenizer: TokenizerConfig, cache: Path) -> TokenStore:
        """The tokens of a split, made first when need be.

        Raises:
            DataError: the data are missing, or were made with another tokenizer.
        """
        raise NotImplementedError


sources = Registry("source", SourceConfig)


class TextSourceConfig(SourceConfig):
    """Text that is tokenized at the first use and kept in the cache.

    Attributes:
        held_out: fraction of the documents kept for validation, chosen by their names.
    """

    held_out: Annotated[float, Meta(ge=0, lt=1)] = 0.02

    def root_and_files(self) -> tuple[Path, list[Path]]:
        """The folder that names are relative to, and the files in the order they are read."""
        raise NotImplementedError

    def open(self, split: Split, tokenizer: TokenizerConfig, cache: Path) -> TokenStore:
        """See `SourceConfig.open`."""
        root, files = self.root_and_files()
        built = tokenizer.build()
        held = Held(split=split, fraction=self.held_out)
        folder = cache / "tokens" / f"{_name(root, files, built, held):016x}"
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(folder.with_suffix(".lock")):
                if not folder.exists():
                    tokenize(files, folder, tokenizer, root=root, held=held)
        return TokenStore(folder)


def _name(root: Path, files: list[Path], tokenizer: Tokenizer, held: Held) -> int:
    listed = [(str(f.relative_to(root)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return key(tokenizer.digest, held, listed)


@sources.register("python-stdlib")
class PythonStdlibConfig(TextSourceConfig):
    """The source files of the Python standard library on this machine: real text, offline, some 10 MB.

    Its tests are left out. The text is that of the interpreter that runs, so it differs between Python versions.
    """

    def root_and_files(self) -> tuple[Path, list[Path]]:
        """See `TextSourceConfig.root_and_files`."""
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(f for f in root.rglob("*.py") if not _left_out(f.relative_to(root)))
        if not files:
            raise DataError(f"{sys.executable} has no source files in {root}")
        return root, files


def _left_out(name: Path) -> bool:
    return any(
        part in ("site-packages", "dist-packages", "test", "tests", "idle_test") for part in name.parts
    )


@sources.register("files")
class FilesConfig(TextSourceConfig):
    """Files of text: .jsonl and .parquet hold a document a row, every other file is one document.

    Attributes:
        paths: files, folders (read whole) or patterns such as `corpus/**/*.py`.
        field: the key of the text in .jsonl and .parquet.
    """

    paths: list[str]
    field: str = "text"

    def root_and_files(self) -> tuple[Path, list[Path]]:
        """See `TextSourceConfig.root_and_files`."""
        files = find_files(self.paths)
        return Path(os.path.commonpath([f.parent for f in files])), files


def find_files(paths: list[str]) -> list[Path]:
    """The files that names, folders and patterns stand for, sorted.

    Raises:
        DataError: one of them stands for nothing.
    """
    found: set[Path] = set()
    for path in paths:
        names = [path] if Path(path).exists() else glob.glob(path, recursive=True)
        files = [f for n in names for f in ([Path(n)] if Path(n).is_file() else sorted(Path(n).rglob("*")))]
        here = {f.resolve() for f in files if f.is_file()}
        if not here:
            raise DataError(f"there are no files at {path}")
        found |= here
    return sorted(found)


@sources.register("tokens")
class TokensConfig(SourceConfig):
    """A token store made by `forge-data tokenize`.

    Attributes:
        path: the store with the training text.
        validation: the store with the held-out text; needed when the run evaluates.
    """

    path: str
    validation: str | None = None

    def open(self, split: Split, tokenizer: TokenizerConfig, cache: Path) -> TokenStore:
        """See `SourceConfig.open`."""
        path = self.path if split == "train" else self.validation
        if path is None:
            raise DataError(f"the source {self.path} names no validation store; set `validation` to one")
        store = TokenStore(path)
        if store.manifest.tokenizer != tokenizer.build().digest:
            raise DataError(f"{path} was made with another tokenizer than the one of [data.tokenizer]")
        return store


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process of this host at a time; on file systems without locks all build, and one wins the rename."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
