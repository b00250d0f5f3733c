"""The files of a data set of the Hugging Face hub. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from forge_data.error import DataError
from forge_data.locks import locked
from forge_data.order.order import key
from forge_data.sources.documents import ROW_ENDINGS, Task, tasks_of
from forge_data.sources.remote import HubFile, patiently, said_by

VERSION = 1
"""Another number when the same files would be cut into other parts."""

LISTED_TOGETHER = 500
"""Files whose sizes one request asks for."""

CONNECTIONS = 16

TEXT_ENDINGS = (*ROW_ENDINGS, ".txt", ".txt.gz", ".txt.zst", ".md")

T = TypeVar("T")


class HubSplit(NamedTuple):
    """A split of a data set.

    Attributes:
        data_set: its name.
        subset: its configuration; None is the default one.
        split: the name of the split.
    """

    data_set: str
    subset: str | None
    split: str

    def __str__(self) -> str:
        return f"the data set {self.data_set} (subset {self.subset}, split {self.split})"


def commit_of(asked: HubSplit, revision: str | None) -> str:
    """Return the commit of a branch or tag now; None is the main branch.

    Raises:
        DataError: the hub cannot be reached, or has no such data set or revision.
    """

    def ask() -> str:
        from huggingface_hub import HfApi

        found = HfApi().dataset_info(asked.data_set, revision=revision).sha
        assert found is not None
        return found

    return _asked(asked, ask)


def files_of(asked: HubSplit, commit: str) -> list[HubFile]:
    """Return the files of a split, as `datasets` finds them: by the card of the data set, or by their names.

    Raises:
        DataError: the hub cannot be reached, there is no such subset or split, or its files are of a kind
            that cannot be streamed.
    """

    def ask() -> tuple[Mapping[str, list[str]], dict[str, int]]:
        from datasets import (  # pyright: ignore[reportMissingTypeStubs]
            load_dataset_builder,  # pyright: ignore[reportUnknownVariableType]
        )
        from huggingface_hub import HfApi

        builder: Any = load_dataset_builder(asked.data_set, asked.subset, revision=commit)
        splits = {str(name): list(map(str, urls)) for name, urls in (builder.config.data_files or {}).items()}
        prefix = f"hf://datasets/{asked.data_set}@{commit}/"
        names = [url.removeprefix(prefix) for url in splits.get(asked.split, [])]
        sizes: dict[str, int] = {}
        for start in range(0, len(names), LISTED_TOGETHER):
            some = names[start : start + LISTED_TOGETHER]
            found: Any = HfApi().get_paths_info(asked.data_set, some, revision=commit, repo_type="dataset")
            sizes |= {one.path: one.size for one in found}
        return {asked.split: names} if names else splits, sizes

    splits, sizes = _asked(asked, ask)
    if asked.split not in splits:
        raise DataError(
            f"{asked} has no such split; its splits are {', '.join(splits) or 'none'}; a stream "
            "reads one of them as a whole"
        )
    names = splits[asked.split]
    if strange := [name for name in names if name not in sizes or not name.endswith(TEXT_ENDINGS)]:
        raise DataError(
            f"{asked} has the file {strange[0]}, which cannot be streamed: expected files of its repository "
            f"with the ending {', '.join(TEXT_ENDINGS)}; set streaming = false"
        )
    return [HubFile(asked.data_set, commit, name, sizes[name]) for name in names]


def tasks_of_split(asked: HubSplit, commit: str, cache: Path) -> tuple[Task, ...]:
    """Return the parts of all files of a split; found once a machine and commit, and kept in the cache.

    Raises:
        DataError: see `files_of`; or the cache cannot be written.
    """
    kept = cache / "hub" / f"{key(VERSION, *asked, commit):016x}.json"
    read = partial(_read_kept, kept, asked.data_set, commit)
    if (found := read()) is not None:
        return found
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with locked(kept.with_suffix(".lock"), f"the files of {asked} are listed"):
            if (found := read()) is not None:
                return found
            files = files_of(asked, commit)
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                found = tuple(task for tasks in pool.map(_tasks, files) for task in tasks)
            _keep(kept, found)
    except OSError as error:
        raise DataError(
            f"what files {asked} has cannot be kept in {cache}: {error}; set data.cache_dir or $FORGE_CACHE"
        ) from None
    return found


def _tasks(file: HubFile) -> list[Task]:
    try:
        return patiently(file, lambda: tasks_of(file, Path()))
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file} cannot be read: {error}") from error


def _read_kept(path: Path, data_set: str, commit: str) -> tuple[Task, ...] | None:
    try:
        rows = json.loads(path.read_bytes())
        files = {name: HubFile(data_set, commit, name, size) for name, size in rows["files"]}
        return tuple(Task(files[name], name, a, b, size) for name, a, b, size in rows["parts"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(path: Path, tasks: tuple[Task, ...]) -> None:
    sizes = {task.name: task.path.size for task in tasks if isinstance(task.path, HubFile)}
    parts = [[task.name, task.start, task.stop, task.bytes] for task in tasks]
    written = path.with_suffix(f".{os.getpid()}.tmp")
    written.write_text(json.dumps({"files": list(sizes.items()), "parts": parts}))
    written.replace(path)


def downloaded(asked: HubSplit, revision: str | None = None, only: list[HubFile] | None = None) -> list[Path]:
    """Return the arrow files of a split, which `datasets` keeps in its own cache.

    Args:
        asked: the split.
        revision: a branch, tag or commit; None is the main branch.
        only: the files to download, if not all of the data set.

    Raises:
        DataError: the data set can neither be reached nor is in the cache; names the data sets that are.
    """

    def ask() -> list[Path]:
        from datasets import (  # pyright: ignore[reportMissingTypeStubs]
            load_dataset,  # pyright: ignore[reportUnknownVariableType]
        )

        settings: dict[str, Any] = {} if revision is None else {"revision": revision}
        if only is not None:
            settings |= {"data_files": {asked.split: [file.path for file in only]}}
        subset = asked.subset if only is None else None
        found: Any = load_dataset(asked.data_set, subset, split=asked.split, **settings)
        return sorted(Path(file["filename"]) for file in found.cache_files)

    return _asked(asked, ask)


def _asked(asked: HubSplit, ask: Callable[[], T]) -> T:
    try:
        return ask()
    except ImportError:
        raise DataError(
            f"{asked.data_set} is no file of this machine, and the hub needs: pip install 'forge-data[hf]'"
        ) from None
    except Exception as error:  # its kinds of errors differ from version to version
        raise DataError(
            f"{asked} cannot be had from {os.environ.get('HF_ENDPOINT', 'the hub')}: {said_by(error)}; "
            f"{_alternatives()}"
        ) from error


def _alternatives() -> str:
    """Return the data sets in the cache that could be read instead."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    folder = Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets"))
    names = {entry.name.replace("___", "/") for entry in folder.glob("*") if entry.is_dir()}
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    names |= {entry.name.removeprefix("datasets--").replace("--", "/") for entry in hub.glob("datasets--*")}
    cached = (
        f"in the cache of this machine ({home}) are {', '.join(sorted(names))}"
        if names
        else f"the cache of this machine ({home}) holds no data set"
    )
    return (
        f"{cached}; check the name and the network, or set `path` to local files (.parquet, .arrow, .jsonl)"
    )
