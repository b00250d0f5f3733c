"""What would patching every place do, as estimated from gradients?"""

from collections.abc import Collection, Iterable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from forge_interp.causal.runs import put, run_captured, same_shape, score_edited
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
    the corrupted run: first order, exact where the metric is affine in the activation. Costs 2 forward passes
    and 1 backward pass for all sites together. The estimate goes wrong in these cases:

    - A saturated softmax hides what queries and keys do: patch attn.pattern, behind it, or use `steps`.
    - Large effects cancel. Drop the gradient through one layer at a time and average the absolute effects
      (GradDrop): call this function under `edit(model, {"layers.3.ffn:out": torch.Tensor.detach})`.
    - A function saturates. With `steps` the gradient is averaged along the straight line from a_corrupted to
      a_clean (integrated gradients, one site at a time, Gauss-Legendre nodes). The sum over a site then tends
      to the true effect of patching the whole site; `residual` is the error that remains. The share of a
      place no longer estimates a patch of that place alone. Costs `steps` forward and backward passes for
      each site, and one forward.

    Parameters need no gradients and get none. Sums are in float64. Arguments, results (`values` = corrupted +
    estimated effect) and errors: see `activation_patching`. Autograd must go through model and metric.

    Source: Nanda 2023, "Attribution patching"; Kramar et al. 2024, arXiv:2403.00745, sections 2 and 3 (AtP*);
    Sundararajan et al. 2017, arXiv:1703.01365 eq. 1 and proposition 1 (integrated gradients, completeness).
    """
    if steps is not None and not (isinstance(steps, int) and steps >= 1):
        raise InterpError(f"steps is {steps!r}; expected a positive number")
    acts, clean_score = run_captured(model, clean, sites, metric)
    grid, run = Grid.over(acts, where), partial(gradients_at, model, corrupted, metric)
    if steps is None:
        gradients, base, corrupted_score = run(acts)
        products = {site: _product(site, acts[site], base[site], gradients[site]) for site in acts}
        effects, residual = [grid.sums(site, product) for site, product in products.items()], None
    else:
        base, corrupted_score = run_captured(model, corrupted, map(at_call, acts), metric)
        effects, residual = [], np.empty(len(acts))
        for row, site in enumerate(with_progress(acts, len(acts), "integrated gradients", progress)):
            gradient, way = (
                torch.zeros_like(base[site], dtype=torch.float64),
                _way(site, acts[site], base[site]),
            )
            for place, weight in line_nodes(steps):
                gradients, *_ = run([site], {site: base[site] + place * way})
                gradient += weight * gradients[site].double()
            product = _product(site, acts[site], base[site], gradient)
            effects.append(grid.sums(site, product))
            patched = score_edited(model, corrupted, {at_call(site): put(site, acts[site])}, metric)
            residual[row] = product.sum().item() - (patched - corrupted_score)
    return grid.table(corrupted_score + np.stack(effects), acts, clean_score, corrupted_score, residual)


def line_nodes(steps: int) -> list[tuple[float, float]]:
    """Return Gauss-Legendre nodes on the line from 0 to 1, with weights that sum to 1."""
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    return [(float(node), float(weight)) for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True)]


def gradients_at(
    model: nn.Module,
    inputs: Inputs,
    metric: Metric,
    sites: Collection[str],
    points: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Run once; return the metric's gradients at sites, the values there, and the metric.

    `points` replace the values first. The backward pass runs before the edits end, because activation
    checkpointing repeats them. InterpError where a value or the metric has no gradient.
    """
    points, base, probes = points or {}, dict[str, Tensor](), dict[str, Tensor]()

    def visit(site: str) -> Edit:
        def apply(value: Tensor) -> Tensor:
            value = points[site].to(value) if site in points else value
            if site not in sites:
                return value
            if not value.is_floating_point():
                text = f"site {site!r} holds {value.dtype}; expected floating-point: choose a later site"
                raise InterpError(text)
            if site not in probes:  # or an edit is repeated
                base[site] = value.detach().clone()
                probes[site] = torch.zeros_like(value, requires_grad=True)
            return value + probes[site]

        return apply

    with (
        torch.enable_grad(),
        edit(model, {at_call(site): visit(site) for site in {**points, **dict.fromkeys(sites)}}),
    ):
        value = apply_metric(metric, call_model(model, inputs))
        if not isinstance(value, Tensor) or not value.requires_grad:
            raise InterpError(
                f"the metric gave a {type(value).__name__} without a gradient; expected a tensor with one: "
                "no .item(), no argmax, no no_grad or inference_mode in the model or the metric"
            )
        wanted = [probes[site] for site in sites]
        found = torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)
    return dict(zip(sites, found, strict=True)), base, value.item()


def _product(site: str, clean: Tensor, corrupted: Tensor, gradient: Tensor) -> Tensor:
    return _way(site, clean.double(), corrupted.double()) * gradient.double()


def _way(site: str, clean: Tensor, corrupted: Tensor) -> Tensor:
    """Return `clean - corrupted`, and 0 where both are the same infinity: scores that a mask hides."""
    same_shape(site, clean, corrupted)
    difference = (clean - corrupted).where(clean != corrupted, 0.0)
    if not bool(difference.isfinite().all()):
        raise InterpError(
            f"the runs differ at {site!r} by what is not finite; expected one mask in both, and no overflow"
        )
    return difference
