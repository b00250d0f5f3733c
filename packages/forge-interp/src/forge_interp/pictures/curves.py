"""What do numbers over layers, over strengths of steering, and over training steps look like?"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forge_interp.dynamics import TrainingDynamics
from forge_interp.errors import InterpError
from forge_interp.pictures.canvas import new_figure, short


def draw_layers(
    layers: Sequence[str], curves: Mapping[str, Any], *, unit: str, chance: float | None = None
) -> Any:
    """Draw a number for each layer; repeats (folds, seeds, subjects) become a mean and a standard deviation.

    Args:
        layers: L names, in order.
        curves: {label: [L] or [L, repeats]}: `{"probe": curve.scores, "control": curve.control}`.
        unit: of the numbers, for the axis: `curve.unit`.
        chance: where to draw a dashed line, if anywhere.

    Raises:
        InterpError: a curve has not one entry for each layer.
    """
    figure, axes = new_figure(max(4.0, 2 + 0.5 * len(layers)), 3.2)
    names = [short(layer) for layer in layers]
    for label, values in curves.items():
        points = _points(label, values, len(names))
        spread = points.std(1) if points.shape[1] > 1 else None
        axes[0, 0].errorbar(range(len(names)), points.mean(1), spread, marker="o", capsize=3, label=label)
    if chance is not None:
        axes[0, 0].axhline(chance, color="grey", linestyle="--", label="chance")
    turned = 90 if max(map(len, names), default=0) * len(names) > 60 else 0
    axes[0, 0].set_xticks(range(len(names)), names, rotation=turned)
    axes[0, 0].set(xlabel="layer", ylabel=unit)
    axes[0, 0].legend()
    return figure


def draw_sweep(
    strengths: Sequence[float], curves: Mapping[str, Any], *, unit: str, strength: str = "strength"
) -> Any:
    """Draw what steering does: numbers by the strength of the vector that is added; 0 is the model as it is.

    Args:
        strengths: n factors of the vector, in any order.
        curves: {label: [n] or [n, repeats]}, such as the log-probability of a word, or the loss.
        unit: of the numbers, for the axis.
        strength: what the factors are, for the other axis.

    Raises:
        InterpError: a curve has not one entry for each strength.
    """
    figure, axes = new_figure(5.0, 3.2)
    order = np.argsort(np.asarray(strengths, dtype=float))
    x = np.asarray(strengths, dtype=float)[order]
    for label, values in curves.items():
        points = _points(label, values, len(x))[order]
        (line,) = axes[0, 0].plot(x, points.mean(1), marker="o", label=label)
        if points.shape[1] > 1:
            below, above = points.mean(1) - points.std(1), points.mean(1) + points.std(1)
            axes[0, 0].fill_between(x, below, above, color=line.get_color(), alpha=0.2)
    axes[0, 0].axvline(0.0, color="grey", linewidth=0.8)
    axes[0, 0].set(xlabel=strength, ylabel=unit)
    axes[0, 0].legend()
    return figure


def draw_dynamics(found: TrainingDynamics) -> Any:
    """Draw what became of layers and heads while a model trained; steps are logarithmic from 1 on.

    On the left CKA of each layer with itself at the last step, on the right the induction score of each head,
    of which the five that end highest are named.
    """
    figure, axes = new_figure(9.0, 3.4, ncols=2 if found.heads else 1)
    for site, curve in zip(found.layers, found.cka.T, strict=True):
        axes[0, 0].plot(found.steps, curve, marker="o", label=short(site))
    axes[0, 0].set(ylabel="CKA with the last step")
    best = found.induction[-1].argsort()[-5:]
    for head, curve in enumerate(found.induction.T):
        named = {"label": found.heads[head], "zorder": 3} if head in best else {"color": "lightgrey"}
        axes[0, 1].plot(found.steps, curve, **named)
        axes[0, 1].set(ylabel="induction score", ylim=(0, 1))
    for place in axes.flat:
        place.set_xscale("symlog", linthresh=1)
        place.set(xlabel="step")
        place.legend(fontsize=7)
    return figure


def _points(label: str, values: Any, count: int) -> np.ndarray:
    """[count, repeats]."""
    points = np.asarray(values, dtype=float)
    if points.ndim not in (1, 2) or len(points) != count:
        raise InterpError(
            f"curve {label!r} has shape {list(points.shape)}; expected [{count}] or [{count}, repeats]"
        )
    return points.reshape(count, -1)
