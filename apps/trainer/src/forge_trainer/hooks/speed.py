"""Compares the ranks every N steps: finds ranks slower than the others at the same work, and faulty GPUs."""

from __future__ import annotations

import socket
import statistics
import sys
import threading
import time
from collections import defaultdict

import torch
from forge_resilience.gpu_health import gpu_problems
from forge_resilience.straggler import PROBE, Stragglers, scores
from torch import Tensor

from forge_trainer.console import emit
from forge_trainer.hooks.base import Hook, RunView
from forge_trainer.progress import Progress
from forge_trainer.recovery.incidents import note_incident
from forge_trainer.steps.base import StepOutput

PHASES = ("data", "step")
"""The clock spans that every step has."""

REPEATS, SIZE = 5, {"cpu": 192, "cuda": 2048}
"""The probe: number of products, and size of the square matrices; a few milliseconds in all."""


class CompareSpeed(Hook):
    """A hook that logs the score of the slowest rank by phase, and names a rank that stays slow. Collective.

    Args:
        every: steps between comparisons.
        run: the run.
    """

    span = "speed"

    def __init__(self, every: int, run: RunView) -> None:
        self.every = every
        self._run, self._stragglers = run, Stragglers()
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        run.clock.listeners.append(lambda name, s: self._seconds[name].append(s) if name in PHASES else None)
        size = SIZE.get(run.mesh.device.type, SIZE["cpu"])
        self._matrix = torch.full((size, size), 1.0 / size, device=run.mesh.device)
        self._check_gpus()

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`. Waits for the device. Collective."""
        import torch.distributed as dist

        mine = {phase: statistics.median(self._seconds[phase]) for phase in PHASES if self._seconds[phase]}
        self._seconds.clear()
        mine[PROBE] = probe_s(self._matrix)
        group = self._run.mesh.control_group
        everyone: list[tuple[dict[str, float], str]] = [({}, "")] * self._run.env.world_size
        dist.all_gather_object(everyone, (mine, socket.gethostname()), group=group)
        found = scores([medians for medians, _ in everyone])
        record = {f"straggler/{phase}": min(ranks) for phase, ranks in found.items()}
        for tracker in self._run.trackers:
            tracker.log({"step": progress.step, "tokens": progress.tokens} | record)
        slow = self._stragglers.window(found)
        if self._run.env.rank == 0:
            for rank, phase, score in slow:
                self._report(
                    f"rank {rank} on {everyone[rank][1]} is slow at {phase!r}: "
                    f"the fastest rank takes {score:.0%} of its time"
                )
        self._check_gpus()

    def _check_gpus(self) -> None:
        """Check the GPUs in the background, once on each host."""
        if self._run.env.local_rank == 0 and self._run.mesh.device.type == "cuda":
            threading.Thread(target=self._report_gpus, name="gpu-health", daemon=True).start()

    def _report_gpus(self) -> None:
        for problem in gpu_problems() or []:
            self._report(f"{problem} (host {socket.gethostname()})")

    def _report(self, why: str) -> None:
        emit(f"{why}\n", sys.stderr)
        note_incident(self._run.directory, "hardware", {"step": self._run.progress.step, "why": why})


def probe_s(matrix: Tensor) -> float:
    """Return the seconds of the fastest of a few products of a matrix with itself; wait for the device."""
    took: list[float] = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        took.append(time.perf_counter() - begin)
    return min(took)
