"""Extraction from a GPT-2 beside plain hooks, nnsight and transformer_lens: CPU time, peak memory, bytes.

    python benchmarks/interp.py [--rounds 5] [--threads 2] [--quick] [--folder DIR] [--no-record]

Every measurement is a process of its own, forked from a server that has only imported torch and
transformers. One random model, one file of tokens; every tool writes the same float32 rows, and they are
compared with what the plain hook saw. The tools take turns, round after round.

Of the CPU times the median is shown. A ratio is taken within each round, and of these the median; beside it
stands the ratio of the least times, and both must meet a target. Of memory the largest counts: the peak of
the resident set above the one with the model loaded; `extra_mb` is beyond that of the forward pass alone.
Where the allocator keeps freed blocks, peaks of the same work scatter by 80 MB. So growth is measured with an
allocator that returns them, and once more with the usual one.

Extraction reads all weights once, to know them again when it goes on; that counts. It stops behind the last
block, from the second batch on, and so saves the head; "blocks" is a model that has none.

Issue 3, done-when 2 and 6. --quick is a small model and one round, to see that everything runs: not recorded.
"""

import argparse
import ctypes
import math
import multiprocessing
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}

import numpy as np
import torch
from interp_tools import TOOLS, Shape, build, rows
from report import table, write

GPT2_SMALL = Shape(layers=12, width=768, heads=12, vocab=50257, batch=1, context=128, batches=16)
SMALL = Shape(layers=6, width=256, heads=8, vocab=4096, batch=2, context=128, batches=16)
MEMORY = Shape(layers=6, width=256, heads=8, vocab=256, batch=8, context=256, batches=20)

ALL = (
    "forward", "forward + raw write", "blocks + raw write", "hooks, streamed", "hooks, kept, np.savez",
    "nnsight cache", "transformer_lens run_with_cache", "forge capture", "forge extract",
    "forge extract, export .npz",
)  # fmt: skip
MIDDLE = ("nnsight stop", "transformer_lens run_with_cache", "forge capture", "forge extract")
GROWING = (
    "hooks, kept, np.savez",
    "forge extract",
    "forge extract, export .npz",
)


RETURNING = "blocks returned"


@dataclass(frozen=True)
class Job:
    """One process: which tool reads which layers of which model, and where it may write."""

    case: str
    tool: str
    shape: Shape
    layers: tuple[int, ...]
    folder: str
    threads: int

    @property
    def reference(self) -> Path:
        """Where the plain hooks have left the same layers."""
        return Path(self.folder).parent / "reference"


def resident_mb() -> float:
    """Resident memory of this process now, MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def peak_mb() -> float:
    """Peak resident memory of this process, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def forget_peak() -> bool:
    """Let the peak begin at the present memory again (Linux); False where that is not allowed."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def return_freed_blocks() -> None:
    """Have the allocator (glibc) give every block of 64 KiB or more back at once, so that peaks are exact."""
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD


def measure(job: Job) -> dict[str, Any]:
    """Run one job in this process and say what it cost."""
    torch.set_num_threads(job.threads)
    if job.case.endswith(RETURNING):
        return_freed_blocks()
    tokens = torch.from_numpy(np.load(Path(job.folder).parent / f"tokens-{job.shape.vocab}.npy"))
    tokens = tokens[: job.shape.batches * job.shape.batch, : job.shape.context].contiguous()
    model = build(job.shape)
    with torch.no_grad():
        extract = TOOLS[job.tool](model, job.layers)
        exact = forget_peak()
        before = resident_mb() if exact else peak_mb()
        extract([tokens[: job.shape.batch, : job.shape.context // 4]], Path(job.folder) / "warm-up")
        start = time.perf_counter(), time.process_time()
        extract(tokens.split(job.shape.batch), Path(job.folder) / "out")
        wall_s, cpu_s = time.perf_counter() - start[0], time.process_time() - start[1]
    found = {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "peak_mb": peak_mb() - before,
        "peak_reset": exact,
        "written_mb": sum(f.stat().st_size for f in (Path(job.folder) / "out").rglob("*") if f.is_file())
        / 1e6,
    }
    if job.case in ("all", "middle") and not job.tool.startswith(("forward", "blocks")):
        found |= compare(job)
    return found


def compare(job: Job) -> dict[str, Any]:
    """Whether the rows on disk are those of the plain hook; if not, the largest difference."""
    difference = 0.0
    for layer in job.layers:
        stored = rows(Path(job.folder) / "out", layer, job.shape.width)
        expected = rows(job.reference, layer, job.shape.width)
        if stored.shape != expected.shape:
            raise SystemExit(f"{job.tool}: {stored.shape} rows of layer {layer}, expected {expected.shape}")
        difference = max(difference, float(abs(stored - expected).max()))
    return {"max_difference": difference}


class Runner:
    """Runs jobs, each in a fresh process, and keeps what they found.

    Args:
        folder: for tokens, references and what the tools write; each job's part is removed after it.
        threads: that torch may use.
    """

    def __init__(self, folder: Path, threads: int):
        self.folder, self.threads = folder, threads
        self.found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        fresh = multiprocessing.get_context("forkserver")
        fresh.set_forkserver_preload(["torch", "transformers.models.gpt2.modeling_gpt2", "interp_tools"])
        self.pool = ProcessPoolExecutor(1, mp_context=fresh, max_tasks_per_child=1)

    def tokens(self, shape: Shape) -> None:
        """Write the file of tokens for a vocabulary."""
        count = shape.batches * shape.batch
        drawn = np.random.default_rng(0).integers(shape.vocab, size=(count, shape.context))
        np.save(self.folder / f"tokens-{shape.vocab}.npy", drawn)

    def reference(self, shape: Shape) -> None:
        """Let the plain hooks leave every layer for comparison."""
        folder = self.folder / "job"
        job = Job(
            "reference", "hooks, streamed", shape, tuple(range(shape.layers)), str(folder), self.threads
        )
        self.pool.submit(measure, job).result()
        (folder / "out").rename(job.reference)
        shutil.rmtree(folder)

    def run(self, case: str, tool: str, shape: Shape, layers: Sequence[int]) -> None:
        """One more measurement of a tool, or that its library is absent."""
        key = case, tool
        folder = self.folder / "job"
        job = Job(case, tool, shape, tuple(layers), str(folder), self.threads)
        try:
            found = self.pool.submit(measure, job).result()
        except ImportError as error:
            found = {"absent": f"absent: {error}"}
        self.found.setdefault(key, []).append(found)
        print(f"{case}: {tool}", found, file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)

    def each(self, case: str, tool: str, name: str) -> list[float]:
        """One number of a tool in every round, NaN where it is absent."""
        return [one.get(name, math.nan) for one in self.found[case, tool]]

    def most(self, case: str, tool: str, name: str = "peak_mb") -> float:
        """The largest of a tool's measurements, NaN if it is absent."""
        return max(self.each(case, tool, name))

    def ratio(self, over: tuple[str, str], under: tuple[str, str]) -> tuple[float, float]:
        """CPU time of one tool over another's: the median over the rounds, and that of the least times."""
        above, below = self.each(*over, "cpu_s"), self.each(*under, "cpu_s")
        each = [a / b for a, b in zip(above, below, strict=True)]
        return statistics.median(each), min(above) / min(below)

    def line(self, case: str, tool: str) -> dict[str, Any]:
        """A tool's line of the table."""
        absent = self.found[case, tool][0].get("absent")
        if absent:
            return {"sites": case, "tool": tool} | dict.fromkeys(_COLUMNS, "") | {"note": absent}
        return {
            "sites": case,
            "tool": tool,
            "cpu_s": round(statistics.median(self.each(case, tool, "cpu_s")), 3),
            "over_forward": round(self.ratio((case, tool), ("all", "forward"))[0], 3),
            "wall_s": round(statistics.median(self.each(case, tool, "wall_s")), 3),
            "peak_mb": round(self.most(case, tool), 1),
            "extra_mb": round(self.most(case, tool) - self.most("all", "forward"), 1),
            "written_mb": round(self.most(case, tool, "written_mb"), 1),
            "max_difference": self.found[case, tool][0].get("max_difference", ""),
            "note": "",
        }


_COLUMNS = ("cpu_s", "over_forward", "wall_s", "peak_mb", "extra_mb", "written_mb", "max_difference")


def side_by_side(runner: Runner, shape: Shape, rounds: int) -> list[dict[str, Any]]:
    """All block outputs, and the middle block's, by every tool in turn."""
    runner.tokens(shape)
    runner.reference(shape)
    jobs = [("all", tool, range(shape.layers)) for tool in ALL]
    jobs += [("middle", tool, [shape.layers // 2 - 1]) for tool in MIDDLE]
    for turn in range(rounds):
        first = turn * 5 % len(jobs)
        for case, tool, layers in jobs[first:] + jobs[:first]:
            runner.run(case, tool, shape, layers)
    shutil.rmtree(runner.folder / "reference")
    return [runner.line(case, tool) for case, tool, _ in jobs]


def growth(runner: Runner, shape: Shape) -> list[dict[str, Any]]:
    """Peak memory beyond the forward pass, at a quarter of a payload and at the whole of it."""
    whole = replace(shape, batches=4 * shape.batches)
    sizes = {f"quarter, {RETURNING}": shape, f"whole, {RETURNING}": whole, "whole": whole}
    runner.tokens(whole)
    for case, size in sizes.items():
        for tool in ("forward", *GROWING):
            runner.run(case, tool, size, range(shape.layers))
    first, second = (size.payload_bytes(shape.layers) / 1e6 for size in (shape, whole))
    lines = []
    for tool in GROWING:
        low, high, usual = (runner.most(case, tool) - runner.most(case, "forward") for case in sizes)
        extra = {f"extra_mb at {first:.0f} MB": low, f"extra_mb at {second:.0f} MB": high}
        extra |= {f"extra_mb at {second:.0f} MB, usual allocator": usual}
        slope = (high - low) / (second - first)
        rounded = {name: round(mb, 1) for name, mb in extra.items()}
        lines.append({"tool": tool} | rounded | {"mb a further mb": round(slope, 4)})
    return lines


def gates(runner: Runner, memory: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of done-when 2 beside their targets."""
    ours = [line for line in memory if line["tool"].startswith("forge")]
    extra = max(value for line in ours for name, value in line.items() if name.startswith("extra_mb"))
    slope = max(line["mb a further mb"] for line in ours)
    all_sites, forward = ("all", "forge extract"), ("all", "forward")
    lines = [
        (
            "all sites / (forward + raw write), CPU",
            *runner.ratio(all_sites, ("all", "forward + raw write")),
            1.10,
        ),
        (
            "all sites / (blocks without head + raw write), CPU",
            *runner.ratio(all_sites, ("all", "blocks + raw write")),
            1.10,
        ),
        ("middle site / forward, CPU", *runner.ratio(("middle", "forge extract"), forward), 0.45),
        ("extra peak memory, MB", extra, extra, 128),
        ("extra MB a further MB of payload", slope, slope, 0.05),
    ]
    names = ("figure", "value", "of_least", "target")
    return [dict(zip(names, line, strict=True)) | {"met": max(line[1:3]) <= line[3]} for line in lines]


def versions() -> dict[str, str]:
    """Of the libraries that are compared."""
    names = ("transformers", "nnsight", "transformer-lens")
    found = {d.metadata["Name"].lower(): d.version for d in metadata.distributions() if d.metadata["Name"]}
    return {name: found.get(name, "not installed") for name in names}


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a small model, one round, nothing recorded")
    parser.add_argument(
        "--folder", type=Path, help="where 2 GB are free for a while; default: that of the system"
    )
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rounds = options.rounds or (1 if options.quick else 5)
    shape, large = (SMALL, replace(MEMORY, batches=2)) if options.quick else (GPT2_SMALL, MEMORY)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="interp-") as folder:
        runner = Runner(Path(folder), options.threads)
        tools = side_by_side(runner, shape, rounds)
        memory = growth(runner, large)
        runner.pool.shutdown()
    figures = [] if options.quick else gates(runner, memory)
    for part in filter(None, (tools, memory, figures)):
        print(table(part), end="\n\n")
    print(f"{time.perf_counter() - start:.0f} s in all, {rounds} rounds")
    if options.quick or options.no_record:
        return
    shapes = {"side_by_side": asdict(shape), "memory": asdict(large)}
    every = {" / ".join(key): value for key, value in runner.found.items()}
    write(
        "interp",
        {
            "rounds": rounds,
            "threads": options.threads,
            "compared": versions(),
            "shapes": shapes,
            "tools": tools,
            "memory": memory,
            "figures": figures,
            "measurements": every,
        },
    )


if __name__ == "__main__":
    main()
