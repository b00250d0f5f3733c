"""Which box of each tensor this rank writes, and how boxes are combined again under another layout."""

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
    require_size,
    values_file_name,
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
        """The local values; shares memory with the tensor."""
        ...

    @property
    def offsets(self) -> tuple[int, ...]:
        """Start of the box in the full tensor."""
        ...

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank writes the box, among all ranks that hold the same one."""
        ...


LocalShard = Callable[[Tensor], Shard]
"""Which box of a tensor this rank holds."""


class Box(NamedTuple):
    """The box of a tensor that this rank holds, and the tensor that it belongs to.

    Attributes:
        values: the values of the box.
        offsets: start of the box in the full tensor.
        is_first_copy: whether this rank writes it; None if the ranks that hold the whole plain tensor share
            it.
        entry: dtype and shape of the full tensor.
    """

    values: Tensor
    offsets: tuple[int, ...]
    is_first_copy: bool | None
    entry: Entry


def box_of(key: str, tensor: Tensor | Box, local_shard: LocalShard | None) -> Box:
    """Return the box of a tensor that this rank holds.

    Raises:
        CheckpointError: it has an unsupported dtype; or it is a DTensor, and there is no `local_shard`.
    """
    if isinstance(tensor, Box):
        return tensor
    entry = Entry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    if entry.dtype not in ITEM_BYTES:
        raise CheckpointError(f"{key} is {entry.dtype}; expected one of {', '.join(ITEM_BYTES)}")
    if local_shard is not None:
        shard = local_shard(tensor)
        return Box(shard.values, tuple(shard.offsets), shard.is_first_copy, entry)
    if hasattr(tensor, "_local_tensor"):
        raise CheckpointError(
            f"{key} of shape {tuple(tensor.shape)} is a DTensor; only plain tensors can be saved and loaded "
            "unless the store knows who holds what: give Store(local_shard=...), say "
            "functools.partial(forge_parallel.local_shard, mesh=mesh)"
        )
    return Box(tensor.detach(), (0,) * tensor.ndim, None, entry)


def empty(entry: Entry) -> Tensor:
    """Return a tensor of this dtype and shape without memory, for use as a target."""
    return torch.empty((), dtype=getattr(torch, entry.dtype)).expand(entry.shape)


def staging_bytes(boxes: Mapping[str, Box], buffers: Mapping[str, Tensor]) -> int:
    """Return the host memory that `copy_boxes` takes beyond these buffers (pinned: in powers of two)."""
    total = 0
    for key, box in boxes.items():
        buffer, size = buffers.get(key), box.values.nbytes
        if buffer is None or buffer.nbytes != size:
            total += 1 << (size - 1).bit_length() if size and box.values.device.type == "cuda" else size
    return total


def copy_boxes(boxes: Mapping[str, Box], buffers: dict[str, Tensor]) -> dict[str, Box]:
    """Copy the boxes of this rank to host memory; pinned if they come from a GPU.

    Args:
        boxes: by name.
        buffers: memory of the copy before, which is reused where it fits; updated.
    """
    copied, waiting = {}, set()
    for key, box in boxes.items():
        buffer = buffers.get(key)
        if buffer is None or (buffer.shape, buffer.dtype) != (box.values.shape, box.values.dtype):
            pinned = box.values.device.type == "cuda"
            buffer = torch.empty(box.values.shape, dtype=box.values.dtype, pin_memory=pinned)
            buffers[key] = buffer
        if buffer.is_pinned():
            waiting.add(box.values.device)
        buffer.copy_(box.values, non_blocking=buffer.is_pinned())
        copied[key] = box._replace(values=buffer)
    for gone in buffers.keys() - boxes.keys():
        del buffers[gone]
    for device in waiting:  # for the copies, and not for what other streams do
        torch.cuda.current_stream(device).synchronize()
    return copied


class _Blocks:
    """Writes a file and computes the digest of each of its blocks on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self.num_bytes = 0
        self.digests: list[bytes] = []
        self._file = file
        self._begun = xxhash.xxh3_128()
        self._in_block = 0

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        self.num_bytes += len(view)
        while len(view):
            now = view[: BLOCK_BYTES - self._in_block]
            view = view[len(now) :]
            self._begun.update(now)
            self._file.write(now)  # block by block, while the cache of the processor holds it
            self._in_block += len(now)
            if self._in_block == BLOCK_BYTES:
                self.end_block()

    def end_block(self) -> None:
        if self._in_block:
            self.digests.append(self._begun.digest())
            self._begun.reset()
            self._in_block = 0


def write_boxes(
    file: BinaryIO, boxes: Mapping[str, Box]
) -> tuple[Index, int, dict[str, tuple[Shape, Shape]]]:
    """Write boxes into one file, one after the other, aligned.

    Args:
        file: a new file.
        boxes: by name; boxes that are not the first copy are left out.

    Returns:
        The index, the size of the file, and start and extents of the box of each tensor written here.
    """
    blocks, offsets = _Blocks(file), {}
    written: dict[str, tuple[Shape, Shape]] = {}
    for key, box in sorted(boxes.items()):
        if not box.values.numel() or not box.is_first_copy:
            continue
        blocks.write(b"\0" * (-blocks.num_bytes % ALIGNMENT))
        offsets[key] = blocks.num_bytes
        written[key] = box.offsets, tuple(box.values.shape)
        values = box.values.resolve_conj().resolve_neg().cpu().contiguous()
        blocks.write(values.flatten().view(torch.uint8).numpy().data)
    blocks.end_block()
    return Index(BLOCK_BYTES, encode_digests(blocks.digests), offsets), blocks.num_bytes, written


class Piece(NamedTuple):
    """Elements that lie in one box of the checkpoint and in one wanted box.

    Attributes:
        key: name of the tensor.
        low: index of their first element in the whole tensor.
        high: index after their last element.
        box_start: start of the box of the checkpoint.
        box_size: its extents.
        first: the first byte of their span in the file.
        last: the byte after the span.
    """

    key: str
    low: Shape
    high: Shape
    box_start: Shape
    box_size: Shape
    first: int
    last: int


def plan(
    folder: Path,
    manifest: Manifest,
    wanted: Mapping[str, tuple[Shape, Shape]],
    index_of: Callable[[int], Index] | None = None,
) -> dict[int, tuple[Index, list[Piece]]]:
    """Return, for the file of each rank, its index and the pieces to read, in order of their place.

    Args:
        folder: the folder of the checkpoint.
        manifest: its manifest.
        wanted: start and extents of the wanted box of each tensor.
        index_of: the index of a rank; read and verified, if absent.

    Raises:
        DamagedError, UnreadableError, UnsupportedError: as for `manifest.read`.
    """
    cuts, met = Cuts(manifest.layouts), defaultdict(list)
    for key, (start, size) in wanted.items():
        for box, rank in cuts.meeting(manifest.tensors[key].layout, start, size):
            met[rank].append((key, box))
    planned: dict[int, tuple[Index, list[Piece]]] = {}
    for rank in sorted(met):
        index = read_index(folder, manifest, rank) if index_of is None else index_of(rank)
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
    """Return the wanted values of one box, in pieces about as large as one read."""
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


def read_verified(
    folder: Path,
    manifest: Manifest,
    boxes: Mapping[str, Box],
    index_of: Callable[[int], Index] | None = None,
) -> dict[str, Tensor]:
    """Read boxes from disk, verified, without touching their values; for `index_of` see `plan`.

    Raises:
        DamagedError: bytes that are needed are not those that were written.
        UnreadableError: they cannot be read now.
        UnsupportedError: an index is not one that we write.
    """
    staged = {key: torch.empty(box.values.shape, dtype=box.values.dtype) for key, box in boxes.items()}
    wanted = {key: (box.offsets, tuple(box.values.shape)) for key, box in boxes.items()}
    for rank, (index, pieces) in plan(folder, manifest, wanted, index_of).items():
        path, num_bytes = folder / values_file_name(rank), manifest.files[rank].num_bytes
        for pieces_read, run in read_runs(path, index, num_bytes, pieces):
            for piece in pieces_read:
                _place(piece, run, staged[piece.key], wanted[piece.key][0])
    return staged


class Run(NamedTuple):
    """Verified bytes of a file; `first` is the place of the first of them."""

    first: int
    bytes: bytearray


def read_runs(
    path: Path, index: Index, num_bytes: int, pieces: list[Piece]
) -> Iterator[tuple[list[Piece], Run]]:
    """Read pieces that lie next to each other at once, in whole blocks, each compared with its digest.

    Raises:
        DamagedError: names the block; or it is no plain file of `num_bytes`.
        UnreadableError: a read failed.
    """
    digests, size = index.blocks(), index.block_bytes
    require_size(path, num_bytes)
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
    """Copy a piece into a wanted box, which starts at `start`."""
    item = into.element_size()
    count = (piece.last - piece.first) // item
    span = torch.frombuffer(run.bytes, dtype=into.dtype, offset=piece.first - run.first, count=count)
    size = [b - a for a, b in zip(piece.low, piece.high, strict=True)]
    here = tuple(slice(a - o, b - o) for a, b, o in zip(piece.low, piece.high, start, strict=True))
    into[here] = span.as_strided(size, _strides(piece.box_size))


def verify_file(folder: Path, manifest: Manifest, rank: int) -> None:
    """Read everything that a rank wrote and compare every block.

    Raises:
        DamagedError, UnreadableError, UnsupportedError: as for `manifest.read`.
    """
    index, size = read_index(folder, manifest, rank), manifest.files[rank].num_bytes
    steps = [Piece("", (), (), (), (), a, min(a + READ_BYTES, size)) for a in range(0, size, READ_BYTES)]
    for _ in read_runs(folder / values_file_name(rank), index, size, steps):
        pass


@torch.no_grad()
def commit(staged: Mapping[str, Tensor], boxes: Mapping[str, Box]) -> None:
    """Copy the values read into their boxes."""
    for key, box in boxes.items():
        box.values.copy_(staged[key])
