"""Takes a run back to an earlier checkpoint, such that a kill at any moment changes nothing.

A rollback is a line in `incidents.jsonl` before it is anything else. Checkpoints know how many rollbacks
came before them: those of later steps that knew of fewer are removed, now or by the next start.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from forge_ckpt import manifest as manifests
from forge_ckpt.error import CheckpointError
from forge_ckpt.store import Store
from forge_data.config import DataConfig
from torch.distributed import ProcessGroup

from forge_trainer.ladder import Rollback, Trouble
from forge_trainer.ranks import from_first
from forge_trainer.run_dir import RunFiles, now, read_lines

log = logging.getLogger(__name__)

T = TypeVar("T")

ROLLBACK = "rollback"
"""The kind of a line of `incidents.jsonl`."""


def append_incident(directory: Path, kind: str, facts: Mapping[str, Any]) -> None:
    """Add a line to `incidents.jsonl`, on the disk when it returns.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = RunFiles(directory).incidents
    try:
        torn = path.exists() and not path.read_bytes().endswith(b"\n")
        with path.open("ab") as file:
            line = json.dumps({"kind": kind, "when": now(), **facts})
            file.write(b"\n" * torn + line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from None


def note_incident(directory: Path, kind: str, facts: Mapping[str, Any]) -> None:
    """Add a line that nothing depends on: a disk that takes nothing is no reason to end."""
    with suppress(CheckpointError):
        append_incident(directory, kind, facts)


def read_rollbacks(directory: Path) -> list[Rollback]:
    """Those of a run, oldest first.

    Raises:
        CheckpointError: a line of one lacks something.
    """
    path, fields = RunFiles(directory).incidents, Rollback.__dataclass_fields__
    found = [line for line in read_lines(path, "kind") if line["kind"] == ROLLBACK]
    for line in found:
        if missing := [name for name in fields if name not in line]:
            raise CheckpointError(f"{path}: a rollback without {', '.join(missing)}: {json.dumps(line)}")
    return [Rollback(**{name: line[name] for name in fields}) for line in found]


class Rollbacks:
    """The rollbacks of a run on all ranks. Every method is collective, but for `data`.

    Args:
        directory: of the run.
        store: its checkpoints.
        group: of all ranks, on the CPU.

    Attributes:
        taken: those so far, oldest first; grows.
    """

    def __init__(self, directory: Path, store: Store, group: ProcessGroup | None) -> None:
        self._directory, self._store, self._group = directory, store, group
        self.taken: list[Rollback] = self._first(lambda: read_rollbacks(directory))
        self._first(self._discard)

    def data(self, config: DataConfig) -> DataConfig:
        """What is read, without what rollbacks have left out."""
        skips = [skip for one in self.taken for skip in one.skipped()]
        return msgspec.structs.replace(config, skip=[*config.skip, *skips])

    def begin(self, trouble: Trouble, margin: int) -> Rollback | None:
        """Decide on a way back, and write it down; None where no checkpoint is from before the trouble."""
        made = self._first(lambda: self._begin(trouble, margin))
        if made is not None:
            self.taken.append(made)
            self._first(self._discard)
        return made

    def _begin(self, trouble: Trouble, margin: int) -> Rollback | None:
        before = [step for step in self._store.steps() if step <= max(0, trouble.first - margin)]
        if not before:
            return None
        made = Rollback(before[-1], trouble.first, trouble.end, trouble.why, trouble.data, margin)
        append_incident(self._directory, ROLLBACK, asdict(made))
        return made

    def _discard(self) -> None:
        """Remove checkpoints of what was given up."""
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

    def _first(self, work: Callable[[], T]) -> T:
        def caught() -> T | CheckpointError:
            try:
                return work()
            except (CheckpointError, OSError) as error:
                return CheckpointError(f"going back to an earlier checkpoint: {error}")

        found = from_first(caught, self._group)
        if isinstance(found, CheckpointError):
            raise found
        return found
