"""The record of incidents: trouble, the rollbacks that followed, and notes of whoever noticed something."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_ckpt.error import CheckpointError
from forge_data.order.skips import SkipConfig, left_out
from forge_resilience.exit_codes import ExitCode

from forge_trainer.run_dir.files import RunFiles, now, read_lines

ROLLBACK = "rollback"
"""The kind of a line of `incidents.jsonl`."""


@dataclass(frozen=True)
class Trouble:
    """An incident: what went wrong, and in which steps.

    Attributes:
        first: the first step, from 0.
        end: the one behind the last.
        why: in words.
        code: how the run ends if it cannot go back.
        data: whether the data of these steps may be the cause.
        hosts: whose hardware is suspect.
    """

    first: int
    end: int
    why: str
    code: ExitCode
    data: bool = True
    hosts: Sequence[str] = ()


@dataclass(frozen=True)
class Rollback:
    """A rollback as it stands in the record of incidents.

    Attributes:
        to: steps taken up to the checkpoint.
        first: the first step of the trouble, from 0.
        end: the one behind the last.
        why: in words.
        skip: whether the data of these steps, and of the margin, are left out from then on.
        margin: steps.
        hosts: whose hardware is suspect.
    """

    to: int
    first: int
    end: int
    why: str
    skip: bool
    margin: int = 0
    hosts: Sequence[str] = ()

    def skipped(self) -> list[SkipConfig]:
        """The data that are left out."""
        return [left_out(self.to, self.first, self.end, self.margin)] if self.skip else []


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
    """The rollbacks of a run, oldest first.

    Raises:
        CheckpointError: a line of one lacks something.
    """
    path, fields = RunFiles(directory).incidents, Rollback.__dataclass_fields__
    found = [line for line in read_lines(path, "kind") if line["kind"] == ROLLBACK]
    for line in found:
        if missing := [name for name in fields if name not in {*line, "hosts"}]:
            raise CheckpointError(f"{path}: a rollback without {', '.join(missing)}: {json.dumps(line)}")
    return [Rollback(**{name: line[name] for name in fields.keys() & line.keys()}) for line in found]
