"""Evaluates a model during training, without gradients and without changing its state."""

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
    """Enter evaluation mode without gradients; restore modes and random states at the end.

    No weight stays gathered afterwards, so that the caller may replace the weights.
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
    """A count, on the host, of the bytes of all targets and, with several sources, of each source."""

    def __init__(self) -> None:
        self._bytes: Tensor | None = None  # [1 + sources]
        self._names: list[str] = []

    def add(self, micro: MicroBatch) -> None:
        """Add the byte counts of a micro-batch of this rank, if it has them."""
        if (counts := micro.statistics.get("bytes")) is None:
            return
        sources = range(len(micro.sources) if len(micro.sources) > 1 else 0)
        self._names = ["loss", *(f"loss/{micro.sources[n]}" for n in sources)]
        by_source = [counts[micro.statistics["source"] == n].sum() for n in sources]
        found = torch.stack([counts.sum(), *by_source]).cpu().double()
        self._bytes = found if self._bytes is None else self._bytes + found

    def totals(self, mesh: Mesh) -> dict[str, float]:
        """Return the counts over all ranks by the name of the loss; empty if unknown. Collective."""
        if self._bytes is None:
            return {}
        counts = mesh.batch.sum_(self._bytes.to(mesh.device)).tolist()
        return dict(zip(self._names, counts, strict=True))


def evaluated(losses: Mapping[str, Sum], lengths: Mapping[str, float]) -> dict[str, float]:
    """Compute loss, perplexity and (with known lengths) bits a byte, in total and by source (`loss/<name>`).

    A source without targets is left out; if there are no targets at all, the loss is NaN.

    Args:
        losses: sums in nats, by `loss` or `loss/<source>`.
        lengths: lengths in bytes, by the same names.
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
