"""Tokens a second that the loader prepares on one core, without workers, from the page cache.

Also: how long finding the first samples takes at sample 0 and ten billion samples on, and in how much memory.
Target: at least 100 M tokens/s for plain batches, and 60 M where documents are masked.
"""

import argparse
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from data_tools import beside, tokenizing
from forge_data.config import DataConfig
from forge_data.loading.loader import build_loader
from forge_data.order.order import Order
from forge_data.sources.config import TokensConfig
from forge_data.store.tokens import TokenStore, Writer
from report import table, write


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000_000, help="in each of two stores")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="for each line, five times; the best counts"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = [make_store(Path(folder) / name, options.tokens) for name in "ab"]
        rows = [
            throughput(paths[:sources], max_tokens, masked, packing, options.seconds)
            for sources, max_tokens, masked, packing in (
                (1, 4096, False, "concat"),
                (1, 1024, False, "concat"),
                (1, 256, False, "concat"),
                (2, 4096, False, "concat"),
                (2, 256, False, "concat"),
                (1, 4096, True, "concat"),
                (1, 1024, True, "concat"),
                (1, 4096, True, "bestfit"),
                (1, 1024, True, "bestfit"),
            )
        ]
        others = [
            row
            for max_tokens in (4096, 1024)
            for row in beside(TokenStore(paths[0]), Path(folder), max_tokens, options.seconds)
        ]
        tokenized = tokenizing(Path(folder))
    print(table(rows))
    print("\nOthers, plain batches:\n" + table(others))
    print("\n" + table(tokenized))
    starts = [start_at(first) for first in (0, 10**10)]
    print("\n" + table(starts))
    results = {"throughput": rows, "others": others, "tokenize": tokenized}
    write("data_loader", results | {"start of a mixture of 1e10 and 3e9 samples": starts})


def make_store(path: Path, num_tokens: int) -> str:
    """A store of random ids below 50,000 in documents of 1000; just written, it lies in the page cache."""
    draw = np.random.default_rng(0)
    with Writer(path, 50_000, "bytes-256") as writer:
        for _ in range(num_tokens // 10_000_000):
            writer.add(draw.integers(0, 50_000, 10_000_000), [1000] * 10_000)
    return str(path)


def throughput(
    paths: list[str], max_tokens: int, masked: bool, packing: Literal["concat", "bestfit"], seconds: float
) -> dict[str, Any]:
    """Shuffled batches, read, converted to int64, with labels.

    First epoch: all of it, each block being checked when it is first touched. Steady state: the best of five
    runs of `seconds` each after it.
    """
    sources = [TokensConfig(path=path) for path in paths]
    cache, micro_batch = str(Path(paths[0]).parent / "cache"), 8
    config = DataConfig(
        max_tokens=max_tokens, sources=sources, mask_documents=masked, packing=packing, cache_dir=cache
    )
    batches = iter(build_loader(config, "train", micro_batch=micro_batch, global_batch=micro_batch))
    begin = time.perf_counter()
    epoch = -(-sum(len(TokenStore(path)) for path in paths) // (micro_batch * max_tokens))
    for _ in range(epoch):
        next(batches)
    first = epoch * micro_batch * max_tokens / (time.perf_counter() - begin)
    rates = []
    for _ in range(5):
        start, count = time.perf_counter(), 0
        while (taken := time.perf_counter() - start) < seconds:
            for _ in range(20):
                next(batches)
            count += 20
        rates.append(count * micro_batch * max_tokens / taken)
    return {
        "sources": len(paths),
        "max_tokens": max_tokens,
        "packing": packing,
        "documents": "labels, ids, positions" if masked else "plain",
        "M tokens/s per core": round(max(rates) / 1e6, 1),
        "in the first epoch": round(first / 1e6, 1),
    }


def start_at(first: int) -> dict[str, Any]:
    """Time and memory until the place of the first 1024 samples is known."""
    tracemalloc.start()
    start = time.perf_counter()
    Order(0, [10**10, 3 * 10**9], [0.6, 0.4]).locate(np.arange(first, first + 1024))
    taken, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"first sample": f"{first:.0e}", "ms": round(taken * 1e3, 2), "peak MB": round(peak / 1e6, 2)}


if __name__ == "__main__":
    main()
