"""The health of the GPUs of this host, from NVML through `nvidia-smi`. Imports no torch."""

from __future__ import annotations

import re
import shutil
import subprocess

FIELDS = {
    "ecc.errors.uncorrected.volatile.total": "{} memory errors that ECC could not correct",
    "remapped_rows.pending": "rows of memory wait to be remapped: the GPU needs a reset",
    "remapped_rows.failure": "rows of memory could not be remapped: the GPU must be replaced",
    "clocks_throttle_reasons.hw_slowdown": "slowed down by the hardware (heat or power)",
    "clocks_throttle_reasons.hw_thermal_slowdown": "slowed down by heat",
}
"""What is asked, and what it means if the answer is not one of `FINE`."""

FINE = {"0", "no", "not active", ""}

LIMIT_S = 20.0


def gpu_problems() -> list[str] | None:
    """Return the problems of each GPU of this host; None where there is no `nvidia-smi`.

    Fields that a GPU or its driver does not know are ignored. A driver that does not answer is a problem.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    fields = list(FIELDS)
    while True:
        line = ["nvidia-smi", f"--query-gpu={','.join(['index', *fields])}", "--format=csv,noheader,nounits"]
        try:
            answer = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return [f"nvidia-smi does not answer in {LIMIT_S:.0f} s"]
        if not answer.returncode:
            return [problem for row in answer.stdout.splitlines() for problem in _problems(row, fields)]
        text = (answer.stdout + answer.stderr).strip()
        unknown = re.search(r'Field "(.+?)" is not a valid field', text)
        if unknown is None or unknown[1] not in fields:
            return [
                f"nvidia-smi ended with {answer.returncode}: {text.splitlines()[-1] if text else 'no word'}"
            ]
        fields.remove(unknown[1])


def _problems(row: str, fields: list[str]) -> list[str]:
    index, *values = [value.strip() for value in row.split(",")]
    return [
        f"GPU {index}: {FIELDS[field].format(value)}"
        for field, value in zip(fields, values, strict=False)
        if value.lower() not in FINE and not value.startswith("[")
    ]
