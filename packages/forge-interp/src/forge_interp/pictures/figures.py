"""How do patterns, patching, lenses, similarities, curves and dynamics look?

Each `draw_` returns a matplotlib Figure without a window or global state: `figure.savefig("x.svg")`; a
notebook displays it. Letters: B batch, N heads, T queries, S keys, L sites or layers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from forge_interp.analysis.similarity import LayerSimilarity
from forge_interp.causal.table import PatchingTable
from forge_interp.dynamics import TrainingDynamics
from forge_interp.errors import InterpError, optional
from forge_interp.lenses.lens import LensResult

_LENS = {
    "target_log_prob": "log-probability of the target (nats)",
    "target_rank": "rank of the target (0 is the likeliest)",
    "entropy": "entropy (nats)",
    "kl": "KL from the model's own prediction (nats)",
}


def draw_attention(pattern: Tensor, tokens: Sequence[str], *, title: str = "", columns: int = 4) -> Any:
    """Draw every head of one sequence: a row for each query, a column for each key, black is 1.

    `pattern` are weights [N, T, S] of one sequence, `acts["layers.1.attention:attn.pattern"][0]`; `tokens`
    are S words, one per key, of which the last T are the queries; `columns` heads stand side by side.
    InterpError where pattern and tokens do not fit.
    """
    if pattern.ndim != 3 or not 0 < pattern.shape[1] <= pattern.shape[2] == len(tokens):
        raise InterpError(
            f"pattern is {list(pattern.shape)}, with {len(tokens)} tokens; expected [N, T, S] of one "
            "sequence (pattern[row]) and S tokens"
        )
    values, words = pattern.detach().float().cpu().numpy(), list(tokens)
    figure, axes = _panels(len(values), columns, 3.0, 3.0)
    for head, place in enumerate(axes):
        rows = words[-pattern.shape[1] :]
        image = _draw_table(place, values[head], rows, words, ticks=20, cmap="Greys", vmin=0.0, vmax=1.0)
        place.set(title=f"head {head}", xlabel="key", ylabel="query")
    figure.colorbar(image, ax=figure.axes, label="weight")
    figure.suptitle(title)
    return figure


def draw_patching(table: PatchingTable, *, normalized: bool = False, columns: int = 4) -> Any:
    """Draw the effect of every place: sites by places, or a bar for each site where sites are not divided.

    A table with three axes has one panel for each site, `columns` side by side. With `normalized`, 0 is no
    effect and 1 brings the clean metric back; else effects are in units of the metric.
    """
    values = table.normalized if normalized else table.effect
    label = "share of the clean metric brought back" if normalized else "effect (units of the metric)"
    sites = [_short(site) for site in table.labels[0]]
    if values.ndim == 1:
        figure, (place,) = _panels(1, 1, 6, 1 + 0.3 * len(sites))
        place.barh(sites, values)
        place.set(xlabel=label, ylabel="site")
        place.invert_yaxis()
        return figure
    panels = values[None] if values.ndim == 2 else values
    names = [sites, *table.labels[1:]][-2:]
    figure, axes = _panels(
        len(panels), columns, 6.0 if len(panels) == 1 else 4.0, 1.2 + 0.3 * min(len(names[0]), 32)
    )
    largest = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
    colours = {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}  # white is 0, red above, blue below
    for site, panel, place in zip(sites, panels, axes, strict=False):
        image = _draw_table(place, panel, names[0], names[1], **colours)
        place.set(xlabel=table.axes[-1], ylabel=table.axes[-2], title=site if values.ndim > 2 else "")
    figure.colorbar(image, ax=figure.axes, label=label)
    return figure


def draw_lens(
    result: LensResult,
    tokens: Sequence[str],
    *,
    row: int = 0,
    value: str = "target_log_prob",
    decode: Callable[[int], str] = str,
) -> Any:
    """Draw what each site predicts at each position: the likeliest token as text, a value as colour.

    `result` has [B, T] positions, `tokens` are the T input words of `row`; `value` is "target_log_prob",
    "target_rank", "entropy" or "kl"; `decode` turns an id into a word. InterpError: no such value or row.
    """
    values = getattr(result, value) if value in _LENS else None
    if values is None:
        there = [name for name in _LENS if getattr(result, name) is not None]
        raise InterpError(f"value is {value!r}; expected one of {there}, which this result has")
    if values.ndim != 3 or not -values.shape[1] <= row < values.shape[1]:
        raise InterpError(f"values are {list(values.shape)}, row is {row}; expected [L, B, T] and a row of B")
    words = [[decode(int(token)) for token in site[row, :, 0]] for site in result.top_ids]
    sites = [_short(site) for site in result.sites]
    longest = max((len(word) for line in words for word in line), default=1)
    figure, (place,) = _panels(1, 1, 2.5 + (0.17 + 0.07 * longest) * len(tokens), 1.6 + 0.35 * len(sites))
    table = values[:, row].double().cpu().numpy()
    image = _draw_table(place, table, sites, list(tokens), words, ticks=len(tokens), cmap="viridis")
    place.set(xlabel="input token", ylabel="site")
    figure.colorbar(image, ax=place, label=_LENS[value])
    return figure


def draw_similarity(similarity: LayerSimilarity, *, rows: str = "", columns: str = "") -> Any:
    """Draw one number for each pair of layers, yellow is 1; up to 16 layers also show it as text.

    `rows` and `columns` name the models of these layers.
    """
    values = similarity.values
    is_few = max(values.shape) <= 16
    cells = [[f"{value:.2f}" for value in line] for line in values] if is_few else None
    across, down = (2.5 + 0.45 * min(size, 32) for size in reversed(values.shape))
    figure, (place,) = _panels(1, 1, across + 1.0, down)
    left, below = [[_short(name) for name in side] for side in (similarity.rows, similarity.columns)]
    lowest = min(0.0, float(np.nanmin(values, initial=0.0)))
    image = _draw_table(place, values, left, below, cells, cmap="viridis", vmin=lowest, vmax=1.0)
    place.set(ylabel=rows, xlabel=columns)
    figure.colorbar(image, ax=place, label=similarity.measure)
    return figure


def draw_layers(
    layers: Sequence[str], curves: Mapping[str, Any], *, unit: str, chance: float | None = None
) -> Any:
    """Draw a number for each layer; repeats (folds, seeds, subjects) become mean and standard deviation.

    `curves` are {label: [L] or [L, repeats]}, such as `{"probe": curve.scores, "control": curve.control}`, in
    `unit` (`curve.unit`); `chance` is a dashed line. InterpError where a curve has another length than L.
    """
    figure, (place,) = _panels(1, 1, max(4.0, 2 + 0.5 * len(layers)), 3.2)
    names = [_short(layer) for layer in layers]
    for label, points in _points(curves, len(names)):
        spread = points.std(1) if points.shape[1] > 1 else None
        place.errorbar(range(len(names)), points.mean(1), spread, marker="o", capsize=3, label=label)
    if chance is not None:
        place.axhline(chance, color="grey", linestyle="--", label="chance")
    turned = 90 if max(map(len, names), default=0) * len(names) > 60 else 0
    place.set_xticks(range(len(names)), names, rotation=turned)
    place.set(xlabel="layer", ylabel=unit)
    place.legend()
    return figure


def draw_sweep(
    strengths: Sequence[float], curves: Mapping[str, Any], *, unit: str, strength: str = "strength"
) -> Any:
    """Draw the effect of steering: numbers by the strength of the added vector; 0 is the unchanged model.

    `curves` are {label: [n] or [n, repeats]} at n `strengths`, in any order, such as the log-probability of a
    word, in `unit`; `strength` names the factors. InterpError where a curve has another length.
    """
    figure, (place,) = _panels(1, 1, 5.0, 3.2)
    x = np.asarray(strengths, dtype=float)
    order = np.argsort(x)
    for label, points in _points(curves, len(x)):
        mean, spread = points.mean(1)[order], points.std(1)[order]
        (line,) = place.plot(x[order], mean, marker="o", label=label)
        if points.shape[1] > 1:
            place.fill_between(x[order], mean - spread, mean + spread, color=line.get_color(), alpha=0.2)
    place.axvline(0.0, color="grey", linewidth=0.8)
    place.set(xlabel=strength, ylabel=unit)
    place.legend()
    return figure


def draw_dynamics(found: TrainingDynamics) -> Any:
    """Draw how layers and heads change while a model trains; steps are logarithmic from 1 on.

    On the left is the CKA of each layer with itself at the last step, on the right the induction score of
    each head; the five heads with the highest final score are named.
    """
    figure, axes = _panels(2 if found.heads else 1, 2, 9.0 if not found.heads else 4.5, 3.4)
    for site, curve in zip(found.layers, found.cka.T, strict=True):
        axes[0].plot(found.steps, curve, marker="o", label=_short(site))
    axes[0].set(ylabel="CKA with the last step")
    best = found.induction[-1].argsort()[-5:]
    for head, curve in enumerate(found.induction.T):
        named = {"label": found.heads[head], "zorder": 3} if head in best else {"color": "lightgrey"}
        axes[1].plot(found.steps, curve, **named)
        axes[1].set(ylabel="induction score", ylim=(0, 1))
    for place in axes:
        place.set_xscale("symlog", linthresh=1)
        place.set(xlabel="step")
        place.legend(fontsize=7)
    return figure


def _panels(count: int, columns: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """Make a figure with `count` axes of this size in inches, `columns` side by side, and the axes."""
    columns = min(columns, count)
    rows = -(-count // columns)
    library = optional("matplotlib.figure", "a picture", "pictures")
    figure = library.Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, number + 1) for number in range(count)]


def _short(site: str) -> str:
    """Shorten a site by the part that all pictures would repeat: "layers.3:out" -> "layers.3"."""
    return site.removesuffix(":out")


def _draw_table(
    axes: Any,
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Sequence[Sequence[str]] | None = None,
    *,
    ticks: int = 32,
    **colours: Any,
) -> Any:
    """Draw [rows, columns] as colours, the first row on top, no colour for NaN, with `cells` as texts.

    Every second, third, ... label is written where there are more than `ticks`. Returns the image.
    """
    if values.shape != (len(rows), len(columns)):
        raise InterpError(
            f"the table is {list(values.shape)}, with {len(rows)} and {len(columns)} labels; "
            "expected one label for each row and each column"
        )
    image = axes.imshow(np.ma.masked_invalid(values), aspect="auto", interpolation="nearest", **colours)
    for labels, write, rotation in ((rows, axes.set_yticks, 0), (columns, axes.set_xticks, 90)):
        step = -(-len(labels) // ticks)
        marked = [_visible(label) for label in labels[::step]]
        turned = rotation if max(map(len, marked), default=0) > 1 else 0
        write(range(0, len(labels), step), marked, rotation=turned, fontsize=8)
    for (row, column), text in np.ndenumerate(np.array(cells if cells is not None else [], dtype=object)):
        red, green, blue, _ = image.cmap(image.norm(values[row, column]))
        is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        colour = "white" if is_dark else "black"
        axes.text(column, row, _visible(text), ha="center", va="center", fontsize=7, color=colour)
    return image


def _visible(text: str) -> str:
    """Make a token visible: line ends, tabs and spaces become signs; `$` starts no mathematics."""
    shown = text.replace("\n", "\u21b5").replace("\t", "\u21e5").replace("$", r"\$")
    return shown if shown.strip() else shown.replace(" ", "\u2423")


def _points(curves: Mapping[str, Any], count: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield labels and [count, repeats]."""
    for label, values in curves.items():
        points = np.asarray(values, dtype=float)
        if points.ndim not in (1, 2) or len(points) != count:
            raise InterpError(
                f"curve {label!r} has shape {list(points.shape)}; expected [{count}] or [{count}, repeats]"
            )
        yield label, points.reshape(count, -1)
