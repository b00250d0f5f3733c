"""Saving and loading a checkpoint beside plain torch.save and torch.load of the same tensors.

    python benchmarks/checkpoint.py [--megabytes 300] [--rounds 5]

Both write to the same disk and fsync. Ours hashes while it writes and verifies every byte while it reads;
torch's does neither. Rounds are interleaved; the median counts.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from forge_ckpt import Snapshot, Store
from report import table, write

TENSORS = 24


def timed(work: Callable[[], object]) -> float:
    """Seconds that work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def torch_save(state: dict[str, torch.Tensor], path: Path) -> None:
    """torch.save, durable."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def torch_load(state: dict[str, torch.Tensor], path: Path) -> None:
    """torch.load into the tensors."""
    for key, value in torch.load(path, weights_only=True).items():
        state[key].copy_(value)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = options.megabytes * 1_000_000 // (TENSORS * 4 * 1024)
    state = {f"w{i}": torch.randn(rows, 1024) for i in range(TENSORS)}
    seconds: dict[str, list[float]] = {"save": [], "torch.save": [], "load": [], "torch.load": []}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        root = Path(folder)
        for step in range(1, options.rounds + 1):
            store = Store(root / f"store{step}")
            seconds["torch.save"].append(timed(lambda: torch_save(state, root / "plain.pt")))
            seconds["save"].append(timed(lambda store=store: store.save(1, Snapshot(state))))
            seconds["torch.load"].append(timed(lambda: torch_load(state, root / "plain.pt")))
            seconds["load"].append(timed(lambda store=store: store.resume(lambda held: state)))
            shutil.rmtree(store.root)
            (root / "plain.pt").unlink()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    lines = [
        {
            "what": name,
            "forge-ckpt s": medians[name],
            "torch s": medians[f"torch.{name}"],
            "ratio": medians[name] / medians[f"torch.{name}"],
        }
        for name in ("save", "load")
    ]
    print(table(lines))
    write("checkpoint", {"megabytes": options.megabytes, "seconds": seconds, "ratios": lines})


if __name__ == "__main__":
    main()
