"""Compares the copies of the weights every N steps, where data-parallel replicas hold any."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch
from forge_parallel.mesh import Mesh
from forge_parallel.tensor import local_part
from forge_resilience.copies import Copy, differing, digests, name_the_odd
from forge_resilience.exit_codes import ExitCode
from forge_resilience.verdict import Verdict, agree
from torch import Tensor
from torch.distributed import ProcessGroup

from forge_trainer.hooks.base import Hook
from forge_trainer.ladder import Ladder, Trouble
from forge_trainer.progress import Progress
from forge_trainer.steps.base import StepOutput

REPLICATE = "dp_replicate"
"""The axis of the mesh along which ranks hold the same."""


class CompareCopies(Hook):
    """Tells the ladder of copies that differ; the run then goes back to when they were the same. Collective.

    Args:
        every: distance in steps.
        parameters: that this rank holds, by name.
        mesh: the grid of ranks.
        ladder: says what follows.
        step: steps taken so far; up to then copies were loaded or made the same.
    """

    span = "copies"

    def __init__(
        self, every: int, parameters: Sequence[tuple[str, Tensor]], mesh: Mesh, ladder: Ladder, step: int
    ) -> None:
        self.every = every
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._mesh, self._ladder, self._same = mesh, ladder, step

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`. Waits for the device. Collective."""
        self.compare(progress.step)

    def rewind(self, progress: Progress) -> None:
        """See `Hook.rewind`."""
        self._same = progress.step

    def compare(self, step: int) -> bool:
        """Whether all copies are the same after so many steps; tells the ladder if not. Collective."""
        group = replicas(self._mesh)
        assert group is not None
        mine = digests([local_part(parameter) for parameter in self._parameters])
        which = differing(mine, group)
        bad = which.nonzero().flatten().tolist()
        if agree(Verdict.ROLLBACK if bad else Verdict.CONTINUE, self._mesh.control_group) is Verdict.CONTINUE:
            self._same = step
            return True
        why = name_the_odd(self._everyone(mine, bad))
        self._ladder.reported = Trouble(self._same, step, why, ExitCode.DIVERGED, data=False)
        return False

    def _everyone(self, mine: Tensor, bad: Sequence[int]) -> list[Copy]:
        """What the ranks hold whose copies differ, on every rank alike. Collective."""
        import torch.distributed as dist

        group = replicas(self._mesh)
        assert group is not None
        rank, ranks = dist.get_rank(), tuple(dist.get_process_group_ranks(group))
        host = socket.gethostname()
        copy = Copy(rank, host, ranks, self._names[bad[0]], hash(tuple(mine.tolist()))) if bad else None
        everyone: list[Copy | None] = [None] * dist.get_world_size(self._mesh.control_group)
        dist.all_gather_object(everyone, copy, group=self._mesh.control_group)
        return [one for one in everyone if one is not None]


def replicas(mesh: Mesh) -> ProcessGroup | None:
    """The ranks that hold copies of whatever this rank holds of the model; None where there are none."""
    if mesh.fsdp is None or REPLICATE not in (mesh.fsdp.mesh_dim_names or ()):
        return None
    return mesh.fsdp.get_group(REPLICATE)


def build_copies(
    every: int, parts: Sequence[torch.nn.Module], mesh: Mesh, ladder: Ladder, step: int
) -> CompareCopies | None:
    """The hook; None where nothing is compared, or no rank holds a copy."""
    if not every or replicas(mesh) is None:
        return None
    return CompareCopies(every, [named for p in parts for named in p.named_parameters()], mesh, ladder, step)
