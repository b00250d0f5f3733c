"""What all that guards a run costs: the time of a step with all of it on, over that with all of it off.

    python benchmarks/resilience.py [--pairs 5] [--steps 60] [--section.key=value ...]

On: watchdog, repeated steps, spikes, counts read every 10 steps, replicas compared every 100. Off: none of
them; the ledger and what cannot be switched off (signals, agreement, skipping on the device) run in both.
Runs of the real command alternate; each is timed by the stamps of its own records, from the tenth step on,
as a mean, so that what comes every few steps counts. Run alone on the machine.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report import ROOT, table, write

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


def step_s(root: Path, steps: int, keys: list[str]) -> float:
    """Mean seconds of a step."""
    command = [sys.executable, "-m", "forge_trainer", "train", str(CONFIG), f"--job.root={root}", *FIXED]
    subprocess.run([*command, f"--train.steps={steps}", *keys], check=True, stdout=subprocess.DEVNULL)
    lines = (root / "debug" / "metrics.jsonl").read_text().splitlines()
    times = [line["time"] for line in map(json.loads, lines) if "loss" in line]
    return (times[-1] - times[FIRST]) / (len(times) - 1 - FIRST)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    options, more = parser.parse_known_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(options.pairs):
            order = [("on", ON), ("off", OFF)][:: -1 if pair % 2 else 1]
            took = {
                name: step_s(Path(folder) / f"{name}-{pair}", options.steps, [*keys, *more])
                for name, keys in order
            }
            rows.append({"on s": took["on"], "off s": took["off"], "ratio": took["on"] / took["off"]})
    print(table(rows))
    ratios = [row["ratio"] for row in rows]
    median = statistics.median(ratios)
    print(f"\nmedian ratio {median:.4f}, {min(ratios):.4f} to {max(ratios):.4f} (target: at most {TARGET})")
    write("resilience", {"pairs": rows, "median_ratio": median, "target_ratio": TARGET})


if __name__ == "__main__":
    main()
