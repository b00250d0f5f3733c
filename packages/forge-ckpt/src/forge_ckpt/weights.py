"""Folders of safetensors as Hugging Face lays them out: one file, or several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forge_ckpt.error import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


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


def write_weights(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], shard_bytes: int = 5 << 30
) -> None:
    """Write tensors and their `config.json`.

    Args:
        folder: must not exist.
        tensors: whole ones, by the names they shall have.
        config: of the model.
        shard_bytes: files are at most about this large.

    Raises:
        CheckpointError: the folder exists, or cannot be made.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; choose another folder")
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor.detach().cpu().contiguous()
        filled += size
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]  # fmt: skip
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        (folder / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        )
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
