"""What follows trouble: a rollback to a checkpoint from before it, without its data; or the end.

A rollback is a line in `incidents.jsonl` before it is anything else, such that a kill at any moment changes
nothing. Checkpoints know how many rollbacks came before them: those of later steps that knew of fewer are
removed, now or by the next start.
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
"""Rollbacks for trouble within so many steps of each other count together."""


class Recovery:
    """Says what follows trouble, and keeps the rollbacks of a run. All ranks hold the same.

    Args:
        config: how many rollbacks there may be, and how far behind trouble they reach.
        directory: of the run.
        store: its checkpoints.
        group: of all ranks, on the CPU.

    Attributes:
        trouble: what a guard has found, and no rollback has answered.
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
        """ROLLBACK; or ABORT, where that has been done too often near here.

        Of trouble that several guards find in one step, the first one's counts.
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
        """Decide on a checkpoint, and write it down; None if none is from before the trouble. Collective."""
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
        """The data section without the steps that rollbacks skip."""
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
        """Remove the checkpoints of steps that a rollback gave up."""
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
