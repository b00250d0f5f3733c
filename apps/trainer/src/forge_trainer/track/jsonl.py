"""Writes records to `metrics.jsonl`, one JSON object in each line."""

import json
import logging
import math
import os
import time
from pathlib import Path

from forge_trainer.run_dir.files import parse_line
from forge_trainer.track.base import Record

log = logging.getLogger(__name__)


class Jsonl:
    """A tracker that appends to a file, and adds to each record the `time` in seconds since 1970.

    On opening, records after the step from which the run resumes are dropped, and damaged lines are moved to
    `metrics.jsonl.damaged`. A record that cannot be written leaves no partial line behind.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        _keep_until(path, first_step)
        self._file = path.open("ab", buffering=0)
        self._size = self._file.tell()

    def log(self, record: Record) -> None:
        """See `Tracker.log`. Numbers that JSON does not have (NaN, infinity) become null.

        Raises:
            OSError: the record cannot be written.
        """
        finite = {name: value if math.isfinite(value) else None for name, value in record.items()}
        line = json.dumps(finite | {"time": round(time.time(), 3)}).encode() + b"\n"
        try:
            if self._file.write(line) != len(line):
                raise OSError(f"only part of a record fits into {self._file.name}")
        except OSError:
            os.ftruncate(self._file.fileno(), self._size)
            raise
        self._size += len(line)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._file.close()


def _keep_until(path: Path, last_step: int) -> None:
    """Drop records after `last_step`, and move damaged lines to another file."""
    if not path.exists():
        return
    damaged: list[bytes] = []
    partial = path.with_suffix(".tmp")
    with path.open("rb") as lines, partial.open("wb") as kept:
        for line in lines:
            step = step_of(line)
            if step is None:
                damaged.append(line)
            elif step <= last_step:
                kept.write(line)
    if damaged:
        aside = path.with_suffix(".jsonl.damaged")
        with aside.open("ab") as file:
            file.writelines(line.rstrip(b"\n") + b"\n" for line in damaged)
        log.warning("%d damaged lines of %s were moved to %s", len(damaged), path, aside.name)
    partial.replace(path)


def step_of(line: bytes) -> int | None:
    """Return the step of a record; None if the line is damaged or incomplete."""
    entry = parse_line(line)
    step = entry.get("step") if entry is not None else None
    return step if isinstance(step, int) else None
