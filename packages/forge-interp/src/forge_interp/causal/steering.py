"""Which direction tells two kinds of inputs apart, and what does a model do when it is added?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forge_interp.causal.patching import site_means
from forge_interp.causal.table import Index, Metric, score
from forge_interp.errors import InterpError, fitting
from forge_interp.hooks.capture import capture
from forge_interp.hooks.edit import attention_mask, edit, steer
from forge_interp.hooks.sites import named_modules
from forge_interp.model_inputs import Inputs, arguments, call_model


@torch.no_grad()
def contrastive_vectors(
    model: nn.Module,
    positive: Iterable[Inputs],
    negative: Iterable[Inputs],
    sites: str | Iterable[str],
    where: Index | None = None,
) -> dict[str, Tensor]:
    """Mean activation on positive minus that on negative inputs, by site [B, T, D]: [D], for `steer`.

    `positive` and `negative` are inputs of one forward pass each; pairs that differ in one thing make a clean
    direction. `where` is an index into a value of what is averaged, such as `(slice(None), -1)`, the last
    token; None: all tokens that are no padding, see `site_means`. InterpError where it takes padding.

    Source: Rimsky et al. 2023, arXiv:2312.06681, eq. 1 (contrastive activation addition).
    """
    sides = [_means(model, batches, sites, where) for batches in (positive, negative)]
    if not sides[0] or sides[0].keys() != sides[1].keys():
        raise InterpError(
            "positive or negative is empty, or reaches other sites; expected inputs of both kinds"
        )
    return {site: (value - sides[1][site]).float() for site, value in sides[0].items()}


def _means(
    model: nn.Module, batches: Iterable[Inputs], sites: str | Iterable[str], where: Index | None
) -> dict[str, Tensor]:
    """Means of the rows at an index, float64; `site_means` without one."""
    if where is None:
        return site_means(model, batches, sites)
    rows: dict[str, list[Tensor]] = {}
    for inputs in batches:
        args, kwargs = arguments(inputs)
        try:
            mask = attention_mask(named_modules(model)[""], tuple(args), dict(kwargs))
        except InterpError:  # of an encoder, whose padding says nothing of the decoder
            mask = None
        with capture(model, sites) as acts:
            call_model(model, inputs)
        for site, value in acts.items():
            keep = torch.ones_like(value)
            if mask is not None and mask.shape == value.shape[:2]:
                keep = mask.to(value.device)[..., None].expand_as(value)
            with fitting(value, f"where={where!r} at {site!r}"):
                chosen, is_real = value[where], bool(keep[where].all())
            if chosen.shape[-1:] != value.shape[-1:]:
                raise InterpError(
                    f"where={where!r} takes {list(chosen.shape)} of {site!r} {list(value.shape)}; "
                    f"expected all {value.shape[-1]} numbers of the last dimension"
                )
            if not is_real:
                raise InterpError(
                    f"where={where!r} takes padding at {site!r}; expected tokens: pad on the other side, "
                    "or give inputs of one length"
                )
            rows.setdefault(site, []).append(chosen.reshape(-1, value.shape[-1]).double())
    return {site: torch.cat(parts).mean(0) for site, parts in rows.items()}


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
    """Metrics of runs with `strength * vector` added at a site: {name: [strengths]}, one pass for each.

    A second metric, such as the loss on other text, shows from which strength on the model breaks. `where` is
    the index of the value that is steered. One metric alone is called "metric".
    """
    named = metrics if isinstance(metrics, dict) else {"metric": metrics}
    found: dict[str, list[float]] = {name: [] for name in named}
    for strength in strengths:
        with torch.no_grad(), edit(model, {site: steer(vector, float(strength), where)}):
            output = call_model(model, inputs)
        for name, metric in named.items():
            found[name].append(score(metric, output))
    return {name: np.array(values) for name, values in found.items()}
