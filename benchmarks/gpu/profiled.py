"""A profiled step of 1B parameters with data of the real loader: where does the time of the device go?

Tells the share of a step in which the device is idle, copies from memory that is not pinned, kernels that are
started, the time in the loss, and the kernels that take longest. Writes profiled.json, and the trace of the
step as profiled_trace.json.

Run: python benchmarks/gpu/profiled.py [--out FOLDER] [--tiny]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import RESULTS, ROOT, table, write

STEPS, LONGEST = 3, 25
TEXT = """
extends = ["{root}/configs/models/{model}.toml", "{root}/configs/data/python-stdlib.toml"]
[job]
name = "profiled"
root = "{folder}"
[data]
max_tokens = {tokens}
mask_documents = false
[train]
steps = 100
global_batch = {rows}
micro_batch = {rows}
[optimizer]
lr = 1e-4
[schedule]
type = "constant"
[compile]
enabled = {compiled}
[resilience]
watchdog = false
"""


def prepared(folder: Path, tiny: bool, stack: ExitStack) -> tuple[Any, Any]:
    """A run, and its batches."""
    from forge_trainer.build import build
    from forge_trainer.config.job import load_job

    values = {"model": "debug", "tokens": 64, "rows": 2, "compiled": "false"}
    if not tiny:
        values = {"model": "llama-1b", "tokens": 4096, "rows": 8, "compiled": "true"}
    config = folder / "profiled.toml"
    config.write_text(TEXT.format(root=ROOT, folder=folder, **values))
    run = build(load_job(config).value, stack)
    loss = run.step.loss_fn

    def marked(*arguments: Any, **options: Any) -> Any:
        import torch

        with torch.profiler.record_function("the loss"):
            return loss(*arguments, **options)

    run.step.loss_fn = marked
    return run, run.data.batches()


def busy_us(events: list[Any]) -> float:
    """Microseconds in which the device does something: the union of the times of its events."""
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    total, until = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def longest(events: list[Any]) -> list[dict[str, Any]]:
    """Of the kernels that take longest in sum: name, milliseconds a step, how often in a step."""
    sums: dict[str, list[float]] = {}
    for event in events:
        sums.setdefault(event.name, []).append(event.time_range.elapsed_us())
    ordered = sorted(sums.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    return [
        {"kernel": name[:120], "ms": round(sum(us) / 1e3 / STEPS, 3), "times": len(us) / STEPS}
        for name, us in ordered
    ]


def main() -> None:
    """Warm up, profile, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a CPU")
    chosen = parser.parse_args()
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run, batches = prepared(Path(folder), chosen.tiny, stack)
        for index in range(STEPS):
            run.step.train(next(batches), index)
        wait()
        with profile(activities=activities) as seen:
            begun = time.perf_counter()
            for index in range(STEPS, 2 * STEPS):
                run.step.train(next(batches), index)
            wait()
            step_s = (time.perf_counter() - begun) / STEPS
    events = list(seen.events() or [])
    of_device = [event for event in events if event.device_type == DeviceType.CUDA]
    # on a GPU the profiler lays a span over all kernels of the loss
    loss_us = [event.time_range.elapsed_us() for event in of_device or events if event.name == "the loss"]
    of_device = [event for event in of_device if event.name != "the loss"]
    found = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": str(torch.__version__),
        "step_s": step_s,
        "idle_share": 1 - busy_us(of_device) / 1e6 / STEPS / step_s if on_gpu else None,
        "pageable_copies": sum("Pageable" in event.name for event in of_device) / STEPS,
        "kernels": sum("LaunchKernel" in event.name for event in events) / STEPS,
        "loss_s": sum(loss_us) / 1e6 / STEPS,
        "longest": longest(of_device),
    }
    name = "profiled_tiny" if chosen.tiny else "profiled"
    write(name, found, chosen.out)
    seen.export_chrome_trace(str((chosen.out or RESULTS) / f"{name}_trace.json"))
    print({key: value for key, value in found.items() if key != "longest"})
    print(table(found["longest"]))


if __name__ == "__main__":
    main()
