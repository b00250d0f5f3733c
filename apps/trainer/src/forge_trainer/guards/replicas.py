"""Compares the copies of the weights on data-parallel replicas every N steps."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from forge_parallel.mesh import Mesh
from forge_parallel.tensor import local_part
from forge_resilience.copies import Copy, differing, digests, name_the_odd
from forge_resilience.exit_codes import ExitCode
from forge_resilience.verdict import Verdict, agree
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from forge_trainer.guards.guards import Guard
from forge_trainer.progress import Progress
from forge_trainer.recovery.incidents import Trouble
from forge_trainer.recovery.recovery import Recovery
from forge_trainer.steps.base import StepOutput

REPLICATE = "dp_replicate"
"""The axis of the mesh along which ranks hold equal weights."""


class Replicas(Guard):
    """Reports trouble if copies of the weights differ; the run then goes back to when they were equal.

    Args:
        every: steps between comparisons.
        parameters: names and parameters of this rank.
        mesh: the grid of ranks.
        recovery: decides what follows.
        progress: progress of the run; at its present step the copies are equal.
    """

    span = "copies"

    def __init__(
        self,
        every: int,
        parameters: Sequence[tuple[str, Tensor]],
        mesh: Mesh,
        recovery: Recovery,
        progress: Progress,
    ) -> None:
        self._every = every
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._mesh, self._recovery, self._same = mesh, recovery, progress.step
        self._found: Trouble | None = None

    def observe(self, progress: Progress, out: StepOutput) -> None:
        """See `Guard.observe`. Waits for the device at each comparison. Collective."""
        if progress.step % self._every == 0 or progress.complete:
            self._compare(progress.step)

    def verdict(self, progress: Progress, save_due: bool) -> Verdict:
        """See `Guard.verdict`."""
        found, self._found = self._found, None
        return Verdict.CONTINUE if found is None else self._recovery.judge(found)

    def before_save(self, progress: Progress) -> Verdict:
        """See `Guard.before_save`."""
        self._compare(progress.step)
        return self.verdict(progress, True)

    def rewind(self, progress: Progress) -> None:
        """See `Guard.rewind`."""
        self._same, self._found = progress.step, None

    def _compare(self, step: int) -> None:
        """Compare all copies after `step` steps, and remember trouble. Collective."""
        group = replicas(self._mesh)
        assert group is not None
        mine = digests([local_part(parameter) for parameter in self._parameters])
        bad = differing(mine, group).nonzero().flatten().tolist()
        if agree(Verdict.ROLLBACK if bad else Verdict.CONTINUE, self._mesh.control_group) is Verdict.CONTINUE:
            self._same = step
            return
        odd = name_the_odd(self._everyone(mine, bad))
        self._found = Trouble(self._same, step, odd.why, ExitCode.DIVERGED, data=False, hosts=odd.hosts)

    def _everyone(self, mine: Tensor, bad: Sequence[int]) -> list[Copy]:
        """Return the copies of all ranks that differ, the same list on every rank. Collective."""
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
    """Return the group of ranks with copies of this rank's part of the model; None if there are none."""
    if mesh.fsdp is None or REPLICATE not in (mesh.fsdp.mesh_dim_names or ()):
        return None
    return mesh.fsdp.get_group(REPLICATE)


def compared(
    every: int, parts: Sequence[nn.Module], mesh: Mesh, recovery: Recovery, progress: Progress
) -> list[Guard]:
    """Return the guard in a list; an empty list if nothing is compared, or no rank has a copy."""
    if not every or replicas(mesh) is None:
        return []
    named = [named for part in parts for named in part.named_parameters()]
    return [Replicas(every, named, mesh, recovery, progress)]
