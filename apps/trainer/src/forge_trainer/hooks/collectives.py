"""Checks at the start and every N steps that sums over ranks are correct, and logs how long they take."""

from __future__ import annotations

import socket
import sys

from forge_parallel.mesh import Mesh
from forge_resilience.collective import Checked, check_sum
from torch.distributed import ProcessGroup

from forge_trainer.console import emit
from forge_trainer.hooks.base import Hook, RunView
from forge_trainer.progress import Progress
from forge_trainer.recovery.incidents import note_incident
from forge_trainer.steps.base import StepOutput


class CheckCollectives(Hook):
    """A hook that names each rank that gets a wrong sum. Collective.

    Args:
        every: steps between checks.
        run: the run.
    """

    span = "collectives"

    def __init__(self, every: int, run: RunView) -> None:
        self.every, self._run = every, run

    def on_start(self, progress: Progress) -> None:
        """See `Hook.on_start`. Waits for the device. Collective."""
        self._check(progress)

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`. Waits for the device. Collective."""
        slowest = self._check(progress)
        for tracker in self._run.trackers:
            tracker.log({"step": progress.step, "tokens": progress.tokens} | slowest)

    def _check(self, progress: Progress) -> dict[str, float]:
        """Check all groups; return the seconds of the slowest rank, by group."""
        import torch.distributed as dist

        mesh = self._run.mesh
        mine = {name: check_sum(group, mesh.device) for name, group in groups_of(mesh).items()}
        everyone: list[tuple[str, dict[str, Checked]]] = [("", {})] * self._run.env.world_size
        dist.all_gather_object(everyone, (socket.gethostname(), mine), group=mesh.control_group)
        if self._run.env.rank == 0:
            for rank, (host, found) in enumerate(everyone):
                for name, checked in found.items():
                    self._report(progress.step, rank, host, name, checked.wrong)
        return {f"collectives/{name}_s": max(found[name].seconds for _, found in everyone) for name in mine}

    def _report(self, step: int, rank: int, host: str, name: str, wrong: int) -> None:
        if not wrong:
            return
        why = f"rank {rank} on {host} gets {wrong} wrong numbers in sums over the ranks of its {name}"
        emit(f"{why}\n", sys.stderr)
        note_incident(self._run.directory, "hardware", {"step": step, "why": why})


def groups_of(mesh: Mesh) -> dict[str, ProcessGroup]:
    """Return the largest groups of training, which together reach every rank; empty for a single rank."""
    views = {"stage": mesh.stage, "pipeline": mesh.pipeline}
    return {name: view.group for name, view in views.items() if view.group is not None}
