"""Writes a checkpoint of torch DCP as three ranks of a small Llama; needs nothing but torch.

    uv run --no-project --python 3.11 --with torch==2.11.0 --with numpy python dcp_write.py FOLDER

wrote the fixture of torch 2.11.
"""

import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

RANKS, DIM, HEADS, KEY_HEADS, VOCAB, WIDE = 3, 8, 2, 1, 11, 20


def weights():
    """All weights by the names of torchtitan, whole."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"tok_embeddings.weight": (VOCAB, DIM), "norm.weight": (DIM,), "output.weight": (VOCAB, DIM)}
    rows = DIM // HEADS * KEY_HEADS
    for layer in range(2):
        shapes |= {
            f"layers.{layer}.attention.wq.weight": (DIM, DIM),
            f"layers.{layer}.attention.wk.weight": (rows, DIM),
            f"layers.{layer}.attention.wv.weight": (rows, DIM),
            f"layers.{layer}.attention.wo.weight": (DIM, DIM),
            f"layers.{layer}.feed_forward.w1.weight": (WIDE, DIM),
            f"layers.{layer}.feed_forward.w2.weight": (DIM, WIDE),
            f"layers.{layer}.feed_forward.w3.weight": (WIDE, DIM),
            f"layers.{layer}.attention_norm.weight": (DIM,),
            f"layers.{layer}.ffn_norm.weight": (DIM,),
        }
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def others():
    """What has two rows or columns, and so nothing on the last rank; other dtypes, strides, no elements."""
    return {
        "two": (torch.arange(10.0).reshape(2, 5).to(torch.bfloat16), [Shard(0)]),
        "columns": (torch.arange(8).reshape(4, 2), [Shard(1)]),
        "same": (torch.arange(3, dtype=torch.float64), [Replicate()]),
        "none": (torch.zeros(0, 3), None),
        "turned": (torch.arange(6.0).reshape(2, 3).t(), None),
        "flag": (torch.tensor(True), None),
        "small": (torch.arange(5).to(torch.uint16), None),
    }


def write(folder):
    """Collective over three ranks."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (RANKS,))
    state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in weights().items()}
    for name, (value, placements) in others().items():
        state[f"extra.{name}"] = value if placements is None else distribute_tensor(value, mesh, placements)
    moments = {f"state.{name}.exp_avg": torch.zeros_like(value) for name, value in state.items()}
    dcp.save(
        state | {"optimizer": moments, "train_state": {"step": torch.tensor(7)}, "note": [1, "x"]},
        checkpoint_id=folder,
    )


def _rank(rank, folder, meeting):
    """Ends without taking gloo apart: a thread of it that still runs then aborts the process now and then."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    write(folder)
    Path(f"{meeting}.{rank}").touch()
    while not all(Path(f"{meeting}.{other}").exists() for other in range(RANKS)):
        time.sleep(0.01)
    os._exit(0)


if __name__ == "__main__":
    out = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as meeting:
        torch.multiprocessing.spawn(_rank, (str(out), f"{meeting}/rank"), nprocs=RANKS)
