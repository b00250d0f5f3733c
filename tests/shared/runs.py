"""What a run has left."""

import json
from pathlib import Path

import torch
from forge_ckpt.store import Store


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run) if "loss" in record]


def state(run: Path) -> dict[str, bytes]:
    """Every tensor of the newest checkpoint as bytes, and the progress."""
    store = Store(run / "checkpoints")
    found = store.newest()
    tensors = store.tensors(found.step)
    whole = {key: tensor.flatten().view(torch.uint8).numpy().tobytes() for key, tensor in tensors.items()}
    return whole | {"meta": json.dumps([found.meta, found.values], sort_keys=True).encode()}
