"""Communication of ranks that save and load together. Imports torch only if there are several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heapreplace
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

import msgspec
import numpy as np

from forge_ckpt.error import CheckpointError
from forge_ckpt.layout import Entry
from forge_ckpt.lease import this_machine
from forge_ckpt.manifest import digest, require_json

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from forge_ckpt.shards import Box

R = TypeVar("R")


class Ranks:
    """The ranks of a group, or a lone process. A failure of one rank is raised on all.

    Args:
        group: a group of CPU ranks, for nothing else; None in a lone process.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group, self.rank, self.size = group, 0, 1
        if group is not None:
            import torch.distributed as dist

            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def on_this_machine(self) -> int:
        """Return the number of ranks that share the memory of this machine. Collective."""
        machines = self.gather(this_machine())
        return machines.count(machines[self.rank])

    def gather(self, value: R) -> list[R]:
        """Return the value of each rank, on every rank. Collective."""
        if self.group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def to_first(self, value: R) -> list[R]:
        """Return the value of each rank, on the first rank; elsewhere nothing. Collective."""
        if self.group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group_dst=0, group=self.group)
        return values or []

    def each(self, work: Callable[[], R]) -> R:
        """Run a function on every rank. Collective.

        Raises:
            CheckpointError: on every rank when it failed on any; names each.
        """
        try:
            result, failure = work(), None
        except Exception as error:  # the other ranks must hear of it, not wait for this one
            result, failure = None, _message(error)
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(self.gather(failure)) if text]
        if failures:
            raise CheckpointError("; ".join(failures))
        return result  # type: ignore[return-value]

    def from_first(self, work: Callable[[], R]) -> R:
        """Return the first rank's result on every rank, as file systems may differ between ranks. Collective.

        Raises:
            CheckpointError: on every rank when it failed.
        """
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = work()
            except Exception as error:  # the other ranks must hear of it, not wait for this one
                answer[1] = _message(error)
        answer = self._broadcast(answer, 0)
        if answer[1] is not None:
            raise CheckpointError(answer[1])
        return answer[0]

    def distinct_tables(self, tensors: Mapping[str, Entry]) -> tuple[list[dict[str, Entry]], list[int]]:
        """Return the different tables of tensors of all ranks, and the table of each rank. Collective."""
        mine = msgspec.json.encode(dict(sorted(tensors.items())))
        digests = self.gather(digest(mine))
        distinct = list(dict.fromkeys(digests))
        found = []
        for one in distinct:
            data = self._broadcast([mine], digests.index(one))[0]
            found.append(msgspec.json.decode(data, type=dict[str, Entry]))
        return found, [distinct.index(one) for one in digests]

    def values_to_first(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the plain values of all ranks, equal ones once, on the first rank. Collective.

        Raises:
            CheckpointError: on every rank when some of any are not JSON.
        """

        def encoded() -> bytes:
            require_json(values)
            return msgspec.json.encode(dict(sorted(values.items())))

        mine = self.each(encoded)
        digests = self.gather(digest(mine))
        is_first = digests.index(digests[self.rank]) == self.rank
        return [msgspec.json.decode(data) for data in self.to_first(mine if is_first else None) if data]

    def share(
        self, boxes: Mapping[str, Box], tables: Sequence[Mapping[str, Entry]], table_of: Sequence[int]
    ) -> dict[str, Box]:
        """Decide which rank writes boxes that several ranks hold, so that each writes some. Collective.

        Ranks that hold the same box of every tensor, such as replicas, share the writing of these boxes; so
        do all ranks that hold the same plain tensor, if none is marked as the first.

        Returns:
            The same boxes; `is_first_copy` says whether this rank writes them.
        """
        names = sorted(boxes)
        places = [(boxes[name].offsets, tuple(boxes[name].values.shape)) for name in names]
        first = np.packbits(np.array([boxes[name].is_first_copy is True for name in names], dtype=bool))
        mine = (table_of[self.rank], digest(msgspec.json.encode(places)))
        everyone = self.gather((mine, first.tobytes()))
        alike = [rank for rank, (which, _) in enumerate(everyone) if which == mine]
        due = np.bitwise_or.reduce([np.frombuffer(everyone[rank][1], np.uint8) for rank in alike])
        writers: dict[str, int] = {}
        least = [(0, rank) for rank in alike]
        holders_of: dict[tuple[bool, ...], list[int]] = {}
        due_of = dict(zip(names, np.unpackbits(due, count=len(names)), strict=True))
        for name in sorted(names, key=lambda name: (-boxes[name].values.nbytes, name)):
            holders = alike
            if boxes[name].is_first_copy is None:
                among = tuple(name in one for one in tables)
                if among not in holders_of:
                    holders_of[among] = [rank for rank, which in enumerate(table_of) if among[which]]
                holders = holders_of[among]
            if holders == alike and (due_of[name] or boxes[name].is_first_copy is None):
                num_bytes, writers[name] = least[0]
                heapreplace(least, (num_bytes + boxes[name].values.nbytes, writers[name]))
            elif holders != alike:
                writers[name] = holders[crc32(name.encode()) % len(holders)]
        return {key: box._replace(is_first_copy=writers.get(key) == self.rank) for key, box in boxes.items()}

    def swap(self, gives: Sequence[Tensor], to: int, takes: Sequence[Tensor], source: int) -> None:
        """Send tensors to one rank while others are received from another.

        Args:
            gives: contiguous, in host memory; `to` receives as many, of the same dtypes and shapes.
            to: the receiver.
            takes: filled with the tensors of `source`.
            source: the sender.
        """
        import torch
        import torch.distributed as dist

        works = []
        for tag, tensor in enumerate(takes):
            if tensor.numel():
                data = tensor.reshape(-1).view(torch.uint8)
                works.append(dist.irecv(data, group=self.group, group_src=source, tag=tag))
        for tag, tensor in enumerate(gives):
            if tensor.numel():
                data = tensor.reshape(-1).view(torch.uint8)
                works.append(dist.isend(data, group=self.group, group_dst=to, tag=tag))
        for work in works:
            work.wait()

    def _broadcast(self, values: list[Any], source: int) -> list[Any]:
        if self.group is None:
            return values
        import torch.distributed as dist

        dist.broadcast_object_list(values, group_src=source, group=self.group)
        return values


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
