"""Training steps of dense decoders on one GPU: tokens/s, MFU in both conventions, HFU, memory.

Each setting runs in a process of its own: a real step of `forge train` (forward, chunked loss, backward,
gradient norm, clipping, AdamW, the skip of steps that are not finite) on random tokens on the device. `mfu`
counts the pairs of tokens that causal attention sees, `mfu_full_attention` all of them; both leave the input
embedding out. `hfu` adds matmuls and attention that are computed twice. All are over the peak in bfloat16,
for 8-bit matmuls too.

Run on a GPU: python benchmarks/gpu/mfu.py [--models 1b 3b 8b] [--sweeps base recompute ...] [--out FILE]
On a CPU, to see that it works: python benchmarks/gpu/mfu.py --tiny
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cases import SWEEPS, Case, cases
from report import ROOT, commit, table, write

COLUMNS = ("model", "micro_batch", "recompute", "compile", "fp8", "state", "documents")
GIB = 1 << 30
PAGE, BEGIN, END = ROOT / "docs" / "speed.md", "<!-- table of mfu.py -->", "<!-- end of it -->"
LATE, MEMORY = "not run: no time left", "out of memory"
RESERVED_GIB = 1.5
"""Of the memory of a GPU, what CUDA, cuBLAS and NCCL take for themselves."""
LEAST_S = 5
"""No case is started with less time."""


def measure(case: Case, steps: int, warmup: int) -> dict[str, float | str | None]:
    """Train a model in this process; seconds are medians of steps, by device events where there is a GPU."""
    import torch
    from forge_model import LossConfig
    from forge_parallel import Env, MeshConfig, Plan, build_mesh, parallelize, process_group
    from forge_parallel.apply import materialize
    from forge_trainer.optim import AdamWConfig, trainable
    from forge_trainer.steps.text import TextStep
    from forge_trainer.steps.update import Update

    env = Env.detect()
    parallel = case.parallel(env.device.type)
    with process_group(env, needed=parallel.needs_group(env.device.type)):
        mesh = build_mesh(MeshConfig(), env)
        with torch.device("meta"):
            model = case.config.build()
        case.prepare(model)
        parallelize(model, mesh, Plan.of(model), parallel)
        draw(materialize(model, mesh.device))
        moments = "bfloat16" if case.state == "moments-bf16" else "float32"
        optimizer = AdamWConfig(lr=1e-4, betas=(0.9, 0.95), moments=moments).build(trainable([model]), mesh)
        update = Update([model], optimizer, lambda step: 1.0, 1.0, mesh)
        loss = LossConfig().build()
        if parallel.compile.enabled:
            loss.compile_chunks(parallel.compile.backend)
        step = TextStep([model], loss, mesh, update=update)
        batch = [batch_of(case, mesh.device)]
        start = time.perf_counter()
        for index in range(warmup):
            step.train(batch, index)
        first = step.train(batch, warmup).loss.item()
        warm_s = time.perf_counter() - start
        seconds = [_timed(lambda: step.train(batch, warmup + 1), mesh.device) for _ in range(steps)]
        last = step.train(batch, warmup + 2).loss.item()
    if not last < first:
        raise SystemExit(f"the loss on one batch did not fall: {first} -> {last}")
    return _figures(case, statistics.median(seconds), mesh.device) | {
        "warmup_s": warm_s,
        "loss": last,
        "spread": (max(seconds) - min(seconds)) / statistics.median(seconds),
    }


def draw(model: Any) -> None:
    """Weights drawn on the device, which takes no time; a run draws them on the CPU, alike for any layout."""
    import torch
    from forge_parallel.tensor import local_part

    with torch.no_grad():
        for parameter in model.parameters():
            value = local_part(parameter)
            value.fill_(1.0) if parameter.ndim == 1 else value.normal_(std=0.02)
        for buffer in model.buffers():
            local_part(buffer).zero_()


def batch_of(case: Case, device: Any) -> Any:
    """One micro-batch on the device, its count of targets on the host, as the loader gives it."""
    import torch
    from forge_data.loading.loader import MicroBatch

    generator = torch.Generator().manual_seed(0)
    vocab, shape = case.config.vocab_size, (case.micro_batch, case.tokens)
    rows = torch.randint(vocab, (shape[0], shape[1] + 1), generator=generator)
    inputs = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
    if case.documents:
        starts = torch.rand(shape, generator=generator) < 1 / case.documents
        starts[:, 0] = True
        place = torch.arange(case.tokens).expand(shape)
        inputs |= {
            "doc_ids": starts.cumsum(1),
            "positions": place - torch.where(starts, place, 0).cummax(1).values,
        }
    on_device = {name: value.contiguous().to(device) for name, value in inputs.items()}
    return MicroBatch(on_device, {"targets": torch.tensor(case.micro_batch * case.tokens)})


def _timed(step: Any, device: Any) -> float:
    """Seconds of one step."""
    import torch

    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _figures(case: Case, step_s: float, device: Any) -> dict[str, float | str | None]:
    import torch
    from forge_trainer.hooks.figures import PEAK_TFLOPS

    rate = case.micro_batch * case.tokens / step_s
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = PEAK_TFLOPS.get(name)
    flops, repeated = case.config.flops_per_token(case.tokens), case.recomputed()
    every = case.config.flops_per_token(case.tokens, causal=False)
    return {
        "device": name,
        "torch": str(torch.__version__),
        "step_s": step_s,
        "tokens_per_s": rate,
        "model_tflops": rate * flops / 1e12,
        "mfu": rate * flops / 1e12 / peak if peak else None,
        "mfu_full_attention": rate * every / 1e12 / peak if peak else None,
        "hfu": rate * (flops + repeated) / 1e12 / peak if peak and repeated is not None else None,
        "memory_gib": torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None,
    }


def run(case: Case, steps: int, warmup: int, limit_s: float) -> dict[str, Any]:
    """Measure in a process of its own; what went wrong is part of the result."""
    needed, room = case.needed_gib, memory_gib()
    if needed is not None and room is not None and needed > room - RESERVED_GIB:
        return refused(case, f"{MEMORY}: needs {needed:.0f} GiB of {room:.0f}, not started")
    line = [sys.executable, sys.argv[0], "--case", json.dumps(msgspec.to_builtins(case))]
    line += ["--steps", str(steps), "--warmup", str(warmup)]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return refused(case, LATE)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        memory = any("OutOfMemoryError" in text for text in said)
        return refused(case, MEMORY if memory else said[-1] if said else "died")
    return refused(case, None) | json.loads(done.stdout.strip().splitlines()[-1])


@cache
def memory_gib() -> float | None:
    """Of the first GPU, or what FORGE_GPU_GIB says; None where there is none."""
    if given := os.environ.get("FORGE_GPU_GIB"):
        return float(given)
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        return float(told.stdout.split()[0]) / 1024
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def refused(case: Case, error: str | None) -> dict[str, Any]:
    """A setting, and why it has no figures."""
    columns = ("tokens", *COLUMNS, *(["routing"] if case.has_experts else []))
    setting = {name: getattr(case, name) for name in columns}
    return setting if error is None else setting | {"error": error}


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the table."""
    short = {name: row[name] for name in (*COLUMNS, "routing") if name in row}
    if "error" in row:
        return short | {"tokens/s": row["error"]}
    share = {name: "-" if row[name] is None else f"{100 * row[name]:.1f}" for name in ("mfu", "hfu")}
    full = row["mfu_full_attention"]
    memory = row["memory_gib"]
    return short | {
        "tokens/s": f"{row['tokens_per_s']:,.0f}",
        "MFU %": share["mfu"],
        "MFU % full attention": "-" if full is None else f"{100 * full:.1f}",
        "HFU %": share["hfu"],
        "GiB": "-" if memory is None else f"{memory:.1f}",
        "step s": f"{row['step_s']:.3f}",
        "warm-up s": f"{row['warmup_s']:.0f}",
    }


def caption(rows: list[dict[str, Any]]) -> str:
    """What a table has to name."""
    found = next((row for row in rows if "device" in row), {})
    words = " ".join(["python", f"benchmarks/gpu/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return f"{found.get('device')}, torch {found.get('torch')}, commit {commit()}, `{words}`"


def of_files(paths: list[Path]) -> str:
    """One table of several files of results, of settings that have figures, and the command of each file."""
    rows, commands = [], []
    for path in paths:
        record = json.loads(path.read_text())
        found = [row for row in record["results"]["cases"] if "error" not in row]
        rows += [{"GPU": row["device"].split()[1], "routing": "-"} | shown(row) for row in found]
        commands.append(
            f"- `{path.name}`: torch {found[0]['torch']}, commit {record['commit']}, `{record['command']}`"
        )
    return "\n".join([table(rows), "", *commands])


def put_into_docs(text: str, page: Path = PAGE) -> None:
    """Replace the table of docs/speed.md."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


class Script(NamedTuple):
    """What a script measures, where the command line does not say.

    Attributes:
        name: of the file of results.
        models: it may measure.
        tiny: that of a test on a CPU.
        sweeps: it begins with.
        text: of the help.
    """

    name: str
    models: tuple[str, ...]
    tiny: str
    sweeps: tuple[str, ...]
    text: str | None


def options(script: Script) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=script.text, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(script.models), choices=script.models)
    parser.add_argument("--sweeps", nargs="+", default=list(script.sweeps), choices=[*SWEEPS, "all"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=540, help="seconds for all; the rest is left out")
    parser.add_argument("--out", type=Path, help="folder of the results; benchmarks/results")
    parser.add_argument(
        "--docs", nargs="+", type=Path, help="only put the table of these results into docs/speed.md"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model, two steps a case, on any device")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    found = parser.parse_args()
    if found.tiny:
        found.models, found.steps, found.warmup = [script.tiny], 2, 1
    if "all" in found.sweeps:
        found.sweeps = list(SWEEPS)
    return found


MFU = Script("mfu", ("1b", "3b", "8b"), "tiny", ("base",), __doc__)


def main(script: Script = MFU) -> None:
    """Measure, print; write after every case, so that a command that is cut off leaves what it has."""
    chosen = options(script)
    if chosen.case:
        case = msgspec.convert(json.loads(chosen.case), Case)
        print(json.dumps(measure(case, chosen.steps, chosen.warmup)))
        return
    if chosen.docs:
        put_into_docs(of_files(chosen.docs))
        return
    end, rows, text = time.monotonic() + chosen.time_limit, [], ""
    for case in cases(chosen.models, chosen.sweeps):
        left = end - time.monotonic()
        rows.append(run(case, chosen.steps, chosen.warmup, left) if left > LEAST_S else refused(case, LATE))
        print(json.dumps(rows[-1]), flush=True)
        name = f"{script.name}_tiny" if chosen.tiny else script.name
        text = f"{caption(rows)}\n\n{table([shown(row) for row in rows])}"
        if chosen.out is not None or any("error" not in row for row in rows):
            path = write(name, {"steps": chosen.steps, "cases": rows}, chosen.out)
            path.with_suffix(".md").write_text(text + "\n")
    print(text)
    if any(not row.get("error", LATE).startswith((LATE, MEMORY)) for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
