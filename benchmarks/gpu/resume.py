"""A run that is killed and continued on this device, beside one that is left alone: are their losses equal?

Both take deterministic kernels (`job.deterministic`). Writes resume.json.

Run: python benchmarks/gpu/resume.py [--steps 40] [--out FOLDER] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import ROOT, write


def command(root: Path, steps: int, tiny: bool) -> list[str]:
    """The run of a newcomer, shortened."""
    flags = [
        f'--job.root="{root}"',
        "--job.deterministic=true",
        f"--train.steps={steps}",
        "--eval.every_steps=0",
    ]
    flags += ["--checkpoint.every_steps=5", "--train.log_every_steps=1", "--schedule.warmup_steps=2"]
    sizes = ["--data.max_tokens=64", "--train.global_batch=4", "--train.micro_batch=4"]
    flags += sizes if tiny else ["--data.max_tokens=256"]
    return [sys.executable, "-m", "forge_trainer", "train", str(ROOT / "configs/runs/debug.toml"), *flags]


def losses(root: Path) -> dict[int, float]:
    """Of each step; of one that was taken twice the last."""
    path = root / "debug" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def killed(line: list[str], root: Path, after: int, limit_s: float) -> None:
    """Start a run, and kill it once it has taken some steps."""
    process = subprocess.Popen(line, stdout=sys.stderr, start_new_session=True)
    end = time.monotonic() + limit_s
    while process.poll() is None and max(losses(root), default=0) < after and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    """Run, kill, continue, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="short sequences and few of them, for a CPU")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole, cut = Path(folder) / "whole", Path(folder) / "cut"
        subprocess.run(command(whole, chosen.steps, chosen.tiny), check=True, stdout=sys.stderr)
        line = command(cut, chosen.steps, chosen.tiny)
        killed(line, cut, chosen.steps // 2, 240)
        at = max(losses(cut), default=0)
        subprocess.run(line, check=True, stdout=sys.stderr)
        first, second = losses(whole), losses(cut)
    differ = {step: [first[step], second.get(step)] for step in first if first[step] != second.get(step)}
    import torch  # so that the record names the device

    assert chosen.tiny or torch.cuda.is_available(), "without a GPU: --tiny"
    found = {"steps": chosen.steps, "killed_at": at, "differ": differ, "last_loss": first[chosen.steps]}
    write("resume_tiny" if chosen.tiny else "resume", found, chosen.out)
    print(json.dumps(found))
    if differ or not 0 < at < chosen.steps:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
