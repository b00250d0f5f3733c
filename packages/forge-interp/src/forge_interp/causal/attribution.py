"""What would patching every place do, estimated from gradients?"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from forge_interp.causal.patching import put, run_captured, same_shape, score_edited
from forge_interp.causal.table import Grid, Metric, PatchingTable, Where, apply_metric, at_call
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
    steps: int | None = None,
    progress: bool = True,
) -> PatchingTable:
    """Estimate `activation_patching` for all places at once.

    The effect of a place is the sum over it of (a_clean - a_corrupted) * d metric / d a, with the gradient of
    the corrupted run: first order, exact where the metric is affine in the activation. 2 forward passes and
    1 backward pass for all sites together. Where this goes wrong, and what helps:

    - A saturated softmax hides what queries and keys do: patch attn.pattern, behind it, or use `steps`.
    - Large effects that cancel. Drop the gradient through one layer at a time and average the absolute
      effects (GradDrop): call this under `edit(model, {"layers.3.ffn:out": torch.Tensor.detach})`.
    - Any saturation. With `steps` the gradient is averaged along the straight line from a_corrupted to
      a_clean (integrated gradients, one site at a time, Gauss-Legendre nodes). The sum over a site then tends
      to the true effect of patching the whole site; `residual` is by how much it misses. A place's share is
      no longer an estimate of patching that place alone. Costs `steps` forward and backward passes for each
      site, and one forward.

    Gradients of parameters are neither needed nor touched. Sums are in float64. Arguments, results (`values`
    = corrupted + estimated effect) and errors are those of `activation_patching`; autograd must go through
    model and metric.

    Source: Nanda 2023, "Attribution patching"; Kramar et al. 2024, arXiv:2403.00745, sections 2 and 3 (AtP*);
    Sundararajan et al. 2017, arXiv:1703.01365 eq. 1 and proposition 1 (integrated gradients, completeness).
    """
    if steps is not None and not (isinstance(steps, int) and steps >= 1):
        raise InterpError(f"steps is {steps!r}; expected a positive number")
    acts, clean_score = run_captured(model, clean, sites, metric)
    grid, run, residual = Grid.over(acts, where), DifferentiableRun(model, corrupted, metric), None
    if steps is None:
        effects, corrupted_score = _first_order(run, acts, grid)
    else:
        bar = with_progress(acts, len(acts), "integrated gradients", progress)
        effects, corrupted_score, residual = _integrated(run, acts, bar, grid, steps)
    return grid.table(corrupted_score + np.stack(effects), acts, clean_score, corrupted_score, residual)


@dataclass(frozen=True)
class DifferentiableRun:
    """The corrupted run, to be differentiated."""

    model: nn.Module
    inputs: Inputs
    metric: Metric


def _first_order(
    run: DifferentiableRun, acts: Mapping[str, Tensor], grid: Grid
) -> tuple[list[np.ndarray], float]:
    """The effects at each site from one gradient, and the corrupted metric."""
    base: dict[str, Tensor] = {}
    probes: dict[str, Tensor] = {}

    def probe(site: str) -> Edit:
        def apply(value: Tensor) -> Tensor:
            base[site] = value.detach().clone()
            return value + probes.setdefault(site, probe_of(site, value))

        return apply

    gradients, value = differentiate(run, {site: probe(site) for site in acts}, probes)
    products = {site: _product(site, acts[site], base[site], gradients[site]) for site in acts}
    return [grid.sums(site, product) for site, product in products.items()], value


def _integrated(
    run: DifferentiableRun, acts: Mapping[str, Tensor], bar: Iterable[str], grid: Grid, steps: int
) -> tuple[list[np.ndarray], float, np.ndarray]:
    """The effects at each site from gradients along the line, the corrupted metric, and what they miss."""
    base, corrupted_score = run_captured(run.model, run.inputs, map(at_call, acts), run.metric)
    effects, residual = [], []
    for site in bar:
        gradient = _mean_gradient(run, site, acts[site], base[site], steps)
        product = _product(site, acts[site], base[site], gradient)
        edits = {at_call(site): put(site, acts[site])}
        patched = score_edited(run.model, run.inputs, edits, run.metric)
        effects.append(grid.sums(site, product))
        residual.append(product.sum().item() - (patched - corrupted_score))
    return effects, corrupted_score, np.array(residual)


def _mean_gradient(run: DifferentiableRun, site: str, end: Tensor, start: Tensor, steps: int) -> Tensor:
    """The average over the line from `start` to `end` of the metric's gradient at one site."""
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    mean, way = torch.zeros_like(start, dtype=torch.float64), _difference(site, end, start)
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        probes = {site: probe_of(site, start)}
        point = start + float(node) * way

        def move(value: Tensor, point: Tensor = point, probe: Tensor = probes[site]) -> Tensor:
            return point + probe

        gradients, _ = differentiate(run, {site: move}, probes)
        mean += float(weight) * gradients[site].double()
    return mean


def differentiate(
    run: DifferentiableRun, edits: Mapping[str, Edit], probes: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], float]:
    """One run with edits that add probes, all zero: gradients with respect to the probes, and the metric.

    The backward pass runs before the edits end, because activation checkpointing repeats them.
    """
    with torch.enable_grad(), edit(run.model, {at_call(s): apply for s, apply in edits.items()}):
        value = apply_metric(run.metric, call_model(run.model, run.inputs))
        if not isinstance(value, Tensor) or not value.requires_grad:
            raise InterpError(
                f"the metric gave a {type(value).__name__} without a gradient; expected a tensor with one: "
                "no .item(), no argmax, no no_grad or inference_mode in the model or the metric"
            )
        sites = list(probes)
        found = torch.autograd.grad(value, [probes[site] for site in sites], allow_unused=True)
    gradients = {
        site: torch.zeros_like(probes[site]) if gradient is None else gradient
        for site, gradient in zip(sites, found, strict=True)
    }
    return gradients, value.item()


def probe_of(site: str, value: Tensor) -> Tensor:
    """Zeros to be added to a value, with a gradient; InterpError where it holds integers."""
    if not value.is_floating_point():
        raise InterpError(f"site {site!r} holds {value.dtype}; expected floating-point: choose a later site")
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
