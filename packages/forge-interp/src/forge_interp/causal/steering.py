"""Which direction separates two kinds of inputs, and what does a model do when it is added?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forge_interp.causal.patching import site_means
from forge_interp.causal.table import Index, Metric, score
from forge_interp.errors import InterpError
from forge_interp.hooks.edit import edit, steer
from forge_interp.model_inputs import Inputs, call_model


@torch.no_grad()
def contrastive_vectors(
    model: nn.Module,
    positive: Iterable[Inputs],
    negative: Iterable[Inputs],
    sites: str | Iterable[str],
    where: Index | None = None,
) -> dict[str, Tensor]:
    """Return mean activation on positive minus on negative inputs by site, [D] of [B, T, D], for `steer`.

    `positive` and `negative` hold inputs of one forward pass each; pairs that differ in one thing make a
    clean direction. `where` is the index of the averaged part of a value, such as `(slice(None), -1)`, the
    last token; None: all tokens but padding, see `site_means`. InterpError where it takes padding.

    Source: Rimsky et al. 2023, arXiv:2312.06681, eq. 1 (contrastive activation addition).
    """
    index = ... if where is None else where
    sides = [site_means(model, batches, sites, where=index) for batches in (positive, negative)]
    if sides[0].keys() != sides[1].keys():
        raise InterpError("positive and negative reach other sites; expected inputs of two kinds alike")
    return {site: (value - sides[1][site]).float() for site, value in sides[0].items()}


def strength_sweep(
    model: nn.Module,
    inputs: Inputs,
    site: str,
    vector: Tensor,
    strengths: Sequence[float],
    metrics: Metric | dict[str, Metric],
    *,
    where: Any = ...,
) -> dict[str, np.ndarray]:
    """Return metrics of runs with `strength * vector` added at a site: {name: [strengths]}, a pass for each.

    A second metric, such as the loss on other text, shows at which strength the model breaks. `where` is the
    index of the steered part of the value. A single metric is called "metric".
    """
    named = metrics if isinstance(metrics, dict) else {"metric": metrics}
    found: dict[str, list[float]] = {name: [] for name in named}
    for strength in strengths:
        with torch.no_grad(), edit(model, {site: steer(vector, float(strength), where)}):
            output = call_model(model, inputs)
        for name, metric in named.items():
            found[name].append(score(metric, output))
    return {name: np.array(values) for name, values in found.items()}
