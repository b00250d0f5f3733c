"""Extraction from a GPT-2 beside plain hooks, nnsight and transformer_lens: CPU time, peak memory, bytes.

    python benchmarks/interp.py [--rounds 5] [--threads 2] [--quick]

Every measurement is a process of its own, forked from a server that has only imported torch and transformers.
One random model, one file of tokens. The tools take turns, round after round; of each the least time counts,
but the largest memory: the peak of the resident set above the one with the model loaded. `extra_mb` is what a
tool needs beyond the forward pass alone. What it stored is compared with what the plain hook saw.

Extraction stops behind the last block, from the second batch on, and so saves the head; "blocks" is a model
that has none.

Issue 3, done-when 2 and 6. --quick is a small model and one round, to see that everything runs: not recorded.
"""

import argparse
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
    "nnsight cache", "transformer_lens run_with_cache", "forge capture", "forge extract folder",
    "forge extract .npz",
)  # fmt: skip
MIDDLE = ("nnsight stop", "transformer_lens run_with_cache", "forge capture", "forge extract folder")
GROWING = (
    "hooks, kept, np.savez",
    "forge extract folder",
    "forge extract .safetensors",
    "forge extract .npz",
)


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


def measure(job: Job) -> dict[str, Any]:
    """Run one job in this process and say what it cost."""
    torch.set_num_threads(job.threads)
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
    if job.case != "memory" and not job.tool.startswith(("forward", "blocks")):
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
        job = Job("memory", "hooks, streamed", shape, tuple(range(shape.layers)), str(folder), self.threads)
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

    def least(self, case: str, tool: str, name: str = "cpu_s") -> float:
        """The least of a tool's measurements, NaN if it is absent."""
        return min(one.get(name, float("nan")) for one in self.found[case, tool])

    def most(self, case: str, tool: str, name: str = "peak_mb") -> float:
        """The largest of a tool's measurements, NaN if it is absent."""
        return max(one.get(name, float("nan")) for one in self.found[case, tool])

    def ratio(self, over: tuple[str, str], under: tuple[str, str]) -> dict[str, float]:
        """CPU time of one tool over another's: of the least times, and the median over the rounds."""
        rounds = zip(self.found[over], self.found[under], strict=False)
        each = [a.get("cpu_s", float("nan")) / b["cpu_s"] for a, b in rounds]
        return {"ratio": self.least(*over) / self.least(*under), "median_of_rounds": statistics.median(each)}

    def line(self, case: str, tool: str) -> dict[str, Any]:
        """A tool's line of the table."""
        absent = self.found[case, tool][0].get("absent")
        if absent:
            return {"sites": case, "tool": tool} | dict.fromkeys(_COLUMNS, "") | {"note": absent}
        return {
            "sites": case,
            "tool": tool,
            "cpu_s": round(self.least(case, tool), 3),
            "over_forward": round(self.ratio((case, tool), ("all", "forward"))["ratio"], 3),
            "wall_s": round(self.least(case, tool, "wall_s"), 3),
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
    """Peak memory at a quarter of a payload and at the whole of it."""
    small, large = shape, replace(shape, batches=4 * shape.batches)
    runner.tokens(large)
    layers = range(shape.layers)
    runner.run("memory", "forward", small, layers)
    forward = runner.most("memory", "forward")
    lines = []
    for tool in GROWING:
        extra = []
        for size in (small, large):
            runner.found.pop(("memory", tool), None)
            runner.run("memory", tool, size, layers)
            extra.append(runner.most("memory", tool) - forward)
        sizes = [size.payload_bytes(shape.layers) / 1e6 for size in (small, large)]
        line: dict[str, Any] = {"tool": tool}
        line |= {f"extra_mb at {size:.0f} MB": round(mb, 1) for size, mb in zip(sizes, extra, strict=True)}
        line["mb a further mb"] = round((extra[1] - extra[0]) / (sizes[1] - sizes[0]), 4)
        lines.append(line)
    return lines


def gates(runner: Runner, memory: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of done-when 2 beside their targets."""
    whole = runner.ratio(("all", "forge extract folder"), ("all", "forward + raw write"))
    blocks = runner.ratio(("all", "forge extract folder"), ("all", "blocks + raw write"))
    middle = runner.ratio(("middle", "forge extract folder"), ("all", "forward"))
    ours = [line for line in memory if line["tool"].startswith("forge")]
    extra = max(value for line in ours for name, value in line.items() if name.startswith("extra_mb"))
    slope = max(line["mb a further mb"] for line in ours)
    lines = [
        ("all sites / (forward + raw write), CPU", *whole.values(), 1.10),
        ("all sites / (blocks without head + raw write), CPU", *blocks.values(), 1.10),
        ("middle site / forward, CPU", *middle.values(), 0.45),
        ("extra peak memory, MB", extra, "", 128),
        ("extra MB a further MB of payload", slope, "", 0.05),
    ]
    names = ("figure", "value", "median_of_rounds", "target")
    return [dict(zip(names, line, strict=True)) | {"met": bool(line[1] <= line[3])} for line in lines]


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
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rounds = options.rounds or (1 if options.quick else 5)
    shape, large = (SMALL, replace(MEMORY, batches=2)) if options.quick else (GPT2_SMALL, MEMORY)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".interp-") as folder:
        runner = Runner(Path(folder), options.threads)
        tools = side_by_side(runner, shape, rounds)
        memory = growth(runner, large)
        runner.pool.shutdown()
    figures = [] if options.quick else gates(runner, memory)
    for part in filter(None, (tools, memory, figures)):
        print(table(part), end="\n\n")
    print(f"{time.perf_counter() - start:.0f} s in all; least CPU time and largest memory of {rounds} rounds")
    if options.quick:
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
