"""CKA of 12 x 12 layers, 100,000 tokens, d = 256, in one pass: seconds and extra memory on 2 threads.

Issue 3, done-when 5: at most 300 MB beside the data, at most 120 s. The data arrives in float32 batches of
1,000 tokens, as from a capture loop; making it is neither timed nor counted. Run: python
benchmarks/similarity.py
"""

import multiprocessing
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import torch
from forge_interp import Moments, linear_cka
from report import table, write

LAYERS, WIDTH, TOKENS, BATCH, THREADS = 12, 256, 100_000, 1000, 2


def batches(models: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield {layer: [BATCH, WIDTH]} of random walks over depth, so that near layers are alike."""
    random = torch.Generator().manual_seed(0)
    for _ in range(TOKENS // BATCH):
        steps = torch.randn(models, LAYERS, BATCH, WIDTH, generator=random).cumsum(1)
        yield {f"{m}/layers.{i}": steps[m, i] for m in range(models) for i in range(LAYERS)}


def peak_mb() -> float:
    """Peak resident memory of this process so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure(models: int) -> dict[str, float | str]:
    """All pairs of one model's layers, or every layer of one with every layer of the other."""
    torch.set_num_threads(THREADS)
    tiny = Moments.of({"x": torch.randn(64, 8), "y": torch.randn(64, 8)})
    linear_cka(tiny)
    names = list(next(batches(models)))
    for _ in zip(range(3), batches(models), strict=False):
        pass
    before = peak_mb()
    between = (names[:LAYERS], names[LAYERS:]) if models == 2 else None
    moments = Moments(dict.fromkeys(names, WIDTH), between=between)
    wall = cpu = 0.0
    for batch in batches(models):
        start = time.perf_counter(), time.process_time()
        moments.update(batch)
        wall, cpu = wall + time.perf_counter() - start[0], cpu + time.process_time() - start[1]
    start = time.perf_counter(), time.process_time()
    values = linear_cka(moments).values
    wall, cpu = wall + time.perf_counter() - start[0], cpu + time.process_time() - start[1]
    return {
        "case": "one model, all pairs" if models == 1 else "two models",
        "wall_s": round(wall, 1),
        "cpu_s": round(cpu, 1),
        "extra_mb": round(peak_mb() - before, 1),
        "cka_first_last": float(values[0, -1]),
    }


def main() -> None:
    """Measure each case in a fresh process and record both."""
    torch.set_num_threads(THREADS)
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh, max_tasks_per_child=1) as pool:
        rows = [pool.submit(measure, models).result() for models in (1, 2)]
    print(table(rows))
    sizes = {"layers": LAYERS, "width": WIDTH, "tokens": TOKENS, "threads": THREADS}
    write("similarity", {**sizes, "cases": rows})


if __name__ == "__main__":
    main()
