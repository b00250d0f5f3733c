"""How many tokens Muon needs for the loss that AdamW ends at, both with the best learning rate of a sweep.

Issue 13, done-when 5. Every side trains `configs/sweeps/<side>.toml`, a small version of the debug run, once
for each learning rate and seed, by `forge train` on one thread; runs of one seed read the same text in the
same order and start from the same weights. The best learning rate of a side has the lowest loss on held-out
text at the end, averaged over seeds. Curves show the training loss of it, on text that is read once, averaged
over seeds and the last 24 steps. Tokens are counted up to the first step at which the curve of Muon stays
below the end of that of AdamW. A best value at the edge of its grid is marked: the sweep is to be widened.

Runs that are complete in --root are not done again, so that a sweep can be stopped and continued.

Run: python benchmarks/muon_tokens.py [--root runs/sweep] [--jobs 2] [--quick]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean

from report import ROOT, table, write

GRIDS = {"adamw": (7.5e-4, 1.5e-3, 3e-3, 6e-3), "muon": (3e-3, 6e-3, 1.2e-2, 2.4e-2)}
SEEDS = (0, 1)
WINDOW = 24
"""Steps that a point of a curve is averaged over."""
PICTURE = ROOT / "docs" / "muon_tokens.svg"


def run_of(root: Path, side: str, lr: float, seed: int) -> Path:
    """The folder of a run."""
    return root / f"{side}-{lr:g}-{seed}"


def train(root: Path, flags: Sequence[str], side: str, lr: float, seed: int) -> None:
    """One run, unless it is there."""
    folder = run_of(root, side, lr, seed)
    if (folder / "metrics.jsonl").exists() and held_out(folder) is not None:
        return
    config = ROOT / "configs" / "sweeps" / f"{side}.toml"
    command = [sys.executable, "-m", "forge_trainer", "train", str(config), f"--job.root={root}", *flags]
    command += [f"--job.name={folder.name}", f"--optimizer.lr={lr}", f"--job.seed={seed}"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    print(f"{folder.name}: {held_out(folder):.4f}", flush=True)


def records(folder: Path, key: str) -> list[tuple[int, float]]:
    """Tokens and value of every record that has this key."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["tokens"], line[key]) for line in lines if key in line]


def held_out(folder: Path) -> float | None:
    """The last loss on held-out text, in nats a token."""
    found = records(folder, "eval/loss")
    return found[-1][1] if found else None


def best(root: Path, side: str, grid: Sequence[float]) -> tuple[float, dict[float, float]]:
    """The best learning rate, and the loss on held-out text of each."""
    ends = {lr: mean(held_out(run_of(root, side, lr, seed)) or 0.0 for seed in SEEDS) for lr in grid}
    return min(ends, key=ends.__getitem__), ends


def curve(folders: Sequence[Path]) -> list[tuple[int, float]]:
    """Tokens and training loss, averaged over runs and steps."""
    runs = [records(folder, "loss") for folder in folders]
    assert len({tuple(tokens for tokens, _ in run) for run in runs}) == 1, "the runs read as much"
    points = [(step[0][0], mean(loss for _, loss in step)) for step in zip(*runs, strict=True)]
    losses = [loss for _, loss in points]
    return [(points[end - 1][0], mean(losses[end - WINDOW : end])) for end in range(WINDOW, len(points) + 1)]


def tokens_to(points: Sequence[tuple[int, float]], loss: float) -> int | None:
    """Tokens from which on a curve stays at or below a loss; None where it does not."""
    above = [index for index, (_, value) in enumerate(points) if value > loss]
    first = above[-1] + 1 if above else 0
    return points[first][0] if first < len(points) else None


def draw(curves: Mapping[str, list[tuple[int, float]]], reached: int | None) -> None:
    """The picture of the docs."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "forge", "svg.fonttype": "none", "font.size": 9})
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for (side, points), colour in zip(curves.items(), ("#7a7a7a", "#1f5fbf"), strict=True):
        axes.plot(*zip(*points[::4], points[-1], strict=True), color=colour, label=side)
    end = curves["adamw"][-1][1]
    axes.axhline(end, color="#7a7a7a", linewidth=0.8, linestyle=":")
    if reached is not None:
        axes.plot([reached], [end], "o", color="#1f5fbf", markersize=4)
    axes.set(xlabel="tokens", ylabel="training loss, nats a token")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, metadata={"Date": None, "Creator": None})
    PICTURE.write_text("\n".join(line.rstrip() for line in PICTURE.read_text().splitlines()) + "\n")


def summary(root: Path, grids: Mapping[str, Sequence[float]]) -> tuple[dict, dict]:
    """What is recorded, and the curves."""
    rows, curves = [], {}
    for side, grid in grids.items():
        lr, ends = best(root, side, grid)
        curves[side] = curve([run_of(root, side, lr, seed) for seed in SEEDS])
        rows += [
            {"side": side, "lr": one, "held-out loss": end, "best": "" if one != lr else "best"}
            for one, end in ends.items()
        ]
        if len(grid) > 2 and lr in (grid[0], grid[-1]):
            rows[list(ends).index(lr) - len(ends)]["best"] = "best, at the edge"
    total, end = curves["adamw"][-1]
    reached = tokens_to(curves["muon"], end)
    figures = {"tokens": total, "adamw_loss": end, "muon_loss": curves["muon"][-1][1]}
    figures |= {"muon_tokens": reached, "fraction": reached and round(reached / total, 3)}
    return {"seeds": SEEDS, "window_steps": WINDOW, "sweep": rows, **figures}, curves


def main() -> None:
    """Train, read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, help="folder of the runs; a temporary one, if absent")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--quick", action="store_true", help="one rate, and few steps; nothing is recorded")
    options = parser.parse_args()
    grids = {side: grid[1:2] if options.quick else grid for side, grid in GRIDS.items()}
    flags = ["--train.steps=30", "--schedule.warmup_steps=4"] if options.quick else []
    with tempfile.TemporaryDirectory() as temporary:
        root = options.root or Path(temporary)
        with ThreadPoolExecutor(options.jobs) as pool:
            runs = [(side, lr, seed) for side, grid in grids.items() for lr, seed in product(grid, SEEDS)]
            list(pool.map(lambda run: train(root, flags, *run), runs))
        results, curves = summary(root, grids)
    print(table(results["sweep"]))
    print({key: value for key, value in results.items() if key != "sweep"})
    if not options.quick:
        draw(curves, results["muon_tokens"])
        write("muon_tokens", results)


if __name__ == "__main__":
    main()
