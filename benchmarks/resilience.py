"""What all that guards a run costs: the time of a step with all of it on, over that with all of it off.

    python benchmarks/resilience.py [--pairs 6] [--steps 60] [--section.key=value ...]

On: watchdog, repeated steps, spikes, counts read every 10 steps, replicas compared every 100. Off: none of
them; the ledger and what cannot be switched off (signals, agreement, skipping on the device) run in both.
Two runs of the real command train at the same time, each on a core of its own, so that whatever else slows
the machine slows both; the next pair swaps the cores. A step is the mean over the time in which both train,
by the stamps of their records, so that what comes every few steps counts. The bounds around the mean of all
pairs are those of Student's t at 95 %.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report import ROOT, table, write
from scipy.stats import t

CONFIG = ROOT / "configs" / "runs" / "debug.toml"
FIXED = [
    "--train.log_every_steps=1",
    "--eval.every_steps=100000",
    "--checkpoint.every_steps=100000",
]
ON = ["--resilience.spike_deviations=20", "--resilience.spike_window=32"]
OFF = [
    "--resilience.watchdog=false",
    "--resilience.repeat_bad_steps=false",
    "--resilience.check_every_steps=100000",
    "--resilience.compare_copies_every_steps=0",
    "--resilience.compare_speed_every_steps=0",
]
FIRST = 10
TARGET = 1.01


def started(root: Path, core: int, steps: int, keys: list[str]) -> subprocess.Popen[bytes]:
    """A run that trains on one core."""
    command = [sys.executable, "-m", "forge_trainer", "train", str(CONFIG), f"--job.root={root}", *FIXED]
    return subprocess.Popen(
        ["taskset", "--cpu-list", str(core), *command, f"--train.steps={steps}", *keys],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )


def stamps(root: Path) -> list[float]:
    """When each step ended, from the tenth on."""
    lines = (root / "debug" / "metrics.jsonl").read_text().splitlines()
    return [line["time"] for line in map(json.loads, lines) if "loss" in line][FIRST:]


def pair(folder: Path, steps: int, keys: dict[str, list[str]], cores: list[int]) -> dict[str, float]:
    """Mean seconds of a step of each side, while both train."""
    runs = [started(folder / name, core, steps, keys[name]) for name, core in zip(keys, cores, strict=True)]
    for run in runs:
        if run.wait():
            raise SystemExit(f"a run ended with {run.returncode}: {run.args}")
    ended = {name: stamps(folder / name) for name in keys}
    first, last = max(times[0] for times in ended.values()), min(times[-1] for times in ended.values())
    shared = {name: [time for time in times if first <= time <= last] for name, times in ended.items()}
    took = {name: (times[-1] - times[0]) / (len(times) - 1) for name, times in shared.items()}
    return {f"{name} s": seconds for name, seconds in took.items()} | {"ratio": took["on"] / took["off"]}


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    options, more = parser.parse_known_args()
    keys = {"on": [*ON, *more], "off": [*OFF, *more]}
    cores = sorted(os.sched_getaffinity(0))[:2]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(options.pairs):
            rows.append(
                pair(Path(folder) / str(index), options.steps, keys, cores[:: -1 if index % 2 else 1])
            )
    print(table(rows))
    ratios = [row["ratio"] for row in rows]
    mean = statistics.mean(ratios)
    either = float(t.ppf(0.975, len(ratios) - 1)) * statistics.stdev(ratios) / len(ratios) ** 0.5
    print(f"\nmean ratio {mean:.4f}, +- {either:.4f} (target: at most {TARGET})")
    write("resilience", {"pairs": rows, "mean_ratio": mean, "either": either, "target_ratio": TARGET})


if __name__ == "__main__":
    main()
