"""From the command to the end of the first step of the debug run, beyond what `import torch` takes.

    python benchmarks/startup.py [--rounds 5]

Rounds alternate between a process that only imports torch and the real command, timed until the first
record is in `metrics.jsonl`. The text is tokenized already (it is once, at the first run ever).
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import ROOT, table, write

CONFIG = ROOT / "configs" / "runs" / "debug.toml"


def import_torch() -> float:
    """Seconds of a process that imports torch."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - start


def first_step(root: Path) -> float:
    """Seconds from the command to the first record."""
    command = [sys.executable, "-m", "forge_trainer", "train", str(CONFIG), f"--job.root={root}"]
    start = time.perf_counter()
    process = subprocess.Popen([*command, "--train.log_every_steps=1"], stdout=subprocess.DEVNULL)
    metrics = root / "debug" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        if process.poll() is not None:
            raise SystemExit(f"the run ended with {process.returncode} before its first step")
        time.sleep(0.002)
    seconds = time.perf_counter() - start
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return seconds


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        first_step(Path(folder) / "warm")
        for index in range(rounds):
            torch_s = import_torch()
            whole_s = first_step(Path(folder) / str(index))
            rows.append(
                {"import torch s": torch_s, "to first step s": whole_s, "beyond s": whole_s - torch_s}
            )
    print(table(rows))
    beyond = statistics.median(row["beyond s"] for row in rows)
    print(f"\nmedian beyond import torch: {beyond:.2f} s (target: at most 2 s)")
    write("startup", {"rounds": rows, "median_beyond_s": beyond, "target_s": 2.0})


if __name__ == "__main__":
    main()
