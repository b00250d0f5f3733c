"""The loss on held-out text."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from forge_parallel.mesh import Mesh
from torch import nn

from forge_trainer.step import Batch


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], loss_fn: Callable[..., Any], mesh: Mesh, device: torch.device
) -> dict[str, float]:
    """Mean cross entropy over all valid targets of all ranks. Collective.

    Args:
        model: left in the mode (train or eval) it was in.
        batches: this rank's part of a finite pass; every rank yields the same number of micro-batches.
        loss_fn: returns sums over valid targets.
        mesh: the ranks that share the pass.
        device: where the model is.

    Returns:
        `loss` in nats a token and `perplexity`.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for micro in (micro for batch in batches for micro in batch):
        terms = model(**micro.to(device).inputs, loss_fn=loss_fn)
        sums += torch.stack([terms.sums["loss"].value.double(), terms.sums["loss"].count.double()])
    model.train(was_training)
    cross_entropy, count = mesh.loss.sum_(sums).tolist()
    loss = cross_entropy / count
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
