"""The same tokens read by others, and text tokenized by the library alone: what `data_loader.py` is beside.

What is not installed is a line with its reason: uv run --with litdata python benchmarks/data_loader.py
"""

import importlib.util
import itertools
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forge_data.store.tokenize import tokenize_files
from forge_data.store.tokens import TokenStore
from forge_data.tokenizer.hf import HfTokenizerConfig

MICRO_BATCH = 8
TOOL_TOKENS = 20_000_000
"""Tokens that are written for other tools."""


def beside(store: TokenStore, folder: Path, max_tokens: int, seconds: float) -> list[dict[str, Any]]:
    """Tokens a second of plain batches of int64 with labels, shuffled, on one core, by each tool.

    Args:
        store: the tokens.
        folder: for what tools make of them.
        max_tokens: T.
        seconds: of each of five runs; the best counts.
    """
    tools: dict[str, Callable[[TokenStore, Path, int], Iterator[Any]]] = {
        "numpy slices": numpy_slices,
        "litdata": litdata_batches,
        "datasets streaming": datasets_batches,
    }
    rows: list[dict[str, Any]] = []
    for name, make in tools.items():
        package = name.split()[0]
        if importlib.util.find_spec(package) is None:
            rows.append({"tool": name, "max_tokens": max_tokens, "M tokens/s per core": "not installed"})
            continue
        rate = round(best_rate(make(store, folder, max_tokens), max_tokens, seconds) / 1e6, 1)
        rows.append({"tool": name, "max_tokens": max_tokens, "M tokens/s per core": rate})
    return rows


def best_rate(batches: Iterator[Any], max_tokens: int, seconds: float) -> float:
    """Tokens a second, the best of five runs; those before the first count as warm-up."""
    for _ in range(20):
        next(batches)
    rates: list[float] = []
    for _ in range(5):
        start, count = time.perf_counter(), 0
        while (taken := time.perf_counter() - start) < seconds:
            next(batches)
            count += 1
        rates.append(count * MICRO_BATCH * max_tokens / taken)
    return max(rates)


def numpy_slices(store: TokenStore, folder: Path, max_tokens: int) -> Iterator[Any]:
    """What a short script does: slices of a mapped file at random places, without checks or epochs."""
    mapped = np.memmap(store.folder / "tokens.bin", dtype=store.manifest.dtype, mode="r")
    draw = np.random.default_rng(0)
    while True:
        starts = draw.integers(0, len(mapped) - max_tokens - 1, MICRO_BATCH)
        rows = np.stack([mapped[start : start + max_tokens + 1].astype(np.int64) for start in starts])
        yield torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])


def litdata_batches(store: TokenStore, folder: Path, max_tokens: int) -> Iterator[Any]:
    """`StreamingDataset` over token chunks, in this process, stacked to batches."""
    import litdata
    from litdata.streaming import TokensLoader

    out = folder / f"litdata-{max_tokens}"
    tokens = store.read(np.asarray([0]), TOOL_TOKENS)[0].astype(np.int32)
    cache = litdata.streaming.Cache(
        str(out), chunk_size=(max_tokens + 1) * 1024, item_loader=TokensLoader(max_tokens + 1)
    )
    for number, part in enumerate(np.array_split(tokens, 20)):
        cache[number] = torch.from_numpy(part)
    cache.done()
    cache.merge()
    data = litdata.StreamingDataset(
        str(out), item_loader=TokensLoader(max_tokens + 1), shuffle=True, drop_last=True
    )
    yield from stacked(row.long() for _ in itertools.count() for row in data)


def datasets_batches(store: TokenStore, folder: Path, max_tokens: int) -> Iterator[Any]:
    """`IterableDataset` over a parquet file of rows of tokens, with its shuffle buffer."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    path = folder / f"rows-{max_tokens}.parquet"
    count = TOOL_TOKENS // (max_tokens + 1)
    ids = store.read(np.asarray([0]), count * (max_tokens + 1))[0].astype(np.int32)
    rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(ids), max_tokens + 1)
    parquet.write_table(pyarrow.table({"tokens": rows}), path, row_group_size=256)
    data = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    shuffled = data.shuffle(seed=0, buffer_size=1000).with_format("numpy")
    yield from stacked(
        torch.from_numpy(np.array(row["tokens"])).long() for _ in itertools.count() for row in shuffled
    )


def stacked(rows: Iterator[torch.Tensor]) -> Iterator[Any]:
    """Batches with labels."""
    while True:
        batch = torch.stack(list(itertools.islice(rows, MICRO_BATCH)))
        yield batch[:, :-1], batch[:, 1:]


def tokenizing(folder: Path) -> list[dict[str, Any]]:
    """`tokenize` against `encode_batch` of the library, by seconds of one core, over real source files."""
    if importlib.util.find_spec("tokenizers") is None:
        return [{"what": "tokenizers", "MB/s per core": "not installed"}]
    import os

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.glob("*.py"))[:120]
    texts = [file.read_bytes().decode(errors="replace") for file in files]
    size = sum(len(text.encode(errors="replace")) for text in texts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained = trainers.BpeTrainer(
        vocab_size=8192, special_tokens=["</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts[:40], trained)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = HfTokenizerConfig(path=str(folder / "tokenizer.json"))
    rates: dict[str, list[float]] = {"encode_batch": [], "tokenize": []}
    for number in range(3):
        start = time.process_time()
        tokenizer.encode_batch(texts, add_special_tokens=False)
        rates["encode_batch"].append(size / (time.process_time() - start))
        start = time.process_time()
        tokenize_files(files, folder / f"tokenized-{number}", config, root=root)
        rates["tokenize"].append(size / (time.process_time() - start))
    best = {name: max(found) for name, found in rates.items()}
    return [
        {
            "what": name,
            "MB/s per core": round(rate / 1e6, 2),
            "of encode_batch": round(rate / best["encode_batch"], 3),
        }
        for name, rate in best.items()
    ]
