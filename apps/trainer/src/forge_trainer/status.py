"""How far a run has come, from its files alone."""

import argparse
import json
import sys
from pathlib import Path

from forge_ckpt.store import Store

from forge_trainer.run_dir import read_job


def show_status(options: argparse.Namespace) -> None:
    """`forge status`: steps, last numbers, checkpoints, and what the next start will do."""
    directory = Path(options.directory)
    job = read_job(directory)
    records = _records(directory / "metrics.jsonl")
    steps = Store(directory / "checkpoints").steps()
    lines = [
        f"{directory}: {job.train.steps} steps of {job.train.global_batch} x {job.data.max_tokens} tokens"
    ]
    if logged := next((r for r in reversed(records) if "loss" in r), None):
        speed = f"{logged['tokens_per_s']:,.0f} tokens/s" if logged["tokens_per_s"] else ""
        lines.append(f"  last logged   step {logged['step']}, loss {logged['loss']}, {speed}")
    if evaluated := next((r for r in reversed(records) if "eval/loss" in r), None):
        lines.append(f"  validation    step {evaluated['step']}, loss {evaluated['eval/loss']}")
    lines.append(f"  checkpoints   {', '.join(map(str, steps)) or 'none'}")
    if steps and steps[-1] >= job.train.steps:
        lines.append("  complete      starting it again does nothing")
    else:
        lines.append(f"  not complete  the next start begins at step {steps[-1] if steps else 0}")
    sys.stdout.write("\n".join(lines) + "\n")


def _records(path: Path) -> list[dict[str, float]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
