"""What does a site say on average over a data set?"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from forge_interp.hooks.capture import capture
from forge_interp.hooks.edit import mean_dims, real_positions
from forge_interp.hooks.sites import Site
from forge_interp.model_inputs import Inputs, call_model


@torch.no_grad()
def site_means(
    model: nn.Module,
    batches: Iterable[Inputs],
    sites: str | Iterable[str],
    *,
    keep: Iterable[Tensor] | None = None,
) -> dict[str, Tensor]:
    """The mean of each site over batch and positions, of each channel and head apart: for `ablate("mean")`.

    Args:
        model: any module.
        batches: inputs, one forward pass each.
        sites: sites and patterns, as for `capture`.
        keep: for each batch [B, T], False or 0 for padding, which does not count.

    Returns:
        By site: [D] for values [B, T, D] of modules; [1, N, 1, H] of attention (q, k, v, z).

    Raises:
        InterpError: as `capture`; a mask that does not fit.
    """
    sums: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    masks = iter(keep) if keep is not None else None
    for inputs in batches:
        mask = next(masks) if masks is not None else None
        with capture(model, sites) as acts:
            call_model(model, inputs)
        for key, value in acts.items():
            site = Site.parse(key)
            dims = mean_dims(value, site)
            weight = torch.ones_like(value, dtype=torch.float64)
            if mask is not None:
                weight *= real_positions(value, dims, mask, "keep")
            is_attention = site.part == "attn"
            total = (value * weight).sum(dims, keepdim=is_attention)
            sums[key] = sums.get(key, 0) + total
            counts[key] = counts.get(key, 0) + weight.sum(dims, keepdim=is_attention)
    return {key: (total / counts[key]).to(acts[key].dtype) for key, total in sums.items()}
