"""The chunked loss at a vocabulary of 128k beside head + `F.cross_entropy`: time and peak memory of a step.

Issue 2, done-when 6: peak at most 1/6, time at most 1.1 x. A step is forward and backward. Times: both
sides in turns in one process, median. Peak: of each side in a fresh process, the greatest resident
memory during the step minus that before it; hidden states, weight and their gradients (which both sides
must make) are there before and count for neither.

Run: python benchmarks/loss.py [--threads 2] [--rounds 3]
"""

import argparse
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from forge_model import LossConfig
from report import table, write
from torch import Tensor

TOKENS, DIM, VOCABULARY = 4096, 512, 131072

LossOf = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Head, then PyTorch's cross entropy."""
    return F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Ours, as it is by default."""
    return LossConfig().build()(hidden, weight, labels).total


SIDES: dict[str, LossOf] = {"F.cross_entropy": plain, "chunked": chunked}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [n, D], weight [V, D], labels [n]; the gradients exist."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, DIM).requires_grad_()
    weight = (torch.randn(VOCABULARY, DIM) * 0.02).requires_grad_()
    for leaf in (hidden, weight):
        leaf.grad = torch.zeros_like(leaf)
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,))


def step(loss_of: LossOf, data: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Forward and backward; gradients are added up."""
    loss = loss_of(*data)
    loss.backward()
    return loss.detach()


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def peak_bytes(name: str, threads: int) -> int:
    """Greatest resident memory during one step over that before it; for a fresh process."""
    torch.set_num_threads(threads)
    data = inputs()
    small = torch.randn(64, 64, requires_grad=True)
    (small @ small).sum().backward()
    before, seen, stop = resident_bytes(), [0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen[0] = max(seen[0], resident_bytes())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    step(SIDES[name], data)
    stop.set()
    watcher.join()
    return seen[0] - before


def times(rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each side, taken in turns; the two losses are compared first."""
    data = inputs()
    values = {name: step(side, data) for name, side in SIDES.items()}
    torch.testing.assert_close(values["chunked"], values["F.cross_entropy"])
    taken: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(rounds):
        for name, side in SIDES.items():
            start = time.perf_counter()
            step(side, data)
            taken[name].append(time.perf_counter() - start)
    return taken


def main() -> None:
    """Measure both sides and record them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh, max_tasks_per_child=1) as pool:
        peaks = {name: pool.submit(peak_bytes, name, options.threads).result() for name in SIDES}
    seconds = {name: statistics.median(taken) for name, taken in times(options.rounds).items()}
    rows = [
        {
            "loss": name,
            "step_s": seconds[name],
            "peak_mb": peaks[name] / 1e6,
            "time_ratio": seconds[name] / seconds["F.cross_entropy"],
            "peak_ratio": peaks[name] / peaks["F.cross_entropy"],
        }
        for name in SIDES
    ]
    print(table(rows))
    sizes = {"tokens": TOKENS, "dim": DIM, "vocabulary": VOCABULARY}
    write("loss", {**sizes, "threads": options.threads, "rounds": options.rounds, "losses": rows})


if __name__ == "__main__":
    main()
