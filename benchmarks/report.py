"""How every benchmark reports: a table for people, one JSON file with what is needed to run it again."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def write(name: str, results: Mapping[str, Any], folder: Path | None = None) -> Path:
    """Write `<folder>/<name>.json`: the results, with commit, hardware, versions and command.

    Args:
        name: of the benchmark.
        results: JSON data.
        folder: absent means `benchmarks/results`.

    Returns:
        The file.
    """
    record = {
        "benchmark": name,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "hardware": hardware(),
        "versions": versions(),
        "results": dict(results),
    }
    path = (folder or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\nwritten to {os.path.relpath(path, ROOT)}")
    return path


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table; the columns are the keys of the first row."""
    if not rows:
        return "(no rows)"
    columns = list(rows[0])
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [" | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, " | ".join("-" * w for w in widths))
    return "\n".join(f"| {line} |" for line in lines)


def commit() -> str:
    """The commit of the working tree, with a + when files differ from it; of a copy, FORGE_COMMIT."""
    if given := os.environ.get("FORGE_COMMIT"):
        return given
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def hardware() -> dict[str, Any]:
    """Processor, its cores, memory, threads that may be used, accelerator."""
    found: dict[str, Any] = {
        "processor": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch_threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            found["accelerator"] = torch.cuda.get_device_name()
    return found


def versions() -> dict[str, str]:
    """Of Python, and of the libraries a benchmark has loaded."""
    loaded = ((name, sys.modules.get(name)) for name in ("torch", "numpy"))
    libraries = {name: str(module.__version__) for name, module in loaded if module is not None}
    return {"python": platform.python_version()} | libraries


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def _cpuinfo(key: str) -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)
