"""One JSON object a line in `metrics.jsonl`, the record of a run that needs nothing to be read."""

import json
import math
from pathlib import Path

from forge_trainer.track.base import Record


class Jsonl:
    """Appends to a file. Lines after the step that a run resumes from are dropped, as is a torn last line."""

    def __init__(self, path: Path, first_step: int) -> None:
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= first_step]
        partial = path.with_suffix(".tmp")
        partial.write_text("".join(kept))
        partial.replace(path)
        self._file = path.open("a", buffering=1)

    def log(self, record: Record) -> None:
        """See `Tracker.log`. Numbers that JSON does not have (NaN, infinity) become null."""
        finite = {name: value if math.isfinite(value) else None for name, value in record.items()}
        self._file.write(json.dumps(finite) + "\n")

    def close(self) -> None:
        """See `Tracker.close`."""
        self._file.close()


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]
