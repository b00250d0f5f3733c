"""Folders of safetensors as Hugging Face lays them out: one file, or several with an index."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forge_ckpt.error import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
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
    """The tensors of a folder by name; each is read when it is asked for.

    Raises:
        CheckpointError: there are no safetensors, a file of the index is missing, or one cannot be read.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        index = self.folder / INDEX
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            names = [SINGLE]
        self._file_of: dict[str, Path] = {}
        for name in names:
            path = self.folder / Path(name).name
            if not path.exists():
                raise CheckpointError(f"there is no {path}; expected a folder of safetensors")
            try:
                with safe_open(path, framework="pt") as file:
                    self._file_of |= dict.fromkeys(file.keys(), path)
            except SafetensorError as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from None

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._file_of[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def config(self) -> dict[str, Any]:
        """The `config.json` beside them.

        Raises:
            CheckpointError: there is none.
        """
        path = self.folder / "config.json"
        if not path.exists():
            raise CheckpointError(f"there is no {path}")
        return json.loads(path.read_text())


class Renamed(Mapping[str, Tensor]):
    """Tensors of a mapping under other names; each is read when it is asked for.

    Args:
        tensors: by name.
        names: for each new name, the one that it has there.
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
) -> None:
    """Write tensors and their `config.json`; the folder appears when all of it is there.

    In memory at once are the tensors of one file and one more, if `tensors` reads each when it is taken out.

    Args:
        folder: must not exist.
        tensors: whole ones, by the names they shall have.
        config: of the model.
        shard_bytes: files are at most about this large.
        files: text of more files by name.

    Raises:
        CheckpointError: the folder exists, or cannot be written; or a tensor has a dtype that safetensors
            does not know.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; choose another folder")
    partial = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        _write_into(partial, tensors, shard_bytes)
        (partial / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
        for name, text in files.items():
            (partial / name).write_text(text, encoding="utf-8")
        partial.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_into(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> None:
    files: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    total = filled = 0
    for name in tensors:
        tensor = tensors[name].detach().cpu().contiguous()
        if filled and filled + tensor.nbytes > shard_bytes:
            files.append(_write_file(folder / str(len(files)), shard))
            shard, filled = {}, 0
        shard[name] = tensor
        filled, total = filled + tensor.nbytes, total + tensor.nbytes
    files.append(_write_file(folder / str(len(files)), shard))
    names = [SINGLE] if len(files) == 1 else [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]  # fmt: skip
    for index, name in enumerate(names):
        (folder / str(index)).rename(folder / name)
    if len(files) > 1:
        weight_map = {key: name for name, keys in zip(names, files, strict=True) for key in keys}
        index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        (folder / INDEX).write_text(index_text)


def _write_file(path: Path, tensors: Mapping[str, Tensor]) -> list[str]:
    """Write one file of safetensors; returns the names in it. The library would copy all of it in memory.

    Source: https://github.com/huggingface/safetensors, "Format".
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise CheckpointError(f"{name} is {dtype}; safetensors takes {', '.join(DTYPES)}")
        ends = [place, place := place + tensor.nbytes]
        header[name] = {"dtype": DTYPES[dtype], "shape": list(tensor.shape), "data_offsets": ends}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.flatten().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return list(tensors)
