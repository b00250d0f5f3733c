"""Which box of each tensor this rank writes, and how boxes are put together again under another layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from forge_ckpt.error import CheckpointError, DamagedError, UnreadableError, UnsupportedError
from forge_ckpt.layout import Cuts, Entry, Shape
from forge_ckpt.manifest import (
    DIGEST_BYTES,
    ITEM_BYTES,
    Index,
    Manifest,
    digest,
    encode_digests,
    read_index,
    values_name,
)

ALIGNMENT = 64

BLOCK_BYTES = 1 << 18
"""What has a digest of its own: a slice is verified by reading at most two blocks more than it has."""

READ_BYTES = 1 << 23
"""What is read at once, about."""

Described = Mapping[str, Entry]
"""Tensors of a checkpoint by name."""


class Shard(Protocol):
    """The box of a tensor that this rank holds: `forge_parallel.LocalShard`, or another of this form."""

    @property
    def values(self) -> Tensor:
        """What is held, sharing memory with the tensor."""
        ...

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where in the full tensor it starts."""
        ...

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank, of all that hold the same box, writes it."""
        ...


LocalShard = Callable[[Tensor], Shard]
"""Which box of a tensor this rank holds."""

NamedShard = Callable[[str, Tensor], Shard]
"""Which box of the tensor of this name this rank holds."""


class PlainShard(NamedTuple):
    """All of a tensor, or a box that is known already; see `Shard`."""

    values: Tensor
    offsets: tuple[int, ...]
    is_first_copy: bool


def plain_shard(tensor: Tensor, is_first_copy: bool) -> Shard:
    """All of a tensor, which every rank that has it holds.

    Raises:
        CheckpointError: it is a DTensor.
    """
    if hasattr(tensor, "_local_tensor"):
        raise CheckpointError(
            f"a tensor of shape {tuple(tensor.shape)} is a DTensor; only plain tensors can be saved and "
            "loaded unless the store knows who holds what: give Store(local_shard=...), say "
            "functools.partial(forge_parallel.local_shard, mesh=mesh)"
        )
    return PlainShard(tensor.detach(), (0,) * tensor.ndim, is_first_copy)


def describe(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """Dtype and shape of each tensor.

    Raises:
        CheckpointError: one has a dtype that is not saved.
    """
    found = {
        key: Entry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for key, tensor in tensors.items()
    }
    for key, entry in found.items():
        if entry.dtype not in ITEM_BYTES:
            raise CheckpointError(f"{key} is {entry.dtype}; expected one of {', '.join(ITEM_BYTES)}")
    return found


class _Blocks:
    """Writes a file and takes the digest of each of its blocks on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self.num_bytes = 0
        self.digests: list[bytes] = []
        self._file = file
        self._begun = xxhash.xxh3_128()
        self._in_block = 0

    def write(self, data: memoryview | bytes) -> None:
        self._file.write(data)
        view = memoryview(data)
        self.num_bytes += len(view)
        while len(view):
            now = view[: BLOCK_BYTES - self._in_block]
            view = view[len(now) :]
            self._begun.update(now)
            self._in_block += len(now)
            if self._in_block == BLOCK_BYTES:
                self.end_block()

    def end_block(self) -> None:
        if self._in_block:
            self.digests.append(self._begun.digest())
            self._begun.reset()
            self._in_block = 0


def write_boxes(
    file: BinaryIO, tensors: Mapping[str, Tensor], shard: NamedShard
) -> tuple[Index, int, dict[str, tuple[Shape, Shape]]]:
    """Write this rank's boxes into one file, one after the other, aligned.

    Returns:
        The index, the size of the file, and start and extents of the box of each tensor written here.
    """
    blocks, offsets = _Blocks(file), {}
    boxes: dict[str, tuple[Shape, Shape]] = {}
    for key in sorted(tensors):
        box = shard(key, tensors[key])
        if not box.values.numel() or not box.is_first_copy:
            continue
        blocks.write(b"\0" * (-blocks.num_bytes % ALIGNMENT))
        offsets[key] = blocks.num_bytes
        boxes[key] = (tuple(box.offsets), tuple(box.values.shape))
        blocks.write(box.values.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    blocks.end_block()
    return Index(BLOCK_BYTES, encode_digests(blocks.digests), offsets), blocks.num_bytes, boxes


def misfits(manifest: Manifest, targets: Mapping[str, Tensor]) -> list[str]:
    """What of the targets a checkpoint does not hold in their shape and dtype, one line each."""
    wrong = [f"{key} is not in the checkpoint" for key in targets.keys() - manifest.tensors.keys()]
    for key in targets.keys() & manifest.tensors.keys():
        entry, target = manifest.tensors[key], targets[key]
        have = f"{entry.dtype} {list(entry.shape)}"
        want = f"{str(target.dtype).removeprefix('torch.')} {list(target.shape)}"
        if have != want:
            wrong.append(f"{key} is {have}, wanted {want}")
    return wrong


class Piece(NamedTuple):
    """Elements that lie in one box of the checkpoint and in one box that is wanted.

    Attributes:
        key: of the tensor.
        low: index of their first element in the whole tensor.
        high: index behind their last element.
        box_start: where the box of the checkpoint starts.
        box_size: its extents.
        first: the first byte of the span that holds them in the file.
        last: the byte behind it.
    """

    key: str
    low: Shape
    high: Shape
    box_start: Shape
    box_size: Shape
    first: int
    last: int


def plan(
    folder: Path, manifest: Manifest, wanted: Mapping[str, tuple[Shape, Shape]]
) -> dict[int, tuple[Index, list[Piece]]]:
    """What to read where: of each rank's file, the index and the pieces in order of their place.

    Args:
        folder: of the checkpoint.
        manifest: of it.
        wanted: start and extents of a box of each tensor that is wanted.

    Raises:
        DamagedError, UnreadableError, UnsupportedError: as for `manifest.read`.
    """
    cuts, met = Cuts(manifest.layouts), defaultdict(list)
    for key, (start, size) in wanted.items():
        for box, rank in cuts.meeting(manifest.tensors[key].layout, start, size):
            met[rank].append((key, box))
    planned: dict[int, tuple[Index, list[Piece]]] = {}
    for rank in sorted(met):
        index = read_index(folder, manifest, rank)
        pieces = [
            piece
            for key, box in met[rank]
            for piece in _pieces(manifest, index, rank, key, box, *wanted[key])
        ]
        planned[rank] = index, sorted(pieces, key=lambda piece: piece.first)
    return planned


def _pieces(
    manifest: Manifest, index: Index, rank: int, key: str, box: int, start: Shape, size: Shape
) -> Iterator[Piece]:
    """What one box holds of what is wanted, in pieces that are not much larger than is read at once."""
    entry = manifest.tensors[key]
    layout, item = manifest.layouts[entry.layout], ITEM_BYTES[entry.dtype]
    box_start, box_size = layout.starts[box], layout.sizes[box]
    offset = index.offsets.get(key, -1)
    if offset < 0 or offset + prod(box_size) * item > manifest.files[rank].num_bytes:
        raise UnsupportedError(f"the index of rank {rank} puts {key} outside of its file")
    low = [max(a, b) for a, b in zip(start, box_start, strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in zip(start, size, box_start, box_size, strict=True)]
    strides = _strides(box_size)
    cut = next((d for d, (a, b) in enumerate(zip(low, high, strict=True)) if b - a > 1), None)
    count = 1 if cut is None else high[cut] - low[cut]
    rows = count if cut is None else max(1, READ_BYTES // (strides[cut] * item))
    for done in range(0, count, rows):
        a, b = low.copy(), high.copy()
        if cut is not None:
            a[cut], b[cut] = low[cut] + done, min(low[cut] + done + rows, high[cut])
        first = sum((i - o) * s for i, o, s in zip(a, box_start, strides, strict=True))
        last = sum((i - 1 - o) * s for i, o, s in zip(b, box_start, strides, strict=True)) + 1
        span = offset + first * item, offset + last * item
        yield Piece(key, tuple(a), tuple(b), box_start, box_size, *span)


def _strides(size: Shape) -> Shape:
    """Elements between neighbours along each dim, of a box that is stored row after row."""
    return tuple(accumulate(size[:0:-1], lambda a, b: a * b, initial=1))[::-1] if size else ()


def stage(
    folder: Path, manifest: Manifest, targets: Mapping[str, Tensor], shard: NamedShard
) -> dict[str, Tensor]:
    """Read the local box of each target from disk, verified, without touching the target.

    Raises:
        DamagedError: bytes that are needed are not those that were written.
        UnreadableError: they cannot be read now.
        UnsupportedError: an index is not one that we write.
    """
    boxes = {key: shard(key, target) for key, target in targets.items()}
    staged = {key: torch.empty(box.values.shape, dtype=box.values.dtype) for key, box in boxes.items()}
    wanted = {key: (tuple(box.offsets), tuple(box.values.shape)) for key, box in boxes.items()}
    for rank, (index, pieces) in plan(folder, manifest, wanted).items():
        for run, data in read_runs(folder / values_name(rank), index, manifest.files[rank].num_bytes, pieces):
            for piece in run:
                _place(piece, data, staged[piece.key], wanted[piece.key][0])
    return staged


class Run(NamedTuple):
    """Bytes of a file that were read and verified; `first` is the place of the first of them."""

    first: int
    bytes: bytearray


def read_runs(
    path: Path, index: Index, num_bytes: int, pieces: list[Piece]
) -> Iterator[tuple[list[Piece], Run]]:
    """Read pieces that lie next to each other at once, in whole blocks, each compared with its digest.

    Raises:
        DamagedError: names the block.
        UnreadableError: a read failed.
    """
    digests, size = index.blocks(), index.block_bytes
    try:
        with path.open("rb", buffering=0) as file:
            for run in _runs(pieces, size):
                first = run[0].first // size * size
                last = min(-(-max(piece.last for piece in run) // size) * size, num_bytes)
                yield run, Run(first, _read_blocks(file, path, first, last, digests, size))
    except FileNotFoundError:
        raise DamagedError(path, "is missing") from None
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error}") from None


def _runs(pieces: list[Piece], gap: int) -> Iterator[list[Piece]]:
    run: list[Piece] = []
    for piece in pieces:
        if run and (piece.first - run[-1].last > gap or piece.last - run[0].first > READ_BYTES):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _read_blocks(file: BinaryIO, path: Path, first: int, last: int, digests: bytes, size: int) -> bytearray:
    data = bytearray(last - first)
    file.seek(first)
    rest = memoryview(data)
    while len(rest) and (count := file.readinto(rest)):  # type: ignore[attr-defined]
        rest = rest[count:]
    view = memoryview(data)
    for block in range(first // size, -(-last // size)):
        part = view[block * size - first : (block + 1) * size - first]
        if digest(part) != digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]:
            raise DamagedError(path, f"is damaged between bytes {block * size} and {(block + 1) * size}")
    return data


def _place(piece: Piece, run: Run, into: Tensor, start: Shape) -> None:
    """Copy a piece to where it belongs in the box that is wanted, which starts at `start`."""
    item = into.element_size()
    count = (piece.last - piece.first) // item
    span = torch.frombuffer(run.bytes, dtype=into.dtype, offset=piece.first - run.first, count=count)
    size = [b - a for a, b in zip(piece.low, piece.high, strict=True)]
    here = tuple(slice(a - o, b - o) for a, b, o in zip(piece.low, piece.high, start, strict=True))
    into[here] = span.as_strided(size, _strides(piece.box_size))


def verify_file(folder: Path, manifest: Manifest, rank: int) -> None:
    """Read all that a rank wrote and compare every block.

    Raises:
        DamagedError, UnreadableError, UnsupportedError: as for `manifest.read`.
    """
    index, size = read_index(folder, manifest, rank), manifest.files[rank].num_bytes
    steps = [Piece("", (), (), (), (), a, min(a + READ_BYTES, size)) for a in range(0, size, READ_BYTES)]
    for _ in read_runs(folder / values_name(rank), index, size, steps):
        pass


@torch.no_grad()
def commit(staged: Mapping[str, Tensor], targets: Mapping[str, Tensor], shard: NamedShard) -> None:
    """Copy staged boxes into their targets."""
    for key, target in targets.items():
        shard(key, target).values.copy_(staged[key])
