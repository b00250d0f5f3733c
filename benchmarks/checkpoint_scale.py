"""What a checkpoint of 70B parameters with Adam costs at 1,024 ranks, apart from its values.

    python benchmarks/checkpoint_scale.py [--ranks 1024] [--loaders 512] [--layers 80] [--replicas 1]
        [--columns 1]

Runs the real code of the first rank (decode what all ranks sent, merge, check coverage, encode) and of one
loading rank (decode the root, find what to read, decode the indices it needs), without any values. Tensors
are cut by rows into equal chunks, as FSDP2 does; replicas (HSDP) hold the same boxes and share the writing.
With --columns N, who loads wants one of N parts of each row of a matrix, as some tensor parallel ranks do.
"""

import argparse
import json
import pickle
import tempfile
import time
from math import prod
from pathlib import Path

import msgspec
from forge_ckpt import manifest as manifests
from forge_ckpt.layout import Entry, Part, Shape, merge, part_of
from forge_ckpt.manifest import File, Index, Manifest, encode_digests
from forge_ckpt.shards import ALIGNMENT, BLOCK_BYTES, plan
from report import table, write

BLOCK_DIGEST = b"0123456789abcdef"


def model(
    layers: int, dim: int = 8192, ffn: int = 28672, kv: int = 1024, vocab: int = 128256
) -> dict[str, Shape]:
    """Names and shapes of a Llama-like decoder of 70B parameters."""
    shapes: dict[str, Shape] = {
        "embed.weight": (vocab, dim),
        "head.weight": (vocab, dim),
        "norm.weight": (dim,),
    }
    for index in range(layers):
        for name, shape in {
            "attention.q.weight": (dim, dim),
            "attention.k.weight": (kv, dim),
            "attention.v.weight": (kv, dim),
            "attention.o.weight": (dim, dim),
            "ffn.gate.weight": (ffn, dim),
            "ffn.up.weight": (ffn, dim),
            "ffn.down.weight": (dim, ffn),
            "attention_norm.weight": (dim,),
            "ffn_norm.weight": (dim,),
        }.items():
            shapes[f"layers.{index}.{name}"] = shape
    return shapes


def state(shapes: dict[str, Shape]) -> dict[str, Entry]:
    """Parameters, two moments and a step count each, in float32."""
    found = {"model." + name: Entry("float32", shape) for name, shape in shapes.items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        found |= {f"optimizer.{kind}.{name}": Entry("float32", shape) for name, shape in shapes.items()}
    return found | {f"optimizer.step.{name}": Entry("float32", ()) for name in shapes}


def chunk(shape: Shape, rank: int, ranks: int) -> tuple[Shape, Shape] | None:
    """The rows of a tensor that a rank holds."""
    if not shape:
        return ((), ()) if rank == 0 else None
    rows = -(-shape[0] // ranks)
    low, high = min(rows * rank, shape[0]), min(rows * (rank + 1), shape[0])
    return ((low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:])) if high > low else None


def column(start: Shape, size: Shape, index: int, columns: int) -> tuple[Shape, Shape]:
    """One of some equal parts of each row of a matrix; of other tensors all."""
    if len(size) != 2:
        return start, size
    part = size[1] // columns
    return (start[0], index * part), (size[0], part)


def written(entries: dict[str, Entry], rank: int, ranks: int, replicas: int) -> tuple[Part, Index, int]:
    """What a rank tells the first one, its index, and the bytes of its file."""
    boxes, offsets, place = {}, {}, 0
    shards = ranks // replicas
    for number, (key, entry) in enumerate(sorted(entries.items())):
        box = chunk(entry.shape, rank % shards, shards)
        if box is not None and number % replicas == rank // shards:
            boxes[key] = box
            place += -place % ALIGNMENT
            offsets[key] = place
            place += 4 * prod(box[1])
    digests = encode_digests([BLOCK_DIGEST] * -(-place // BLOCK_BYTES))
    return part_of(sorted(entries), boxes), Index(BLOCK_BYTES, digests, offsets), place


def load_plan(folder: Path, loaders: int, columns: int) -> dict[str, float]:
    """What one of some loading ranks finds out before it reads values, and how much it would read."""
    start = time.perf_counter()
    opened = manifests.read(folder)
    read_s = time.perf_counter() - start
    loader = loaders // 2
    wanted = {}
    for key, entry in opened.tensors.items():
        rows = chunk(entry.shape, loader // columns, loaders // columns)
        if rows is not None:
            wanted[key] = column(*rows, loader % columns, columns)
    planned = plan(folder, opened, wanted)
    plan_s = time.perf_counter() - start
    blocks = 0
    for _, pieces in planned.values():
        spans = {b for p in pieces for b in range(p.first // BLOCK_BYTES, -(-p.last // BLOCK_BYTES))}
        blocks += len(spans) * BLOCK_BYTES
    return {
        "read root s": read_s,
        "load plan s": plan_s,
        "files read": len(planned),
        "bytes read / asked": blocks / sum(4 * prod(size) for _, size in wanted.values()),
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--loaders", type=int, default=512)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--columns", type=int, default=1)
    options = parser.parse_args()
    shapes = model(options.layers)
    entries = state(shapes)
    parameters = sum(map(prod, shapes.values()))
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / manifests.step_name(1)
        folder.mkdir()
        sent, told = [], msgspec.json.encode(dict(sorted(entries.items())))
        for rank in range(options.ranks):
            part, index, num_bytes = written(entries, rank, options.ranks, options.replicas)
            data = manifests.encode(index)
            (folder / manifests.index_file_name(rank)).write_bytes(data)
            with (folder / manifests.values_file_name(rank)).open("wb") as file:
                file.truncate(num_bytes)  # sparse: only its size is looked at
            sent.append(pickle.dumps((File(num_bytes, len(data), manifests.digest(data).hex()), part)))

        start = time.perf_counter()
        everyone = [pickle.loads(data) for data in sent]
        held = msgspec.json.decode(told, type=dict[str, Entry])
        tensors, layouts = merge([held], [0] * options.ranks, [part for _, part in everyone])
        files = [file for file, _ in everyone]
        made = Manifest(manifests.FORMAT, 1, "", False, {}, {}, files, layouts, tensors)
        data = manifests.encode(made)
        publish_s = time.perf_counter() - start
        (folder / manifests.NAME).write_bytes(data)

        loaded = load_plan(folder, options.loaders, options.columns)
    results = {
        "parameters": parameters,
        "ranks": options.ranks,
        "replicas": options.replicas,
        "loaders": options.loaders,
        "columns": options.columns,
        "tensors": len(entries),
        "layouts": len(layouts),
        "gathered MB": sum(map(len, sent)) / 1e6,
        "publish s": publish_s,
        "root manifest MB": len(data) / 1e6,
        **loaded,
    }
    print(table([{"what": name, "value": value} for name, value in results.items()]))
    print(json.dumps(results))
    write(
        f"checkpoint_scale_{options.replicas}" + f"_columns_{options.columns}" * (options.columns > 1),
        results,
    )


if __name__ == "__main__":
    main()
