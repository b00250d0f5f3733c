"""What do the results look like?

Each function draws one standard figure and returns it; nothing is shown or saved. ImportError without the
extra: pip install 'forge-interp[plot]'. InterpError where there is nothing to draw, or what does not fit
together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from forge_interp.analysis.arrays import Array, as_matrix
from forge_interp.analysis.cka import LayerSimilarity
from forge_interp.analysis.probe import ProbeCurve
from forge_interp.encoding_models.encode import EncodingResult
from forge_interp.errors import InterpError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_similarity(similarity: LayerSimilarity, *, limits: tuple[float, float] | None = None) -> Figure:
    """Draw a layer by layer similarity matrix as a heat map; the first layer is at the lower left.

    `limits` are the values at the ends of the colours; default 0 to 1, or the range of values that leave it.
    """
    figure, axes = _figure()
    values = similarity.values
    if np.isnan(values).all():
        raise InterpError(f"every {similarity.measure} is NaN; expected layers that vary and more samples")
    low, high = limits or (min(0.0, float(np.nanmin(values))), max(1.0, float(np.nanmax(values))))
    image = axes.imshow(values, origin="lower", vmin=low, vmax=high, cmap="magma")
    axes.set_xticks(range(len(similarity.columns)), similarity.columns, rotation=90)
    axes.set_yticks(range(len(similarity.rows)), similarity.rows)
    figure.colorbar(image, ax=axes, label=similarity.measure)
    return figure


def plot_attention(pattern: Array, *, tokens: Sequence[str] | None = None, title: str = "") -> Figure:
    """Draw one head's attention pattern [queries, keys]: a row per query, a column per key.

    `tokens` are labels of the keys; of the queries too if they are as many. `title` is e.g. the site and the
    head.
    """
    weights = as_matrix(pattern, "pattern").cpu().numpy()
    figure, axes = _figure()
    image = axes.imshow(weights, vmin=0.0, vmax=1.0, cmap="viridis")
    if tokens is not None:
        if len(tokens) != weights.shape[1]:
            raise InterpError(f"{len(tokens)} tokens for {weights.shape[1]} keys; expected one per key")
        axes.set_xticks(range(len(tokens)), tokens, rotation=90)
        if len(tokens) == weights.shape[0]:
            axes.set_yticks(range(len(tokens)), tokens)
    axes.set(xlabel="key", ylabel="query", title=title)
    figure.colorbar(image, ax=axes, label="attention weight")
    return figure


def plot_probe(curves: Mapping[str, ProbeCurve] | ProbeCurve) -> Figure:
    """Draw probe scores over layers, mean and standard deviation over folds, control tasks dashed.

    `curves` are one, or {label: curve} over the same layers and in the same unit.
    """
    named = {"probe": curves} if isinstance(curves, ProbeCurve) else curves
    kinds = {(curve.layers, curve.unit) for curve in named.values()}
    if len(kinds) != 1:
        raise InterpError(f"the curves have {len(kinds)} kinds of layers and units; expected one")
    ((layers, unit),) = kinds
    figure, axes = _figure()
    for i, (label, curve) in enumerate(named.items()):
        _curve(axes, curve.scores.T, label, "-", f"C{i}")
        if curve.control is not None:
            _curve(axes, curve.control.T, f"{label}, control task", "--", f"C{i}")
    axes.set_xticks(range(len(layers)), layers, rotation=90)
    axes.set(ylabel=f"held-out {unit}")
    axes.legend()
    return figure


def plot_encoding(results: Mapping[str, EncodingResult]) -> Figure:
    """Draw scores over layers, {layer: result} of `encode_layers`: median and quartiles over targets.

    The score is the ceiling-normalized one where every result has it, else mean r; targets whose ceiling is
    below the threshold are left out.
    """
    if not results:
        raise InterpError("results is empty; expected at least one layer")
    normalized = [result.normalized for result in results.values() if result.normalized is not None]
    unit, scores = "r / noise ceiling", normalized
    if len(normalized) < len(results):
        unit, scores = "r", [result.score for result in results.values()]
    empty = [name for name, score in zip(results, scores, strict=True) if np.isnan(score).all()]
    if empty:
        raise InterpError(f"{empty} have no target with a score; expected some ceiling above min_ceiling")
    low, middle, high = (np.array([np.nanquantile(s, q) for s in scores]) for q in (0.25, 0.5, 0.75))
    figure, axes = _figure()
    places = np.arange(len(scores))
    axes.plot(places, middle, marker="o")
    axes.fill_between(places, low, high, alpha=0.3, linewidth=0)
    axes.set_xticks(places, list(results), rotation=90)
    axes.set(ylabel=f"held-out {unit} (median, quartiles)")
    return figure


def _curve(axes: Axes, scores: np.ndarray, label: str, style: str, color: str) -> None:
    """Draw mean and standard deviation of [folds, layers] scores."""
    places, mean, spread = np.arange(scores.shape[1]), scores.mean(0), scores.std(0)
    axes.plot(places, mean, style, marker="o", label=label, color=color)
    axes.fill_between(places, mean - spread, mean + spread, alpha=0.2, linewidth=0, color=color)


def _figure() -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("matplotlib is missing: pip install 'forge-interp[plot]'") from error
    figure = Figure(layout="constrained")
    return figure, figure.subplots()
