"""Evaluates a model beside its training: no gradients, no changed state."""

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from forge_data.loading.loader import MicroBatch
from forge_model.loss.cross_entropy import Sum
from forge_parallel.apply import reshard
from forge_parallel.mesh import Mesh
from torch import Tensor, nn


@contextmanager
def evaluating(*parts: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; restores modes and random states.

    No weight stays gathered, so that others may be written in the place of those that were evaluated.
    """
    modes = [(module, module.training) for part in parts for module in part.modules()]
    python, legacy = random.getstate(), np.random.get_state()
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(cuda), torch.no_grad():
            for part in parts:
                part.eval()
            yield
    finally:
        for part in parts:
            reshard(part)
        for module, training in modes:
            module.training = training
        random.setstate(python)
        np.random.set_state(legacy)


class Lengths:
    """Counts the bytes of the targets, of all and of each of several sources, on the host."""

    def __init__(self) -> None:
        self._bytes: Tensor | None = None  # [1 + sources]
        self._names: list[str] = []

    def add(self, micro: MicroBatch) -> None:
        """Add the sums of a micro-batch of this rank, where it knows them."""
        if (counts := micro.statistics.get("bytes")) is None:
            return
        sources = range(len(micro.sources) if len(micro.sources) > 1 else 0)
        self._names = ["loss", *(f"loss/{micro.sources[n]}" for n in sources)]
        by_source = [counts[micro.statistics["source"] == n].sum() for n in sources]
        found = torch.stack([counts.sum(), *by_source]).cpu().double()
        self._bytes = found if self._bytes is None else self._bytes + found

    def totals(self, mesh: Mesh) -> dict[str, float]:
        """Over all ranks, by the name of the loss; nothing where they are not known. Collective."""
        if self._bytes is None:
            return {}
        counts = mesh.batch.sum_(self._bytes.to(mesh.device)).tolist()
        return dict(zip(self._names, counts, strict=True))


def evaluated(losses: Mapping[str, Sum], lengths: Mapping[str, float]) -> dict[str, float]:
    """Loss, perplexity and, where lengths are known, bits a byte: `loss`, `loss/<source>`, `perplexity`, ...

    A source without targets is left out; without any at all, the loss is NaN.

    Args:
        losses: sums in nats, by `loss` or `loss/<source>`.
        lengths: bytes, by the same names.
    """
    found: dict[str, float] = {}
    for name, (value, count) in losses.items():
        if name != "loss" and not count:
            continue
        of_source, loss = name.removeprefix("loss"), (value / count).item()
        found[name] = loss
        found[f"perplexity{of_source}"] = math.exp(min(loss, 700.0))
        if length := lengths.get(name):
            found[f"bits_per_byte{of_source}"] = value.item() / math.log(2) / length
    return found
