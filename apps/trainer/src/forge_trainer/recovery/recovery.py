"""Decides what follows trouble: a rollback to an earlier checkpoint, without the bad data; or the end.

A rollback is recorded in `incidents.jsonl` before anything else is done, so that a kill at any moment changes
nothing. A checkpoint contains the number of rollbacks before it: a checkpoint of a later step with a smaller
number is removed, at once or by the next start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

import msgspec
from forge_ckpt import manifest as manifests
from forge_ckpt.error import CheckpointError
from forge_ckpt.store import Store
from forge_data.config import DataConfig
from forge_resilience.config import ResilienceConfig
from forge_resilience.verdict import Verdict
from torch.distributed import ProcessGroup

from forge_trainer.ranks import from_first
from forge_trainer.recovery.incidents import ROLLBACK, Rollback, Trouble, append_incident, read_rollbacks

log = logging.getLogger(__name__)

T = TypeVar("T")

NEAR_STEPS = 1000
"""The largest distance, in steps, of troubles whose rollbacks count together."""


class Recovery:
    """Decides what follows trouble, and keeps the rollbacks of a run; equal on all ranks.

    Args:
        config: the largest number of rollbacks, and their margin in steps.
        directory: the run directory.
        store: the store of its checkpoints.
        group: process group of all ranks, on the CPU.

    Attributes:
        trouble: trouble that a guard has found and no rollback has answered.
        taken: the rollbacks so far, oldest first.
    """

    def __init__(
        self, config: ResilienceConfig, directory: Path, store: Store, group: ProcessGroup | None
    ) -> None:
        self._config, self._directory, self._store, self._group = config, directory, store, group
        self.trouble: Trouble | None = None
        self.taken: list[Rollback] = self._on_first(lambda: read_rollbacks(directory))
        self._on_first(self._discard)

    def judge(self, trouble: Trouble) -> Verdict:
        """Return ROLLBACK; ABORT if there were too many rollbacks near the trouble.

        If several guards find trouble in one step, the first trouble counts.
        """
        if self.trouble is None:
            self.trouble = trouble
        near = sum(abs(one.first - self.trouble.first) < NEAR_STEPS for one in self.taken)
        if near < self._config.max_rollbacks:
            return Verdict.ROLLBACK
        if near and self.trouble is trouble:
            self.trouble = replace(trouble, why=f"{trouble.why}; {near} rollbacks near here have not helped")
        return Verdict.ABORT

    def begin(self) -> Rollback | None:
        """Choose a checkpoint from before the trouble, record the rollback; None without one. Collective."""
        trouble = self.trouble
        assert trouble is not None
        made = self._on_first(lambda: self._begin(trouble))
        if made is None:
            why = f"{trouble.why}; there is no checkpoint from before it to go back to"
            self.trouble = replace(trouble, why=why)
            return None
        self.trouble = None
        self.taken.append(made)
        self._on_first(self._discard)
        return made

    def data(self, config: DataConfig) -> DataConfig:
        """Return the data section with the steps that rollbacks skip left out."""
        skips = [skip for one in self.taken for skip in one.skipped()]
        return msgspec.structs.replace(config, skip=[*config.skip, *skips])

    def _begin(self, trouble: Trouble) -> Rollback | None:
        margin = self._config.rollback_margin_steps
        before = [step for step in self._store.steps() if step <= max(0, trouble.first - margin)]
        if not before:
            return None
        made = Rollback(
            before[-1], trouble.first, trouble.end, trouble.why, trouble.data, margin, trouble.hosts
        )
        append_incident(self._directory, ROLLBACK, asdict(made))
        return made

    def _discard(self) -> None:
        """Remove the checkpoints of steps that a rollback discarded."""
        self._store.settle()  # or one of them comes back later
        for step in self._store.steps():
            later = [nth for nth, one in enumerate(self.taken, 1) if step > one.to]
            try:
                known = manifests.read(self._store.folder(step)).meta.get("rollbacks", 0) if later else 0
            except CheckpointError:
                continue  # it is damaged, or cannot be read: it is not resumed from
            if later and known < later[-1]:
                log.warning("the checkpoint of step %d is removed: it was made before a rollback", step)
                self._store.remove(step)

    def _on_first(self, work: Callable[[], T]) -> T:
        def caught() -> T | CheckpointError:
            try:
                return work()
            except (CheckpointError, OSError) as error:
                return CheckpointError(f"going back to an earlier checkpoint: {error}")

        found = from_first(caught, self._group)
        if isinstance(found, CheckpointError):
            raise found
        return found
