"""Sentences, patterns and autoencoders beside the plain thing, in one process, in turns: CPU time.

    python benchmarks/interp_research.py [--rounds 5] [--quick] [--no-record]

One thread. A ratio is taken within each round, and of these the median is shown; beside it stands that of the
least times. `sentences`: `extract_representations(pool="mean")` over a loop with hooks and the same
pooling, which keeps all rows and writes one file. `patterns`: a forward pass under `capture` of all
`attn.pattern`, checked, over one without. `autoencoder`: rows a second of `train_sae`, and of the trainer of
SAELens where it is installed; both train a TopK autoencoder on rows in memory. SAELens 6 needs
transformer-lens < 4: a virtual environment of its own, with forge-interp in it.

Issue 31, point 9 and done-when 5.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import torch
from forge_interp import ActivationStore, capture, extract_representations
from forge_interp.sae import SAEConfig, SAETraining, StoreRows, train_sae
from interp_tools import Shape, block, build, first
from report import table, write
from safetensors.torch import save_file

SHAPE = Shape(layers=6, width=384, heads=6, vocab=8192, batch=32, context=48, batches=64)
QUICK = Shape(layers=4, width=128, heads=4, vocab=512, batch=16, context=64, batches=6)
ROWS, D_IN, FEATURES, ACTIVE, BATCH = 1 << 15, 256, 2048, 32, 1024


def cpu_s(act: Callable[[], object]) -> float:
    """CPU time of one call, s."""
    start = time.process_time()
    act()
    return time.process_time() - start


def in_turns(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU times of each case in each round, after one that does not count."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, act in cases.items():
            seconds = cpu_s(act)
            found[name] += [seconds] if turn else []
    return found


def ratio(name: str, found: dict[str, list[float]], over: str, under: str, target: float) -> dict[str, Any]:
    """A line of the table."""
    each = [a / b for a, b in zip(found[over], found[under], strict=True)]
    value, least = statistics.median(each), min(found[over]) / min(found[under])
    numbers = {"median": round(value, 3), "of_least": round(least, 3), "target": target}
    return {"figure": name} | numbers | {"met": max(value, least) <= target}


def sentences(model: torch.nn.Module, shape: Shape, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Extraction of texts of 5 to `context` tokens, pooled, beside a loop; both leave the same rows."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, shape.context, (shape.batch * shape.batches,), generator=random).tolist()
    texts = [torch.randint(1, shape.vocab, (length,), generator=random) for length in lengths]
    layers = [block(i) for i in range(shape.layers)]
    rows: dict[str, torch.Tensor] = {}

    def loop() -> None:
        seen: dict[str, torch.Tensor] = {}
        kept: dict[str, list[torch.Tensor]] = {name: [] for name in layers}
        handles = [
            model.get_submodule(name).register_forward_hook(
                lambda module, args, output, name=name: seen.update({name: first(output)})
            )
            for name in layers
        ]
        for start in range(0, len(texts), shape.batch):
            some = texts[start : start + shape.batch]
            ids = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
            mask = torch.arange(ids.shape[1]) < torch.tensor([len(text) for text in some])[:, None]
            with torch.no_grad():
                model.transformer(input_ids=ids, attention_mask=mask.long())
            weight = mask[..., None].float()
            for name in layers:
                kept[name].append((seen[name] * weight).sum(1) / weight.sum(1))
        for handle in handles:
            handle.remove()
        rows.update({name: torch.cat(parts) for name, parts in kept.items()})
        save_file(rows, folder / "loop.safetensors")

    def ours() -> None:
        out = Path(tempfile.mkdtemp(dir=folder)) / "acts"
        options = {"batch_size": shape.batch, "pool": "mean", "progress": False}
        store = extract_representations(model, texts, layers, out, **options)
        for name in layers:
            torch.testing.assert_close(store[name], rows[name], rtol=1e-4, atol=1e-4)

    return in_turns({"loop": loop, "forge": ours}, rounds)


def patterns(model: torch.nn.Module, shape: Shape, rounds: int) -> dict[str, list[float]]:
    """Two forward passes, plain and with all patterns captured."""
    ids = torch.randint(1, shape.vocab, (2, 2 * shape.context), generator=torch.Generator().manual_seed(0))

    def plain() -> None:
        for _ in range(4):
            model(ids)

    def captured() -> None:
        with capture(model, "transformer.h.*.attn:attn.pattern") as acts:
            for _ in range(4):
                acts.clear()
                model(ids)

    with torch.no_grad():
        return in_turns({"forward": plain, "patterns": captured}, rounds)


def autoencoders(steps: int, rounds: int) -> tuple[dict[str, list[float]], str]:
    """Training of one TopK autoencoder by both libraries, and the version of SAELens or why it is absent."""
    rows = torch.randn(ROWS, D_IN, generator=torch.Generator().manual_seed(0))
    store = ActivationStore.of({"x:out": rows, "sample_id": torch.arange(ROWS)})
    config = SAEConfig(D_IN, FEATURES, "topk", k=ACTIVE)

    def ours() -> None:
        training = SAETraining(steps=steps, batch_rows=BATCH, log_every=steps)
        train_sae(config, StoreRows(store, "x:out"), training, progress=False)

    cases: dict[str, Callable[[], object]] = {"forge": ours}
    try:
        from sae_lens.config import SAETrainerConfig
        from sae_lens.saes.topk_sae import TopKTrainingSAE, TopKTrainingSAEConfig
        from sae_lens.training.sae_trainer import SAETrainer
    except ImportError as error:
        return in_turns(cases, rounds), f"absent: {error}"

    def theirs() -> None:
        sae = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=D_IN, d_sae=FEATURES, k=ACTIVE))
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
        batches = (rows[order[i % (ROWS // BATCH) * BATCH :][:BATCH]] for i in range(steps))
        told = SAETrainerConfig(
            total_training_samples=steps * BATCH, train_batch_size_samples=BATCH, lr_end=3e-5
        )
        SAETrainer(told, sae, batches).fit()

    return in_turns(cases | {"sae_lens": theirs}, rounds), metadata.version("sae-lens")


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--only", choices=("sentences", "patterns", "autoencoder"), help="one part")
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape, steps = (QUICK, 8) if options.quick else (SHAPE, 100)
    figures, measured, speeds, version = [], {}, [], ""
    wanted = (options.only,) if options.only else ("sentences", "patterns", "autoencoder")
    if "sentences" in wanted:
        with tempfile.TemporaryDirectory() as folder:
            found = measured["sentences"] = sentences(build(shape), shape, options.rounds, Path(folder))
        figures.append(ratio("sentences, pooled: extraction / loop", found, "forge", "loop", 1.15))
    if "patterns" in wanted:
        found = measured["patterns"] = patterns(build(shape), shape, options.rounds)
        figures.append(ratio("all patterns, checked / forward", found, "patterns", "forward", 1.3))
    if "autoencoder" in wanted:
        found, version = autoencoders(steps, options.rounds)
        measured["autoencoder"] = found
        for name, seconds in found.items():
            speeds.append(
                {"trainer": name, "rows_a_cpu_second": round(steps * BATCH / statistics.median(seconds))}
            )
    for part in filter(None, (figures, speeds)):
        print(table(part), end="\n\n")
    print(f"SAELens {version}" if version else "")
    if options.quick or options.no_record:
        return
    sae = {"rows": ROWS, "d_in": D_IN, "features": FEATURES, "k": ACTIVE, "batch": BATCH, "steps": steps}
    record = {"rounds": options.rounds, "threads": 1, "shape": asdict(shape), "autoencoder": sae}
    record |= {"sae_lens": version, "figures": figures, "speeds": speeds, "measurements": measured}
    write("interp_research", record)


if __name__ == "__main__":
    main()
