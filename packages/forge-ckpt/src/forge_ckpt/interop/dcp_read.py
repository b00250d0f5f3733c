"""The place of the values of a torch DCP checkpoint. Reads its pickles in a process of its own.

`python -m forge_ckpt.interop.dcp_read FOLDER` prints JSON, or the reason of a failure, with exit code 3. A
name in a pickle becomes a record here and is never imported, so that nothing of a checkpoint is executed.
The process has little memory and cannot write. Imports no torch.

Source of the format: torch/distributed/checkpoint/{metadata,filesystem}.py and torch/serialization.py of
torch 2.11 to 2.15.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 28
MAX_PICKLE_BYTES = 1 << 20
"""Of the pickle of one tensor: it holds no values."""
MEMORY_BYTES = 1 << 30
"""Of this process, beside 64 times the size of the metadata."""
REFUSED = 3
"""Exit code when the checkpoint is not what is expected."""

STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "",
}
DTYPES = (
    *STORAGES.values(),
    *("uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)


class Refused(Exception):
    """The checkpoint differs from what is expected."""


class Record:
    """Stands for an object of any class: its arguments and its state."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _record(name: str) -> type[Record]:
    return type(name, (Record,), {})


INDEX, TENSOR, CHUNK, PROPERTIES, STORED, METADATA_CLASS = map(
    _record, ("Index", "Tensor", "Chunk", "Properties", "Stored", "Metadata")
)
REBUILT, ELSE = _record("Rebuilt"), _record("Else")


class Name(str):
    """A dtype or the class of a storage, by name."""

    __slots__ = ()


_OF_METADATA = {
    "Metadata": METADATA_CLASS,
    "TensorStorageMetadata": TENSOR,
    "TensorProperties": PROPERTIES,
    "ChunkStorageMetadata": CHUNK,
    "MetadataIndex": INDEX,
    **dict.fromkeys(("BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"), ELSE),
}
ALLOWED: dict[tuple[str, str], Any] = {
    **{("torch.distributed.checkpoint.metadata", name): made for name, made in _OF_METADATA.items()},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): STORED,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): ELSE,
    ("collections", "OrderedDict"): ELSE,
    **{("torch._utils", f"_rebuild_{name}"): REBUILT for name in ("tensor_v2", "tensor_v3", "parameter")},
    **{("torch", name): Name(dtype) for name, dtype in STORAGES.items()},
    ("torch.storage", "UntypedStorage"): Name(""),
    **{("torch", dtype): Name(dtype) for dtype in DTYPES if dtype},
    **{
        (module, name): ELSE
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
"""What a pickle may name, and what stands for it."""


class Unpickler(pickle.Unpickler):
    """Executes nothing: accepts the names above, and replaces them by records."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name. Raises Refused for unknown names."""
        if (found := ALLOWED.get((module, name))) is None:
            raise Refused(f"it names {module}.{name}, which no checkpoint of tensors needs")
        return found

    def persistent_load(self, pid: Any) -> Any:
        """Return the storage of a tensor: ("storage", class, key, device, elements)."""
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
            raise Refused("it refers to something that is no storage")
        return pid


def unpickle(data: bytes) -> Any:
    """Unpickle data. Raises Refused if they are not as torch writes them."""
    try:
        return Unpickler(io.BytesIO(data)).load()
    except Refused:
        raise
    except Exception as error:  # pickles that are cut off or forged fail in many ways
        raise Refused(f"it is no pickle that torch writes: {type(error).__name__}: {error}") from None


class Window(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: BinaryIO, first: int, num_bytes: int) -> None:
        self._file, self._first, self._num_bytes, self._place = file, first, num_bytes, 0

    def readable(self) -> bool:
        """Return True, as files do."""
        return True

    def seekable(self) -> bool:
        """Return True, as files do."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """As of any file."""
        base = (0, self._place, self._num_bytes)[whence]
        if base + offset < 0:
            raise OSError("a place before the file")
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        """As of any file."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """As of any file."""
        count = max(0, min(len(buffer), self._num_bytes - self._place))
        self._file.seek(self._first + self._place)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


def located(file: BinaryIO, first: int, num_bytes: int) -> dict[str, Any]:
    """Return the place of the values of a tensor that `torch.save` wrote into a part of a file.

    Returns:
        dtype, `size` and `stride` of the tensor; `offset` of its first element in the storage; `first` byte
        of the storage in the file, its `bytes` and their `crc`.
    """
    try:
        archive = zipfile.ZipFile(io.BufferedReader(Window(file, first, num_bytes)))
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        about = entries["data.pkl"]
        if about.file_size > MAX_PICKLE_BYTES or about.compress_type != zipfile.ZIP_STORED:
            raise Refused("the pickle of a tensor is too large, or compressed")
        if "byteorder" in entries and archive.read(entries["byteorder"])[:7] != b"little":
            raise Refused("it was written on a machine with another byte order")
        made = unpickle(archive.read(about))
        storage, *rest = _rebuilt(made)
        values = entries[f"data/{storage[2]}"]
        local = struct.unpack("<4s22xHH", _read_at(file, first + values.header_offset, 30))
    except (zipfile.BadZipFile, KeyError, struct.error, OSError, NotImplementedError) as error:
        raise Refused(f"a tensor is not what torch.save writes: {error}") from None
    if local[0] != b"PK\3\4" or values.compress_type != zipfile.ZIP_STORED:
        raise Refused("the values of a tensor are compressed, or not there")
    begin = values.header_offset + 30 + local[1] + local[2]
    if begin + values.file_size > num_bytes:
        raise Refused("the values of a tensor lie outside of its part of the file")
    offset, size, stride, dtype = rest
    fields = {"dtype": dtype, "offset": offset, "size": size, "stride": stride, "crc": values.CRC}
    return fields | {"first": first + begin, "bytes": values.file_size}


def _rebuilt(made: Any) -> tuple[Any, int, tuple[int, ...], tuple[int, ...], str]:
    """Return storage, offset, size, stride and dtype of a tensor."""
    while isinstance(made, REBUILT) and len(made.args) == 3:  # a parameter around it
        made = made.args[0]
    if not isinstance(made, REBUILT) or len(made.args) not in (6, 7, 8):
        raise Refused("an item that should be a tensor is something else")
    storage, offset, size, stride = made.args[:4]
    dtype = made.args[6] if isinstance(made.args[-1], Name) or len(made.args) == 8 else storage[1]
    if type(storage) is not tuple or not isinstance(dtype, Name):
        raise Refused("a tensor without a storage or a dtype")
    return storage, _count(offset), _counts(size), _counts(stride), str(dtype)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise Refused(f"{value!r:.40} where a number is expected")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or len(values) > 64:
        raise Refused(f"{values!r:.40} where numbers are expected")
    return tuple(_count(value) for value in values)


def _read_at(file: BinaryIO, place: int, count: int) -> bytes:
    file.seek(place)
    return file.read(count)


def read(folder: Path) -> dict[str, Any]:
    """Return all tensors of a checkpoint with the place of each chunk, and the names of other entries."""
    path = folder / METADATA
    if path.stat().st_size > MAX_METADATA_BYTES:
        raise Refused(f"{METADATA} has more than {MAX_METADATA_BYTES} bytes")
    found = unpickle(path.read_bytes())
    if not isinstance(found, METADATA_CLASS) or not isinstance(found.state, dict):
        raise Refused(f"{METADATA} is not that of a checkpoint")
    items, stored = (found.state.get(key) for key in ("state_dict_metadata", "storage_data"))
    if not isinstance(items, dict) or not isinstance(stored, dict):
        raise Refused(f"{METADATA} does not say what was stored")
    places: dict[str, list[tuple[Any, Any]]] = {}
    for index, place in stored.items():
        if not isinstance(index, INDEX) or not isinstance(place, STORED):
            raise Refused(f"{METADATA} says something odd of what was stored")
        places.setdefault(str(index.state["fqn"]), []).append((index.state, place.state))
    tensors = {
        str(name): _tensor(folder, item, places.get(str(name), []))
        for name, item in items.items()
        if isinstance(item, TENSOR)
    }
    return {
        "tensors": tensors,
        "others": [str(n) for n, item in items.items() if not isinstance(item, TENSOR)],
    }


def _tensor(folder: Path, item: Any, places: list[tuple[Any, Any]]) -> dict[str, Any]:
    properties = item.state["properties"].state
    if type(properties) is not tuple or not properties or not isinstance(properties[0], Name):
        raise Refused("a tensor of an unknown dtype")
    of = {_counts(index.get("offset") or ()): place for index, place in places}
    chunks = [
        {"start": _counts(c.state["offsets"]), "size": _counts(c.state["sizes"])}
        for c in item.state["chunks"]
    ]
    chunks = [chunk for chunk in chunks if 0 not in chunk["size"]]  # of ranks that hold nothing
    return {
        "dtype": str(properties[0]),
        "size": _counts(item.state["size"]),
        "chunks": [chunk | _place(folder, of.get(chunk["start"])) for chunk in chunks],
    }


def _place(folder: Path, place: Any) -> dict[str, Any]:
    if place is None:
        raise Refused("a part of a tensor was not stored")
    if place.get("transform_descriptors"):
        raise Refused(f"values were transformed by {place['transform_descriptors']!r:.80}: save without that")
    name = place["relative_path"]
    if type(name) is not str or Path(name).name != name or name in ("", ".", ".."):
        raise Refused(f"{name!r:.80} is no file of the folder")
    descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        return {"file": name, "values": located(file, _count(place["offset"]), _count(place["length"]))}


def _limit(folder: Path) -> None:
    memory = MEMORY_BYTES + 64 * min(MAX_METADATA_BYTES, (folder / METADATA).stat().st_size)
    for what, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CPU, 3600)):
        resource.setrlimit(what, (most, most))


def main() -> Iterator[str]:
    """Return the output for the folder named on the command line."""
    folder = Path(sys.argv[1])
    try:
        _limit(folder)
        yield json.dumps(read(folder))
    except (Refused, OSError, KeyError, TypeError, AttributeError, MemoryError, RecursionError) as error:
        sys.stderr.write(str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}")
        raise SystemExit(REFUSED) from None


if __name__ == "__main__":
    for text in main():
        sys.stdout.write(text)
