"""The manifest of a checkpoint: place and digest of every byte. Imports no torch.

    manifest.json     the root: all tensors, the ranks that wrote their boxes, and the digest of each index
    rank-00000.json   the index of a rank's file: where each tensor starts, the digest of each block
    rank-00000.bin    the values

Both kinds of JSON begin with a line that holds the digest of the rest.
"""

from __future__ import annotations

import json
import os
import stat
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import xxhash

from forge_ckpt.error import CheckpointError, DamagedError, UnreadableError, UnsupportedError
from forge_ckpt.layout import Entry, Layout, Shape, require_cover

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 2
NAME = "manifest.json"
MAX_BYTES = 1 << 26
"""No manifest is larger: 70 G parameters with Adam on 1,024 ranks take 5 MB."""
MAX_INDEX_BYTES = 1 << 26
"""No index is larger: enough for 700 GB from one rank."""
MAX_BLOCK_BYTES = 1 << 24
"""No block is larger: it is read at once."""
MAX_DIMS = 64
"""As in torch."""
MAX_FILE_BYTES = 1 << 62
DIGEST_BYTES = 16

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1
    ),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""What a tensor may be, and the bytes of an element."""

S = TypeVar("S")


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment, as far as this rank holds it.

    Attributes:
        tensors: whole or sharded, by name; ranks may hold different ones.
        meta: everything else that is the same on all ranks, as JSON; that of the first rank is saved.
        values: plain values by name, as JSON; the values of all ranks are merged.
    """

    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


class File(msgspec.Struct, frozen=True, array_like=True):
    """The values file of one rank.

    Attributes:
        num_bytes: size of the values.
        index_bytes: size of the index.
        index_digest: xxh3-128 of the index.
    """

    num_bytes: int
    index_bytes: int
    index_digest: str


class Index(msgspec.Struct, frozen=True):
    """The index of one rank's values file.

    Attributes:
        block_bytes: size of the blocks of the file that have a digest; the last one may be shorter.
        digests: xxh3-128 of each block, concatenated, base64.
        offsets: for each tensor with a box in the file, its first byte.
    """

    block_bytes: int
    digests: str
    offsets: dict[str, int]

    def blocks(self) -> bytes:
        """The digests of all blocks, `DIGEST_BYTES` each; empty if they are malformed."""
        try:
            return b64decode(self.digests, validate=True)
        except ValueError:
            return b""


class Manifest(msgspec.Struct, frozen=True):
    """A checkpoint.

    Attributes:
        format: version of this layout of files.
        step: optimizer steps taken.
        torch: version of torch.
        milestone: whether it is never pruned.
        sound: a step: the newest checkpoint of this step or earlier is kept as well, because the run may go
            back to it.
        meta: everything that is no tensor and is the same on all ranks.
        values: plain values by name, of all ranks together.
        files: the files of each rank.
        layouts: how tensors are cut.
        tensors: each tensor by name.
    """

    format: int
    step: int
    torch: str
    milestone: bool
    meta: dict[str, Any]
    values: dict[str, Any]
    files: list[File]
    layouts: list[Layout]
    tensors: dict[str, Entry]
    sound: int | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote it."""
        return len(self.files)

    @property
    def num_bytes(self) -> int:
        """Size of all values."""
        return sum(file.num_bytes for file in self.files)

    def check(self) -> None:
        """Check that it is consistent, so that no missing data are read or allocated for.

        Raises:
            CheckpointError: it is not.
        """
        for file in self.files:
            if not (0 <= file.num_bytes <= MAX_FILE_BYTES and 0 <= file.index_bytes <= MAX_INDEX_BYTES):
                raise CheckpointError(f"a rank wrote {file}")
        for layout in self.layouts:
            if layout.ranks != sorted(set(layout.ranks)) or not all(
                0 <= rank < len(self.files) for rank in layout.ranks
            ):
                raise CheckpointError("a layout names ranks that did not write")
        seen: set[tuple[int, Shape]] = set()
        for name, entry in self.tensors.items():
            size = ITEM_BYTES.get(entry.dtype)
            if len(entry.shape) > MAX_DIMS:
                raise CheckpointError(f"{name} has {len(entry.shape)} dims")
            if size is None or not 0 <= entry.layout < len(self.layouts) or min(entry.shape, default=0) < 0:
                raise CheckpointError(f"{name} is {entry}")
            if prod(entry.shape) * size > self.num_bytes:
                raise CheckpointError(f"{name} has more bytes than there are")
            if (entry.layout, entry.shape) not in seen:
                seen.add((entry.layout, entry.shape))
                require_cover(name, entry.shape, self.layouts[entry.layout])


def values_file_name(rank: int) -> str:
    """Return the name of the values file of a rank."""
    return f"rank-{rank:05d}.bin"


def index_file_name(rank: int) -> str:
    """Return the name of the index file of a rank."""
    return f"rank-{rank:05d}.json"


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the digest of a block: xxh3-128."""
    return xxhash.xxh3_128_digest(data)


def encode(struct: Manifest | Index) -> bytes:
    """Encode as JSON, with its own digest in the first line.

    Raises:
        CheckpointError: it is larger than `read` accepts.
    """
    body = msgspec.json.encode(struct)
    data, most = digest(body).hex().encode() + b"\n" + body, _most_bytes(type(struct))
    if len(data) > most:
        raise CheckpointError(
            f"the {type(struct).__name__.lower()} has {len(data)} bytes; expected at most {most}"
        )
    return data


def _most_bytes(kind: type[Manifest | Index]) -> int:
    return MAX_BYTES if kind is Manifest else MAX_INDEX_BYTES


def encode_digests(digests: list[bytes]) -> str:
    """Encode digests for an index."""
    return b64encode(b"".join(digests)).decode()


def read(folder: Path, sizes: bool = True) -> Manifest:
    """Read the manifest of a checkpoint, and check its digest and the sizes of all files.

    Args:
        folder: named after its step.
        sizes: check the files too: two for each rank that wrote.

    Raises:
        DamagedError: names the damage.
        UnreadableError: it cannot be read now.
        UnsupportedError: it is whole, and written by another version or another program.
    """
    path = folder / NAME
    body = _checked(path)
    version = _decode(path, body, _Version).format
    if version != FORMAT:
        raise UnsupportedError(
            f"{path} has format {version}; this version reads format {FORMAT}: use the version of forge-ckpt "
            "that wrote it, or move the folder away"
        )
    try:
        manifest = _decode(path, body, Manifest)
        manifest.check()
    except CheckpointError as error:
        raise UnsupportedError(f"{path} is not one that we write: {error}") from None
    if folder.name != step_name(manifest.step):
        raise DamagedError(folder, f"holds step {manifest.step}; somebody copied or renamed it")
    for rank, file in enumerate(manifest.files if sizes else ()):
        require_size(folder / values_file_name(rank), file.num_bytes)
        require_size(folder / index_file_name(rank), file.index_bytes)
    return manifest


def step_name(step: int) -> str:
    """Return the name of the folder of a step."""
    return f"step-{step:09d}"


def read_index(folder: Path, manifest: Manifest, rank: int) -> Index:
    """Read the index of a rank, verified against the manifest.

    Raises:
        DamagedError, UnreadableError, UnsupportedError: as for `read`.
    """
    path, file = folder / index_file_name(rank), manifest.files[rank]
    data = read_file(path, file.index_bytes, MAX_INDEX_BYTES)
    if digest(data).hex() != file.index_digest:
        raise DamagedError(path, "is not the one that belongs to this checkpoint")
    index = _decode(path, data.partition(b"\n")[2], Index)
    if (
        not 64 <= index.block_bytes <= MAX_BLOCK_BYTES
        or index.block_bytes % 64
        or len(index.blocks()) != DIGEST_BYTES * -(-file.num_bytes // index.block_bytes)
    ):
        raise UnsupportedError(f"{path} has not one digest for each block")
    return index


def merge_values(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the plain values of all ranks.

    Raises:
        CheckpointError: two of one name differ.
    """
    merged: dict[str, Any] = {}
    for one in values:
        for key, value in one.items():
            if merged.setdefault(key, value) != value:
                raise CheckpointError(
                    f"{key} is {value!r} on one rank, and {merged[key]!r} on another; one name is one "
                    "value on all ranks"
                )
    return merged


def require_json(values: Mapping[str, Any]) -> None:
    """Check that values survive JSON unchanged, except tuples, which become lists.

    Raises:
        CheckpointError: JSON cannot hold them.
    """
    for key, value in values.items():
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == copied(value)
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            raise CheckpointError(f"{key!r} would not come back as it is: {value!r:.200}; expected JSON")


def copied(value: Any) -> Any:
    """Return a copy of plain values; tuples become lists, as in JSON."""
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list | tuple) else value


def require_size(path: Path, num_bytes: int) -> None:
    """Check that a file is a plain file of this size.

    Raises:
        DamagedError: it is not.
        UnreadableError: that cannot be determined now.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise DamagedError(path, "is missing") from None
    except OSError as error:
        raise UnreadableError(f"{path} cannot be looked at: {error}") from None
    if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
        raise DamagedError(path, f"is not a file of the {num_bytes} bytes that it should have")


def read_file(path: Path, num_bytes: int | None = None, most: int = MAX_BYTES) -> bytes:
    """Read all of a plain file that is not too large.

    Raises:
        DamagedError: it is missing, is no plain file, or does not have `num_bytes`.
        UnreadableError: it cannot be read now.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size > most:
                raise DamagedError(path, f"is no file of at most {most} bytes")
            data = file.read(found.st_size)
    except FileNotFoundError:
        raise DamagedError(path, "is missing") from None
    except OSError as error:
        if os.path.islink(path):
            raise DamagedError(path, "is a link; expected a file") from None
        raise UnreadableError(f"{path} cannot be read: {error}") from None
    if num_bytes is not None and len(data) != num_bytes:
        raise DamagedError(path, f"has {len(data)} bytes, not {num_bytes}")
    return data


class _Version(msgspec.Struct):
    format: int


def _checked(path: Path) -> bytes:
    expected, _, body = read_file(path).partition(b"\n")
    if digest(body).hex().encode() != expected:
        raise DamagedError(path, "does not match its digest")
    return body


def _decode(path: Path, body: bytes, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UnsupportedError(f"{path} is whole, and not one that this version reads: {error}") from None
