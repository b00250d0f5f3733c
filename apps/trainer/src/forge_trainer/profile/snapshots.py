"""Writes snapshots of GPU memory after a step or when it runs out, for pytorch.org/memory_viz."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from forge_trainer.console import emit
from forge_trainer.recovery.incidents import note_incident

ENTRIES = 100_000
"""The number of allocations that are recorded, the last ones."""


class Snapshots:
    """The snapshots of one rank; a snapshot that cannot be written causes a warning.

    Args:
        folder: folder of the snapshots.
        rank: rank of this process.
        step: step after which a snapshot is written; None writes none.
        on_oom: whether a snapshot is written when memory runs out.
        directory: the run directory.
    """

    def __init__(self, folder: Path, rank: int, step: int | None, on_oom: bool, directory: Path) -> None:
        self._folder, self._rank, self._step, self._directory = folder, rank, step, directory
        self._always, self._is_recording, self._at = on_oom, False, 0
        if on_oom:
            self._record()
            torch._C._cuda_attach_out_of_memory_observer(self._ran_out)  # type: ignore[attr-defined]

    def before(self, step: int) -> None:
        """Begin to record allocations if there will be a snapshot after the step."""
        self._at = step
        if step == self._step:
            self._record()

    def after(self, step: int) -> None:
        """Write a snapshot if it is due."""
        if step != self._step or not self._is_recording:
            return
        self._write(f"memory-step-{step:08d}-rank-{self._rank}.pickle")
        if not self._always:
            self._forget()

    def close(self) -> None:
        """Stop recording allocations."""
        self._always = False
        if self._is_recording:
            self._forget()

    def _ran_out(self, device: int, wanted: int, total: int, free: int) -> None:
        """Write a snapshot and an incident; the allocator calls this when memory runs out."""
        if not self._always:
            return
        name = f"memory-out-rank-{self._rank}.pickle"
        self._write(name)
        why = (
            f"rank {self._rank} ran out of memory at {wanted / 2**30:.2f} GiB more, with "
            f"{free / 2**30:.2f} of {total / 2**30:.2f} GiB free; see profile/{name}"
        )
        note_incident(self._directory, "memory", {"step": self._at, "why": why})

    def _record(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=ENTRIES)
        self._is_recording = True

    def _forget(self) -> None:
        stop: Any = None
        torch.cuda.memory._record_memory_history(enabled=stop)
        self._is_recording = False

    def _write(self, name: str) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self._folder / name))
        except (OSError, RuntimeError) as error:  # a full disk is no reason to end
            emit(f"{name} could not be written: {error}\n", sys.stderr)
