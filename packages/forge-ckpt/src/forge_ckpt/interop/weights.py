"""Folders of safetensors as Hugging Face lays them out: one file, or several with an index."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forge_ckpt.disk import sync, write_durably
from forge_ckpt.error import CheckpointError

log = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PARTIAL = ".partial-"
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""What safetensors calls a dtype of torch."""


class Weights(Mapping[str, Tensor]):
    """The tensors of a folder by name; each is read on access.

    Raises:
        CheckpointError: there are no safetensors, a file of the index is missing, or one cannot be read.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        index = self.folder / INDEX
        if index.exists():
            weight_map = read_object(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(
                isinstance(one, str) for one in weight_map.values()
            ):
                raise CheckpointError(f"{index} has no weight_map of names of files")
            names = sorted(set(weight_map.values()))
        else:
            weight_map, names = None, [SINGLE]
        self._file_of: dict[str, Path] = {}
        for name in names:
            path = self.folder / Path(name).name
            if not path.exists():
                raise CheckpointError(f"there is no {path}; expected a folder of safetensors")
            with _opened(path) as file:
                present = {*file.keys()}
            promised = (
                present if weight_map is None else {key for key, own in weight_map.items() if own == name}
            )
            if missing := sorted(promised - present):
                raise CheckpointError(f"{index} says that {path} holds {missing[0]}, and it does not")
            self._file_of |= dict.fromkeys(promised, path)

    def __getitem__(self, name: str) -> Tensor:
        with _opened(self._file_of[name]) as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def config(self) -> dict[str, Any]:
        """Return the `config.json` beside them.

        Raises:
            CheckpointError: there is none, or it is no object of JSON.
        """
        path = self.folder / "config.json"
        if not path.exists():
            raise CheckpointError(f"there is no {path}")
        return read_object(path)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of safetensors. Raises CheckpointError, which names it, if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: it cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds {type(found).__name__}; expected an object")
    return found


class Renamed(Mapping[str, Tensor]):
    """Tensors of a mapping under other names; each is read on access.

    Args:
        tensors: by name.
        names: the old name of each new name.
    """

    def __init__(self, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def write_weights(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    shard_bytes: int = 5 << 30,
    files: Mapping[str, str] = MappingProxyType({}),
    like: Mapping[str, Tensor] | None = None,
) -> None:
    """Write tensors and their `config.json`; the folder appears when all of it is there.

    One tensor is in memory at once, if `tensors` reads each on access. Partial folders of earlier killed
    calls are reported, and stay: another process may be writing them.

    Args:
        folder: must not exist.
        tensors: whole tensors, by their names in the files.
        config: config of the model.
        shard_bytes: files hold at most this much, or one tensor.
        files: text of more files by name.
        like: tensors of the same names, dtypes and shapes, for example on the meta device; without them, each
            of `tensors` is read twice.

    Raises:
        CheckpointError: the folder exists, or cannot be written; or safetensors does not support the dtype of
            a tensor.
    """
    if shard_bytes < 1:
        raise CheckpointError(f"given files of {shard_bytes} bytes; expected one byte or more")
    partial = folder.with_name(f"{_PARTIAL}{folder.name}-{secrets.token_hex(4)}")
    try:
        if "__metadata__" in tensors:
            raise CheckpointError("a tensor is named __metadata__, which safetensors keeps for itself")
        if folder.exists():
            raise CheckpointError(f"{folder} exists already; choose another folder")
        _report_partial(folder.parent)
        partial.mkdir(parents=True)
        _write_into(partial, tensors, tensors if like is None else like, shard_bytes)
        for name, text in {"config.json": json.dumps(dict(config), indent=2) + "\n", **files}.items():
            write_durably(partial / name, text.encode())
        sync(partial)
        partial.rename(folder)
        sync(folder.parent)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _report_partial(folder: Path) -> None:
    """Report the unfinished exports in a folder."""
    message = "%s (%.1f MB) is part of an export: if none is under way, one was killed; remove it"
    for left in sorted(folder.glob(f"{_PARTIAL}*")):
        with suppress(OSError):  # it may have come to its end just now
            log.warning(message, left, sum(file.stat().st_size for file in left.iterdir()) / 1e6)


class _Described(NamedTuple):
    """The header entry of a tensor."""

    dtype: str
    shape: list[int]
    num_bytes: int


def _described(name: str, tensor: Tensor) -> _Described:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(f"{name} is {dtype}; safetensors takes {', '.join(DTYPES)}")
    return _Described(DTYPES[dtype], list(tensor.shape), tensor.numel() * tensor.element_size())


def _write_into(
    folder: Path, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor], shard_bytes: int
) -> None:
    shards: list[dict[str, _Described]] = [{}]
    filled = total = 0
    for name in tensors:
        described = _described(name, like[name])
        if filled and filled + described.num_bytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = described
        filled, total = filled + described.num_bytes, total + described.num_bytes
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]  # fmt: skip
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, tensors)
    if len(shards) > 1:
        weight_map = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        write_durably(folder / INDEX, index_text.encode())


def _write_file(path: Path, shard: Mapping[str, _Described], tensors: Mapping[str, Tensor]) -> None:
    """Write one file of safetensors, tensor by tensor. The library would hold all of it in memory.

    Source: https://github.com/huggingface/safetensors, "Format".
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, entry in shard.items():
        ends = [place, place := place + entry.num_bytes]
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": ends}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, entry in shard.items():
            tensor = tensors[name].detach()
            assert _described(name, tensor) == entry, f"{name}: {_described(name, tensor)}, not {entry}"
            file.write(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            del tensor  # before the next is read
        file.flush()
        os.fsync(file.fileno())
