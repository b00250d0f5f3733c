"""The record of incidents of a run: rollbacks, and notes of other trouble."""

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
"""The `kind` of a rollback in `incidents.jsonl`."""


@dataclass(frozen=True)
class Trouble:
    """An incident: what went wrong, and in which steps.

    Attributes:
        first: the first step, from 0.
        end: the last step plus 1.
        why: the reason, in words.
        code: exit code of the run if it cannot go back.
        data: whether the data of these steps may be the cause.
        hosts: hosts whose hardware is suspect.
    """

    first: int
    end: int
    why: str
    code: ExitCode
    data: bool = True
    hosts: Sequence[str] = ()


@dataclass(frozen=True)
class Rollback:
    """A rollback as recorded in `incidents.jsonl`.

    Attributes:
        to: step of the checkpoint.
        first: the first step of the trouble, from 0.
        end: the last step of the trouble plus 1.
        why: the reason, in words.
        skip: whether the data of these steps and of the margin are left out from then on.
        margin: width of the margin, in steps.
        hosts: hosts whose hardware is suspect.
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
    """Add a line to `incidents.jsonl`; it is on the disk on return.

    Raises:
        CheckpointError: the file cannot be written.
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
    """Add a line on which nothing depends; ignore a disk that cannot be written."""
    with suppress(CheckpointError):
        append_incident(directory, kind, facts)


def read_rollbacks(directory: Path) -> list[Rollback]:
    """The rollbacks of a run, oldest first.

    Raises:
        CheckpointError: the line of a rollback lacks a key.
    """
    path, fields = RunFiles(directory).incidents, Rollback.__dataclass_fields__
    found = [line for line in read_lines(path, "kind") if line["kind"] == ROLLBACK]
    for line in found:
        if missing := [name for name in fields if name not in {*line, "hosts"}]:
            raise CheckpointError(f"{path}: a rollback without {', '.join(missing)}: {json.dumps(line)}")
    return [Rollback(**{name: line[name] for name in fields.keys() & line.keys()}) for line in found]
