"""Time of a training step on several gloo ranks beside one process, at equal work and equal cores.

One process has all cores as threads; each of N ranks has its part of them. `ratio` is the time of the one
process over that of the ranks, both the medians of turns taken one after the other: 1 would be no overhead.
`communication` is the share of a step in which one rank is in no operator of torch, as its profiler sees it:
collectives and waiting for them, and Python, which alone is the share `in one process`. `products`, `copies`
and `waits` are the seconds of that step in matrix products and attention, in copies, and in collectives and
the spans that FSDP2 names around them; `products of one` and `copies of one` those of the one process.

Run alone on the machine: python benchmarks/parallel_overhead.py [--rounds 3] [--layouts fsdp2 tp2 ...]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import torch
from forge_model import DecoderConfig, LossConfig, initialize
from forge_model.config import GroupedQueryConfig
from forge_parallel import Env, MeshConfig, ParallelConfig, Plan, build_mesh, local_shard, process_group
from forge_parallel.apply import materialize, parallelize
from forge_parallel.config import FSDPConfig
from forge_parallel.runner import build_runner
from forge_parallel.stages import keep_stage, stages_of
from forge_trainer.profile.classes import class_of_operator
from report import table, write

LAYOUTS = {
    "one": (1, {}, ParallelConfig()),
    "fsdp2": (2, {}, ParallelConfig()),
    "fsdp2-after_step": (2, {}, ParallelConfig(fsdp=FSDPConfig(reshard="after_step"))),
    "replicate2": (2, {"dp_replicate": 2}, ParallelConfig()),
    "tp2": (2, {"tp": 2}, ParallelConfig()),
    "cp2": (2, {"cp": 2}, ParallelConfig()),
    "pp2": (2, {"pp": 2}, ParallelConfig()),
    "hsdp2x2": (4, {"dp_replicate": 2}, ParallelConfig()),
}
DIM, LAYERS, TOKENS, BATCH, VOCAB = 512, 4, 512, 4, 8192


def rank(layout: str, steps: int) -> None:
    """One rank: prints the seconds of each step, and the share of communication."""
    env = Env.detect()
    with process_group(env):
        _, sizes, parallel = LAYOUTS[layout]
        mesh = build_mesh(MeshConfig(**sizes), env)
        config = DecoderConfig(
            vocab_size=VOCAB,
            max_tokens=TOKENS,
            dim=DIM,
            num_layers=LAYERS,
            attention=GroupedQueryConfig(num_heads=8, num_kv_heads=8),
        )
        parts = []
        for stage in stages_of(mesh.pipeline.rank, mesh.pipeline.size, parallel.pipeline):
            with torch.device("meta"):
                model = config.build()
            keep_stage(model, Plan.of(model), stage, mesh.pipeline.size, parallel.pipeline)
            parallelize(model, mesh, Plan.of(model), parallel)
            initialize(materialize(model, mesh.device), 0, local_shard)
            parts.append(model)
        runner, loss = build_runner(parts, mesh), LossConfig().build()
        optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], fused=True)
        mine = torch.randint(VOCAB, (BATCH // mesh.batch.size, TOKENS))
        inputs = [{"tokens": rows, "labels": rows, "loss_fn": loss} for rows in mine.chunk(2)]

        def step() -> float:
            start = time.perf_counter()
            runner.backward(inputs, lambda terms: terms.total / (BATCH * TOKENS))
            optimizer.step()
            optimizer.zero_grad()
            return time.perf_counter() - start

        for _ in range(2):
            step()
        seconds = [step() for _ in range(steps)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            whole = step()
        events = profile.key_averages()
        busy = sum(e.self_cpu_time_total for e in events if e.key.startswith("aten::"))
        parts = Counter[str]()
        for event in events:
            named = event.key.startswith("FSDP::")
            parts["communication" if named else class_of_operator((event.key,))] += event.self_cpu_time_total
        said = {
            "seconds": seconds,
            "communication": 1 - busy / 1e6 / whole,
            "products": (parts["matmul"] + parts["attention"]) / 1e6,
            "copies": parts["memory"] / 1e6,
            "waits": parts["communication"] / 1e6,
        }
        if env.rank == 0:
            print(json.dumps(said))


def measure(layout: str, cores: int, steps: int) -> dict:
    """Run a layout in processes of its own."""
    ranks = LAYOUTS[layout][0]
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    line = [*launch, __file__, "--rank", layout, "--steps", str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, cores // ranks))}
    done = subprocess.run(line, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS)[1:], choices=list(LAYOUTS)[1:])
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.steps)
        return
    cores = len(os.sched_getaffinity(0))
    rows = []
    for layout in options.layouts:
        found: dict[str, list[dict]] = {"one": [], layout: []}
        for _ in range(options.rounds):
            for name, taken in found.items():
                taken.append(measure(name, cores, options.steps))

        def middle(name: str, key: str, found: dict[str, list[dict]] = found) -> float:
            return round(statistics.median(np.ravel([each[key] for each in found[name]])), 3)

        one, many = middle("one", "seconds"), middle(layout, "seconds")
        rows.append(
            {
                "layout": layout,
                "one process s": one,
                "ranks s": many,
                "ratio": round(one / many, 3),
                "communication": middle(layout, "communication"),
                "in one process": middle("one", "communication"),
                **{part: middle(layout, part) for part in ("products", "copies", "waits")},
                **{f"{part} of one": middle("one", part) for part in ("products", "copies")},
            }
        )
    print(table(rows))
    shape = {"dim": DIM, "layers": LAYERS, "tokens": TOKENS, "batch": BATCH, "vocabulary": VOCAB}
    write("parallel_overhead", {"cores": cores, "shape": shape, "layouts": rows})


if __name__ == "__main__":
    main()
