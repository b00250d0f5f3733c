"""Checks that activations change equally at every width, so that learning rates transfer between widths.

Source: Yang et al. 2022, arXiv:2203.03466 appendix D.1. S sites.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from forge_config import ConfigError
from forge_data.loading.loader import build_loader
from forge_model.init import initialize
from forge_resilience.exit_codes import ExitCode
from torch import Tensor, nn

from forge_trainer.config.job import Job
from forge_trainer.optim import trainable
from forge_trainer.study.points import Point

STEEP = 0.35
"""The largest power of the width with which a change may grow or fall."""


class Width(NamedTuple):
    """The result for one model.

    Attributes:
        dim: width of the model.
        changes: root mean square change of the output of each site by training, by name of the site.
    """

    dim: int
    changes: dict[str, float]


def check_coordinates(points: Sequence[Point], steps: int) -> int:
    """Train each model of a study for a few steps on one batch, and print how its activations change.

    Returns:
        0, or 1 if a change grows or falls with the width, or is not finite.

    Raises:
        ConfigError: the study has fewer than three widths.
    """
    found = [changes_of(point.job, steps) for point in points]
    if len({one.dim for one in found}) < 3:
        raise ConfigError(
            f"the runs have the widths {sorted({one.dim for one in found})}; a check needs three: make "
            "model.dim an axis of the study"
        )
    slopes = slopes_of(found)
    sys.stdout.write("\n".join(_lines(found, slopes, steps)) + "\n")
    return ExitCode.DONE if all(abs(slope) <= STEEP for slope in slopes.values()) else ExitCode.FAILED


def slopes_of(found: Sequence[Width]) -> dict[str, float]:
    """Return the power of the width with which each site's change grows; NaN if a change is not finite."""
    widths = np.log([one.dim for one in found])
    return {site: _slope(widths, np.array([one.changes[site] for one in found])) for site in found[0].changes}


def _slope(widths: np.ndarray, changes: np.ndarray) -> float:
    if not np.isfinite(changes).all():
        return np.nan
    return float(np.polyfit(widths, np.log(np.maximum(changes, 1e-30)), 1)[0])


def _lines(found: Sequence[Width], slopes: dict[str, float], steps: int) -> Iterator[str]:
    width = max(map(len, slopes))
    yield (
        f"change after {steps} steps".ljust(width)
        + "".join(f"{one.dim:>10}" for one in found)
        + "   power of width"
    )
    for site, slope in slopes.items():
        values = "".join(f"{one.changes[site]:10.3g}" for one in found)
        yield f"{site:<{width}}{values}   {slope:+.2f}{_verdict(slope)}"


def _verdict(slope: float) -> str:
    if abs(slope) <= STEEP:
        return ""
    if np.isnan(slope):
        return "  is not finite: give a smaller learning rate"
    return "  grows with the width" if slope > 0 else "  falls with the width"


def changes_of(job: Job, steps: int) -> Width:
    """Measure how a few steps of training on the first batch change a model, in one process on the CPU."""
    model = job.model.build()
    initialize(model, job.job.seed)
    optimizer, loss = job.optimizer.build(trainable([model])), job.loss.build()
    loader = build_loader(
        job.data, "train", micro_batch=job.train.micro_batch, global_batch=job.train.micro_batch
    )
    micro = next(iter(loader))[0]
    loader.close()
    first = activations(model, micro.inputs)
    for _ in range(steps):
        terms: Any = model(**micro.inputs, loss_fn=loss)
        optimizer.zero_grad()
        (terms.total / micro.statistics["targets"].sum()).backward()
        optimizer.step()
    last = activations(model, micro.inputs)
    changes = {site: float((last[site] - first[site]).square().mean().sqrt()) for site in first}
    return Width(int(getattr(job.model, "dim", 0)), changes)


@torch.no_grad()
def activations(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of the embedding, each block and its parts, and the head."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda module, args, out: found.update({name: out.double()})

    inner = [name for name, _ in model.named_modules() if name.startswith("layers.") and name.count(".") <= 2]
    sites = ["embed", *(name for name in inner if not name.endswith("norm")), "head"]
    modules = dict(model.named_modules())
    handles = [modules[name].register_forward_hook(keep(name)) for name in sites]
    try:
        model(**{name: value for name, value in inputs.items() if name != "labels"})
    finally:
        for handle in handles:
            handle.remove()
    return found
