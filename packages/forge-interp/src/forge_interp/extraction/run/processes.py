"""Which parts of a dataset does this process extract, and how do processes wait for each other?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from forge_interp.errors import InterpError
from forge_interp.extraction.run.identity import is_distributed
from forge_interp.extraction.samples import Batch
from forge_interp.hooks.engine.sharding import Spread

Written = dict[int, tuple[int, int]]
"""Number of batches of each part, and CRC-32 of their inputs."""


@dataclass(frozen=True)
class Processes:
    """This process among the processes that extract together."""

    rank: int  # index of its share of the parts
    size: int  # number of shares
    group: Any = None  # the processes that wait for each other; None when each works for itself
    in_step: bool = False  # all of the group must run the model equally often, for they hold it together
    writes: bool = True  # False where another process of the same rank writes the rows (tensor parallelism)

    @classmethod
    def of(
        cls, model: nn.Module, rank: int | None, world_size: int | None, group: Any, writes: bool
    ) -> Processes:
        """Take missing arguments from `torch.distributed`; InterpError where they do not fit together."""
        if (rank is None) != (world_size is None):
            raise InterpError(f"rank is {rank} and world_size {world_size}; expected both or none")
        running = dist.is_available() and dist.is_initialized()
        in_step = running and is_distributed(model)
        if rank is None and running and Spread(model).is_tensor_parallel:
            raise InterpError(
                "the model is tensor parallel, and its ranks must read the same batches; expected rank= and "
                "world_size= of data parallelism, and writes=True on one rank of each tensor parallel group"
            )
        if group is None and running and (rank is None or in_step):
            group = dist.group.WORLD
        if rank is None or world_size is None:
            alone = group is None
            rank, world_size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
        if not 0 <= rank < world_size:
            raise InterpError(f"rank is {rank} of {world_size}; expected 0 <= rank < world_size")
        return cls(rank, world_size, group, in_step, writes)

    @property
    def is_first(self) -> bool:
        """Whether this process draws and tidies up: one of the processes that wait for each other."""
        return self.group is None or dist.get_rank(self.group) == 0

    def share(self, num_parts: int | None) -> tuple[int, int | None]:
        """Return the first part of this process and the end of its parts; None: up to the last."""
        if self.size == 1:
            return 0, None
        if num_parts is None:
            raise InterpError(
                f"the dataset is an iterable without a length, for {self.size} processes; expected one with "
                "len(): give a sequence of samples, or a DataLoader of one"
            )
        return num_parts * self.rank // self.size, num_parts * (self.rank + 1) // self.size

    def agree(self, find: Callable[[], Written]) -> Written:
        """Return the parts written for this rank, as its writing process sees them. Collective if in step.

        An error of one process is raised on all.
        """
        if not self.in_step:
            return find()
        states = self._gathered(lambda: (self.rank, self.writes, find()))
        found = [written for rank, writes, written in states if rank == self.rank and writes]
        if len(found) != 1:
            raise InterpError(
                f"{len(found)} processes write rank {self.rank}; expected one: give writes=False to others"
            )
        return found[0]

    def steps(self, mine: Iterator[Batch], spare: Callable[[], Batch]) -> Iterator[tuple[Batch, bool]]:
        """Yield each batch and whether its rows count. Collective when in step.

        In step, a process without a batch left repeats its last one (or a spare) until none has a batch.
        """
        device = "cuda" if self.in_step and dist.get_backend(self.group) == "nccl" else "cpu"
        last = None
        while True:
            batch = next(mine, None)
            any_left = torch.tensor(int(batch is not None), device=device)
            if self.in_step:
                dist.all_reduce(any_left, dist.ReduceOp.MAX, group=self.group)
            if not any_left:
                return
            last = batch or last or spare()
            yield last, batch is not None

    def together(self, act: Callable[[], object]) -> None:
        """Call `act` once, after the whole group has arrived, and wait for it. Collective."""
        if self.group is None:
            act()
        else:
            dist.barrier(self.group)
            self._gathered(act if self.is_first else lambda: None)

    def _gathered(self, find: Callable[[], Any]) -> list[Any]:
        """Return the results of all processes in the group; an error of one is raised on all. Collective."""
        found, failure = None, None
        try:
            found = find()
        except (InterpError, OSError) as error:
            failure = error
        states: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(states, (found, failure and str(failure)), group=self.group)
        if failed := [text for _, text in states if text is not None]:
            raise failure or InterpError(failed[0])
        return [found for found, _ in states]
