"""The loss of 1B parameters on a GPU: time and memory by tokens of a chunk, and where the time goes.

A step is head, loss and backward pass: 32,768 tokens of width 2,048 in bfloat16, vocabulary 128,256. Beside
it stands the time of its three matrix products alone, of the same chunks. Writes loss_gpu.json.

Run: python benchmarks/gpu/loss.py [--chunks 1024 4096] [--out FOLDER] [--tiny]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from forge_model import LossConfig
from forge_model.loss.cross_entropy import _add_product
from report import table, write
from torch import Tensor

ROUNDS = 5
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if ON_GPU else "cpu")


def seconds(run: Callable[[], Any]) -> float:
    """Median of some runs, each to its end."""
    taken = []
    for index in range(ROUNDS + 2):
        begun = time.perf_counter()
        run()
        if ON_GPU:
            torch.cuda.synchronize()
        if index > 1:
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def parts(hidden: Tensor, weight: Tensor, chunk: int) -> dict[str, float]:
    """Milliseconds of each matrix product of all chunks."""
    h, number = hidden.detach()[:chunk], len(hidden) // chunk
    w, wide = weight.detach(), torch.zeros_like(weight, dtype=torch.float32)
    logits = h @ w.t()
    wide_logits, wide_h = (None, h) if ON_GPU else (torch.empty_like(logits, dtype=torch.float32), h.float())
    found = {
        "logits": seconds(lambda: torch.mm(h, w.t(), out=logits)),
        "d hidden": seconds(lambda: torch.mm(logits, w)),
        "d weight": seconds(lambda: _add_product(wide, logits, h, wide_logits, wide_h)),
        "d weight, not added up": seconds(lambda: torch.mm(logits.t(), h)),
    }
    return {f"ms {name}": round(taken * 1e3 * number, 2) for name, taken in found.items()}


def case(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, compiled: bool) -> dict[str, Any]:
    """One row of the table."""
    torch._dynamo.reset()
    loss = LossConfig(chunk_tokens=chunk).build()
    if compiled:
        loss.compile_chunks("inductor" if ON_GPU else "aot_eager")  # type: ignore[attr-defined]

    def step() -> None:
        hidden.grad = weight.grad = None
        loss(hidden, weight, labels).total.backward()

    step()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if ON_GPU else 0
    took = seconds(step)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if ON_GPU else None
    return {"chunk": chunk, "compiled": compiled, "ms": round(took * 1e3, 1), "GiB": peak} | parts(
        hidden, weight, chunk
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="few tokens, for a CPU")
    chosen = parser.parse_args()
    tokens, dim, vocabulary = (256, 32, 512) if chosen.tiny else (32768, 2048, 128256)
    chunks = [64, 128] if chosen.tiny else chosen.chunks
    torch.manual_seed(0)
    hidden = torch.randn(tokens, dim, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocabulary, dim, device=DEVICE) * 0.02).bfloat16().requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=DEVICE)
    rows = [case(hidden, weight, labels, chunk, True) for chunk in chunks]
    rows.append(case(hidden, weight, labels, chunks[0], False))
    flops = 3 * 2 * tokens * dim * vocabulary
    device = torch.cuda.get_device_name() if ON_GPU else "cpu"
    results = {"device": device, "torch": str(torch.__version__), "tflop": flops / 1e12, "rows": rows}
    write("loss_gpu_tiny" if chosen.tiny else "loss_gpu", results, chosen.out)
    print(table(rows))


if __name__ == "__main__":
    main()
