"""Which activations carry what makes the clean run differ from the corrupted one?"""

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from forge_interp.causal.runs import Sweep, run_captured, scores_alone
from forge_interp.causal.table import Grid, Index, Metric, PatchingTable, Where, score
from forge_interp.errors import InterpError, check_kind, fitting
from forge_interp.hooks.capture import capture
from forge_interp.hooks.edit import attention_mask, mean_dims, real_positions
from forge_interp.hooks.sites import Site, named_modules
from forge_interp.model_inputs import Inputs, arguments, call_model
from forge_interp.progress import progress as with_progress


@torch.no_grad()
def activation_patching(
    model: nn.Module,
    clean: Inputs,
    corrupted: Inputs,
    sites: str | Iterable[str],
    metric: Metric,
    *,
    where: Where = None,
    at_once: int | None = None,
    progress: bool = True,
) -> PatchingTable:
    """Run the corrupted inputs once for each place, with the clean activation put in there.

    A place whose patch brings the clean metric back (`normalized` near 1) is sufficient for it. Swap `clean`
    and `corrupted` to see what is necessary. Costs 2 forward passes, one more for each place, and memory for
    the clean activations of all sites. Every run uses the same inputs: pass no cache that the model fills,
    and call `model.eval()` first if the model has dropout.

    Args:
        model: any module.
        clean: inputs whose behaviour is explained: a tensor, a tuple of positional arguments, or a mapping.
        corrupted: inputs of the same shapes.
        sites: sites and patterns, such as "layers.*:out" or "layers.*.attention:attn.z".
        metric: function from the model's output to one number, such as a difference of two logits.
        where: how to divide a site: None (whole), "positions" (dim 1; of attn.* sites dim 2), "heads" (dim 1,
            attn.* sites only), "neurons" (the last dim), several as ("heads", "positions"), or a mapping from
            labels to indices into the value.
        at_once: number of places that share a forward pass, each with its own copy of the batch along dim 0.
            The pass begins at the first place: modules that are called once and end before it return their
            outputs without patches (with None, passes are complete). Needs `at_once` times the memory of a
            pass, and of one output of each module that a site is in or beside. A result that differs from
            a single pass, as where samples depend on each other, is an error.
        progress: draw a bar on a terminal.

    InterpError where a site names nothing, shapes differ between the runs, the metric is no number, or with
    `at_once` a tensor of the inputs, a site or the output does not have the samples along dim 0.

    Source: Vig et al. 2020, arXiv:2004.12265; Meng et al. 2022, arXiv:2202.05262; normalised as in Wang et
    al. 2022, arXiv:2211.00593, and Zhang & Nanda 2023, arXiv:2309.16042.
    """
    if at_once is not None and not (isinstance(at_once, int) and at_once >= 1):
        raise InterpError(f"at_once is {at_once!r}; expected a positive number of places, or None")
    acts, clean_score = run_captured(model, clean, sites, metric)
    corrupted_score = score(metric, call_model(model, corrupted))
    grid = Grid.over(acts, where)
    values = np.full((len(acts), *grid.shape), np.nan)
    cells = [(row, *cell) for row in range(len(acts)) for cell in grid.cells()]
    places = [(site, grid.index(site, cell)) for site in acts for cell in grid.cells()]
    alone, step = partial(scores_alone, model, corrupted, acts, metric), at_once or 1
    scores = Sweep(model, corrupted, acts, metric, at_once).scores if at_once else alone
    starts = range(0, len(places), step)
    for start in with_progress(starts, len(starts), "activation patching", progress):
        for cell, value in zip(cells[start:], scores(places[start : start + step]), strict=False):
            values[cell] = value
    return grid.table(values, acts, clean_score, corrupted_score)


@torch.no_grad()
def site_means(
    model: nn.Module,
    batches: Iterable[Inputs],
    sites: str | Iterable[str],
    *,
    keep: Iterable[Tensor] | None = None,
    where: Index = ...,
) -> dict[str, Tensor]:
    """Return the mean of each site over batch and positions, per channel and head, for `ablate("mean")`.

    Each item of `batches` is the inputs of one forward pass. Each item of `keep` is a mask [B, T], or [R] for
    values [R, D], with False or 0 at padding, which does not count; default: the "attention_mask" [B, T] of
    the inputs, else all count. `where` is the index of the averaged part of a value; InterpError where it
    takes padding. Returns by site [D] for values [B, T, D], [1, N, 1, H] for attention; at least float32.
    """
    sums: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    check_kind("batches", batches, Iterable, "inputs of one forward pass each")
    masks, whole = iter(keep) if keep is not None else None, named_modules(model)[""]
    for inputs in batches:
        args, kwargs = arguments(inputs)
        try:
            mask = attention_mask(whole, tuple(args), dict(kwargs)) if masks is None else next(masks, None)
        except InterpError:  # that of an encoder says nothing of what is picked of a decoder
            if where is ...:
                raise
            mask = None
        if masks is not None and mask is None:
            raise InterpError("keep ends before the batches; expected a mask for each")
        with capture(model, sites) as acts:
            call_model(model, inputs)
        for key, value in acts.items():
            dims, is_attention = mean_dims(value, Site.parse(key)), Site.parse(key).part == "attn"
            weight = _picked(key, value, where)
            sizes = value.shape[::2][:2] if is_attention else value.shape[:2]  # batch and positions
            if mask is not None and (where is ... or mask.shape == sizes):
                real = real_positions(value, dims, mask, "keep")
                if where is not ... and bool((weight * ~real).any()):
                    raise InterpError(
                        f"where={where!r} takes padding at {key!r}; expected tokens: pad on the other side, "
                        "or give inputs of one length"
                    )
                weight *= real
            total, count = (x.sum(dims, keepdim=is_attention) for x in (value * weight, weight))
            if key in sums and sums[key].shape != total.shape:
                shapes = f"{list(sums[key].shape)} and {list(total.shape)}"
                raise InterpError(f"means of {key!r} are {shapes} in two batches; expected one shape")
            sums[key], counts[key] = sums.get(key, 0) + total, counts.get(key, 0) + count
    if not sums:
        raise InterpError("there are no batches; expected inputs of at least one forward pass")
    types = {key: torch.promote_types(torch.float32, value.dtype) for key, value in acts.items()}
    return {key: (total / counts[key]).to(types[key]) for key, total in sums.items()}


def _picked(site: str, value: Tensor, where: Index) -> Tensor:
    """Return float64 ones at an index of a value, else 0; InterpError where the index takes parts of rows."""
    picked = torch.zeros_like(value, dtype=torch.float64)
    with fitting(value, f"where={where!r} at {site!r}"):
        picked[where] = 1.0
    if value[where].shape[-1:] != value.shape[-1:]:
        raise InterpError(
            f"where={where!r} takes {list(value[where].shape)} of {site!r} {list(value.shape)}; "
            f"expected all {value.shape[-1]} numbers of the last dimension"
        )
    return picked
