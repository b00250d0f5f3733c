"""Saving and loading a model with Adam beside torch.save, safetensors and torch's DCP: time, stall, memory.

    python benchmarks/checkpoint.py [--megabytes 300] [--rounds 7] [--folder F] [--quick]

Issue 11, done-when 3. All write the same tensors to the same folder and fsync; all take turns, round after
round, in another order each time. Ours takes digests while it writes and verifies every byte while it reads;
"without digests" is ours with a digest that costs nothing. Seconds are medians, ratios the medians of those
within rounds. `stall` is what training waits for: the whole save, or until the call returns. Memory is the
peak of the resident set of a process of its own above what it was before, over the bytes of the state; that
of DCP and torch is shown for comparison. Run alone on the machine; --quick records nothing.
"""

import argparse
import ctypes
import gc
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp_module
from forge_ckpt import Saver, Store, TrainState, shards
from report import table, write
from safetensors.torch import load_file, save_file
from torch import nn

dcp: Any = dcp_module
LAYERS, WIDTH = 8, 1024
SAVES = ("forge", "forge async", "forge without digests", "torch.save", "safetensors", "DCP", "DCP async")
LOADS = ("forge", "torch.save", "safetensors", "DCP")
TARGETS = {
    "stall of async over sync": 0.10,
    "cost of digests": 0.05,
    "memory of load": 1.2,
    "memory of async save": 1.05,
}


class NoDigest:
    """Takes the place of a hash function and does nothing."""

    def update(self, data: object) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""

    def digest(self) -> bytes:
        """Always the same."""
        return bytes(16)


class State:
    """What a run holds: weights in float32, and two moments of each, of about so many bytes.

    Attributes:
        train: the same as `forge train` saves it.
        tensors: by name, all that a save writes.
    """

    def __init__(self, megabytes: int) -> None:
        rows = max(1, megabytes * 1_000_000 // (3 * LAYERS * WIDTH * 4))
        model = nn.Sequential(*(nn.Linear(WIDTH, rows, bias=False) for _ in range(LAYERS)))
        optimizer = torch.optim.AdamW(model.parameters())
        self.train = TrainState([model], optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        tensors: Any = self.train.capture(copy=False).tensors
        self.tensors = {key: tensor.detach() for key, tensor in tensors.items()}
        self.bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self._savers: dict[Path, Saver] = {}
        self.seconds = 0.0

    def save(self, how: str, folder: Path) -> float:
        """Save into a folder that is not there yet, in one of `SAVES`; returns the seconds that it stalls.

        `seconds` are those until all of it is on the disk.
        """
        start = time.perf_counter()
        wait = self._begin(how, folder)
        stall = time.perf_counter() - start
        wait()
        self.seconds = time.perf_counter() - start
        return stall

    def _begin(self, how: str, folder: Path) -> Callable[[], object]:
        if how.startswith("forge"):
            saver = self._saver(folder, how == "forge async")
            step = int(folder.name)
            if how == "forge without digests":
                with patch.object(shards, "xxhash", SimpleNamespace(xxh3_128=NoDigest)):
                    saver.save(step, {})
            else:
                saver.save(step, {})
            return saver.finish
        if how == "DCP async":
            saved: Any = dcp.async_save(dict(self.tensors), checkpoint_id=folder)
            return saved.result
        if how == "DCP":
            dcp.save(dict(self.tensors), checkpoint_id=folder)
            return int
        folder.mkdir(parents=True)
        if how == "torch.save":
            torch.save(self.tensors, folder / "plain")
        else:
            save_file(self.tensors, folder / "plain")
        with (folder / "plain").open("rb") as file:
            os.fsync(file.fileno())
        return int

    def _saver(self, folder: Path, asynchronous: bool) -> Saver:
        """One for each place, as a run has: memory for copies is used again."""
        if folder.parent not in self._savers:
            store = Store(folder.parent, keep=1)
            self._savers[folder.parent] = Saver(store, self.train, asynchronous)
        return self._savers[folder.parent]

    def load(self, how: str, folder: Path) -> None:
        """Load in place what was saved, in one of `LOADS`."""
        if how == "forge":
            Store(folder.parent).resume(lambda held: self.tensors)
        elif how == "DCP":
            dcp.load(self.tensors, checkpoint_id=folder)
        else:
            file = folder / "plain"
            read = torch.load(file, weights_only=True) if how == "torch.save" else load_file(file)
            for key, value in read.items():
                self.tensors[key].copy_(value)


def timed(work: Callable[[], object]) -> float:
    """Seconds that work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(state: State, root: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of all rounds, by `stall`, `save` and `load` and by name; the first round is not counted."""
    found = {
        kind: {name: [] for name in names}
        for kind, names in zip(("stall", "save"), (SAVES, SAVES), strict=True)
    }
    found["load"] = {name: [] for name in LOADS}
    chooser = random.Random(0)
    for step in range(rounds + 1):
        for how in chooser.sample(SAVES, len(SAVES)):
            place = root / how.replace(" ", "-")
            stall = state.save(how, place / str(step))
            if step:
                found["stall"][how].append(stall)
                found["save"][how].append(state.seconds)
        for how in chooser.sample(LOADS, len(LOADS)):
            seconds = timed(lambda how=how, step=step: state.load(how, root / how / str(step)))
            if step:
                found["load"][how].append(seconds)
        for how in SAVES:
            if not how.startswith("forge"):
                shutil.rmtree(root / how.replace(" ", "-") / str(step))
    return found


def peak_of(what: str, how: str, megabytes: int, folder: Path) -> float:
    """Peak of memory beyond the state, over its bytes, in a process of its own."""
    command = [sys.executable, __file__, "--megabytes", str(megabytes), "--folder", str(folder)]
    run = subprocess.run(
        [*command, "--peak", what, how], stdout=subprocess.PIPE, text=True, check=True, timeout=600
    )
    return float(run.stdout)


def print_peak(what: str, how: str, state: State, root: Path) -> None:
    """Of the first save or load of this process, as `peak_of` reads it."""
    place = root / "peak"
    if what == "load":
        state.save(how, place / "1")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    if what == "load":
        state.load(how, place / "1")
    else:
        state.save(how, place / "1")
    print((_status("VmHWM") - before) / state.bytes)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def ratio(over: list[float], under: list[float]) -> float:
    """The median of the ratios within rounds."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="files are written below it")
    parser.add_argument("--quick", action="store_true", help="little and once, to see that it runs")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.quick:
        options.megabytes, options.rounds = 20, 1
    state = State(options.megabytes)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder)
        dist.init_process_group("gloo", init_method=f"file://{root}/meeting", rank=0, world_size=1)
        if options.peak:
            print_peak(options.peak[0], options.peak[1], state, root)
        else:
            report(state, root, options)
        dist.destroy_process_group()


def report(state: State, root: Path, options: argparse.Namespace) -> None:
    """Print the tables, and write the figures down."""
    seconds = measure(state, root, options.rounds)
    peaks = {
        what: {how: peak_of(what, how, options.megabytes, root) for how in names if "without" not in how}
        for what, names in (("save", SAVES), ("load", LOADS))
    }
    stall, save, load = seconds["stall"], seconds["save"], seconds["load"]
    gigabytes = state.bytes / 1e9
    rows = [
        {
            "what": how,
            "stall s": statistics.median(stall[how]),
            "save s": statistics.median(save[how]),
            "save GB/s": gigabytes / statistics.median(save[how]),
            "load GB/s": gigabytes / statistics.median(load[how]) if how in load else "",
            "memory of save": peaks["save"].get(how, ""),
            "memory of load": peaks["load"].get(how, ""),
        }
        for how in SAVES
    ]
    ratios = {
        "stall of async over sync": ratio(stall["forge async"], save["forge"]),
        "stall of DCP async over sync": ratio(stall["DCP async"], save["DCP"]),
        "cost of digests": ratio(save["forge"], save["forge without digests"]) - 1,
        "memory of load": peaks["load"]["forge"],
        "memory of async save": peaks["save"]["forge async"],
        **{f"save over {how}": ratio(save["forge"], save[how]) for how in LOADS[1:]},
        **{f"load over {how}": ratio(load["forge"], load[how]) for how in LOADS[1:]},
    }
    print(table(rows))
    print(
        table(
            [
                {"ratio": name, "value": value, "asked": TARGETS.get(name, "")}
                for name, value in ratios.items()
            ]
        )
    )
    if not options.quick:
        results = {"gigabytes": gigabytes, "seconds": seconds, "peaks": peaks, "ratios": ratios}
        write("checkpoint", results)


if __name__ == "__main__":
    main()
