"""What would patching every place do, estimated from gradients?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from forge_interp.causal.patching import put, run_captured, same_shape, score_edited
from forge_interp.causal.qk_fix import effects_through_attention, kept_calls, output_of
from forge_interp.causal.table import Grid, Metric, PatchingTable, Where, at_call
from forge_interp.errors import InterpError
from forge_interp.hooks.edit import Edit, edit
from forge_interp.model_inputs import Inputs, call_model
from forge_interp.progress import progress as with_progress


def attribution_patching(
    model: nn.Module,
    clean: Inputs,
    corrupted: Inputs,
    sites: str | Iterable[str],
    metric: Metric,
    *,
    where: Where = None,
    qk_fix: bool = False,
    steps: int | None = None,
    progress: bool = True,
) -> PatchingTable:
    """Estimate `activation_patching` for all places at once.

    The effect of a place is the sum over it of (a_clean - a_corrupted) * d metric / d a, with the gradient of
    the corrupted run: first order, exact where the metric is affine in the activation. 2 forward passes and
    1 backward pass for all sites together.

    Where this goes wrong, and what helps:

    - A saturated softmax hides what queries and keys do. With `qk_fix`, sites attn.q and attn.k are patched
      for real in their own attention call, and the estimate is first order in the output z of that call
      only: sum of (z_patched - z_corrupted) * d metric / d z. Costs one more attention call for each place.
    - Large effects that cancel. Drop the gradient through one layer at a time and average the absolute
      effects (GradDrop): call this under `edit(model, {"layers.3.ffn:out": torch.Tensor.detach})`.
    - Any saturation. With `steps` the gradient is averaged along the straight line from a_corrupted to
      a_clean (integrated gradients, one site at a time, Gauss-Legendre nodes). The sum over a site then tends
      to the true effect of patching the whole site; `residual` is by how much it misses. A place's share is
      no longer an estimate of patching that place alone. Costs `steps` forward and backward passes for each
      site, and one forward.

    Gradients of parameters are neither needed nor touched. Sums are in float64.

    Args:
        model: any module that autograd can go through.
        clean: inputs as for `activation_patching`.
        corrupted: inputs of the same shapes.
        sites: sites and patterns of floating-point activations.
        metric: what the model returns -> one number that autograd can go through.
        where: as in `activation_patching`.
        qk_fix: take the softmax of attn.q and attn.k sites exactly.
        steps: number of gradients along the line; None for the one gradient at the corrupted end.
        progress: with `steps`, draw a bar on standard error, if that is a terminal.

    Returns:
        `values` [sites, places ...] = corrupted + estimated effect, to be read like those of
        `activation_patching`.

    Raises:
        InterpError: `steps` < 1 or together with `qk_fix`, a site that carries no gradient, or as
            `activation_patching`.

    Source: Nanda 2023, "Attribution patching"; Kramar et al. 2024, arXiv:2403.00745, sections 2 and 3 (AtP
    and the corrections of AtP*); Sundararajan et al. 2017, arXiv:1703.01365 eq. 1 and proposition 1
    (integrated gradients, completeness).
    """
    if steps is not None and (steps < 1 or qk_fix):
        raise InterpError(f"steps is {steps} and qk_fix {qk_fix}; expected a positive number, or only qk_fix")
    sites = [sites] if isinstance(sites, str) else list(sites)
    acts, clean_score = run_captured(model, clean, sites, metric)
    grid = Grid.over(acts, where)
    residual = None
    if steps is None:
        fixed = [site for site in acts if qk_fix and site.partition("#")[0].endswith((":attn.q", ":attn.k"))]
        effects, corrupted_score = _first_order(model, corrupted, acts, fixed, grid, metric)
    else:
        bar = with_progress(acts, len(acts), "integrated gradients", progress)
        effects, corrupted_score, residual = _integrated(
            model, corrupted, sites, acts, bar, grid, metric, steps
        )
    return PatchingTable(
        corrupted_score + np.stack(effects),
        ("site", *grid.axes),
        (tuple(acts), *grid.labels),
        clean_score,
        corrupted_score,
        residual,
    )


def _first_order(
    model: nn.Module,
    corrupted: Inputs,
    acts: Mapping[str, Tensor],
    fixed: list[str],
    grid: Grid,
    metric: Metric,
) -> tuple[list[np.ndarray], float]:
    """The effects at each site from one gradient, and the corrupted metric."""
    base: dict[str, Tensor] = {}
    probes: dict[str, Tensor] = {}

    def probe(site: str) -> Edit:
        def apply(value: Tensor) -> Tensor:
            base[site] = value.detach().clone()
            return value + probes.setdefault(site, _zeros(site, value))

        return apply

    edits = {site: probe(site) for site in [*acts, *map(output_of, fixed)]}
    with kept_calls(model, fixed) as calls:
        gradients, value = _differentiate(model, corrupted, edits, probes, metric)
    effects = []
    for site in acts:
        if site in fixed:
            out = output_of(site)
            effects.append(effects_through_attention(calls[out], site, acts[site], gradients[out], grid))
        else:
            effects.append(grid.sums(site, _product(site, acts[site], base[site], gradients[site])))
    return effects, value


def _integrated(
    model: nn.Module,
    corrupted: Inputs,
    sites: str | Iterable[str],
    acts: Mapping[str, Tensor],
    bar: Iterable[str],
    grid: Grid,
    metric: Metric,
    steps: int,
) -> tuple[list[np.ndarray], float, np.ndarray]:
    """The effects at each site from gradients along the line, the corrupted metric, and what they miss."""
    base, corrupted_score = run_captured(model, corrupted, sites, metric)
    effects, residual = [], []
    for site in bar:
        gradient = _mean_gradient(model, corrupted, site, acts[site], base[site], metric, steps)
        product = _product(site, acts[site], base[site], gradient)
        patched = score_edited(model, corrupted, {at_call(site): put(site, acts[site])}, metric)
        effects.append(grid.sums(site, product))
        residual.append(product.sum().item() - (patched - corrupted_score))
    return effects, corrupted_score, np.array(residual)


def _mean_gradient(
    model: nn.Module,
    corrupted: Inputs,
    site: str,
    end: Tensor,
    start: Tensor,
    metric: Metric,
    steps: int,
) -> Tensor:
    """The average over the line from `start` to `end` of the metric's gradient at one site."""
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    mean, way = torch.zeros_like(start, dtype=torch.float64), _difference(site, end, start)
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        probes = {site: _zeros(site, start)}
        point = start + float(node) * way

        def move(value: Tensor, point: Tensor = point, probe: Tensor = probes[site]) -> Tensor:
            return point + probe

        gradients, _ = _differentiate(model, corrupted, {site: move}, probes, metric)
        mean += float(weight) * gradients[site].double()
    return mean


def _differentiate(
    model: nn.Module, inputs: Inputs, edits: Mapping[str, Edit], probes: Mapping[str, Tensor], metric: Metric
) -> tuple[dict[str, Tensor], float]:
    """One run with edits that add probes, all zero: gradients with respect to the probes, and the metric.

    The backward pass runs before the edits end, because activation checkpointing repeats them.
    """
    with torch.enable_grad(), edit(model, {at_call(site): apply for site, apply in edits.items()}):
        value = metric(call_model(model, inputs))
        if not isinstance(value, Tensor) or not value.requires_grad:
            raise InterpError(
                f"the metric gave {_describe(value)}; expected a tensor with one number and a gradient: no "
                ".item(), no argmax, no no_grad or inference_mode in the model or the metric"
            )
        sites = list(probes)
        found = torch.autograd.grad(value, [probes[site] for site in sites], allow_unused=True)
    gradients = {
        site: torch.zeros_like(probes[site]) if gradient is None else gradient
        for site, gradient in zip(sites, found, strict=True)
    }
    return gradients, value.item()


def _zeros(site: str, value: Tensor) -> Tensor:
    if not value.is_floating_point():
        raise InterpError(
            f"site {site!r} holds {value.dtype}; expected floating-point numbers: choose a later site"
        )
    return torch.zeros_like(value, requires_grad=True)


def _product(site: str, clean: Tensor, corrupted: Tensor, gradient: Tensor) -> Tensor:
    return _difference(site, clean.double(), corrupted.double()) * gradient.double()


def _difference(site: str, clean: Tensor, corrupted: Tensor) -> Tensor:
    """`clean - corrupted`, and 0 where both are the same infinity: scores that a mask hides in both runs."""
    same_shape(site, clean, corrupted)
    difference = (clean - corrupted).where(clean != corrupted, 0.0)
    if not bool(difference.isfinite().all()):
        raise InterpError(
            f"the runs differ at {site!r} by what is not finite; expected one mask in both, and no overflow"
        )
    return difference


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}, requires_grad={value.requires_grad}"
    return f"a {type(value).__name__}"
