"""How ranks that save and load together hear of each other. Imports torch only where there are several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from forge_ckpt.error import CheckpointError
from forge_ckpt.layout import Entry
from forge_ckpt.manifest import digest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

R = TypeVar("R")


class Held(msgspec.Struct, frozen=True):
    """What a rank holds.

    Attributes:
        tensors: dtype and shape of each, by name.
        values: plain values by name.
    """

    tensors: dict[str, Entry]
    values: dict[str, Any]


class Ranks:
    """The ranks of a group, or a lone process. What one rank fails at, all hear of.

    Args:
        group: of CPU ranks, for nothing else; None in a lone process.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group, self.rank, self.size = group, 0, 1
        if group is not None:
            import torch.distributed as dist

            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value: R) -> list[R]:
        """The value of each rank, on every rank. Collective."""
        if self.group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def to_first(self, value: R) -> list[R]:
        """The value of each rank, on the first rank; elsewhere nothing. Collective."""
        if self.group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group_dst=0, group=self.group)
        return values or []

    def each(self, work: Callable[[], R]) -> R:
        """Do something on every rank. Collective.

        Raises:
            CheckpointError: on every rank when it failed on any; names each.
        """
        try:
            result, failure = work(), None
        except Exception as error:  # the other ranks must hear of it, not wait for this one
            result, failure = None, _told(error)
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(self.gather(failure)) if text]
        if failures:
            raise CheckpointError("; ".join(failures))
        return result  # type: ignore[return-value]

    def from_first(self, work: Callable[[], R]) -> R:
        """What the first rank finds, on every rank; file systems may show others something else. Collective.

        Raises:
            CheckpointError: on every rank when it failed.
        """
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = work()
            except Exception as error:  # the other ranks must hear of it, not wait for this one
                answer[1] = _told(error)
        answer = self._broadcast(answer, 0)
        if answer[1] is not None:
            raise CheckpointError(answer[1])
        return answer[0]

    def held(self, tensors: Mapping[str, Entry], values: Mapping[str, Any]) -> tuple[list[Held], list[int]]:
        """What the ranks hold, each different answer once, and which one is that of each rank. Collective."""
        mine = msgspec.json.encode(Held(dict(sorted(tensors.items())), dict(sorted(values.items()))))
        digests = self.gather(digest(mine))
        distinct = list(dict.fromkeys(digests))
        found = []
        for one in distinct:
            data = self._broadcast([mine], digests.index(one))[0]
            found.append(msgspec.json.decode(data, type=Held))
        return found, [distinct.index(one) for one in digests]

    def _broadcast(self, values: list[Any], source: int) -> list[Any]:
        if self.group is None:
            return values
        import torch.distributed as dist

        dist.broadcast_object_list(values, group_src=source, group=self.group)
        return values


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
