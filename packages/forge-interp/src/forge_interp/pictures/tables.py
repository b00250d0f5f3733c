"""What do patterns, patching, lenses and similarities look like?

Each returns a matplotlib Figure: `figure.savefig("x.svg")`; a notebook displays it.
Letters: B batch, N heads, T queries, S keys, L sites.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from forge_interp.analysis.cka import LayerSimilarity
from forge_interp.causal.table import PatchingTable
from forge_interp.errors import InterpError
from forge_interp.lenses.lens import LensResult
from forge_interp.pictures.canvas import draw_table, new_figure, short, two_sided

_LENS = {
    "target_log_prob": "log-probability of the target (nats)",
    "target_rank": "rank of the target (0 is the likeliest)",
    "entropy": "entropy (nats)",
    "kl": "KL from the model's own prediction (nats)",
}


def draw_attention(pattern: Tensor, tokens: Sequence[str], *, title: str = "", columns: int = 4) -> Any:
    """Draw every head of one sequence: a row for each query, a column for each key, black is 1.

    Args:
        pattern: [N, T, S] weights of one sequence: `acts["layers.1.attention:attn.pattern"][0]`.
        tokens: S words, of the keys; the last T are the queries.
        title: above all heads.
        columns: heads in a row of the figure.

    Raises:
        InterpError: the pattern has another number of dimensions, or tokens another number.
    """
    if pattern.ndim != 3 or not 0 < pattern.shape[1] <= pattern.shape[2] == len(tokens):
        raise InterpError(
            f"pattern is {list(pattern.shape)}, with {len(tokens)} tokens; expected [N, T, S] of one "
            "sequence (pattern[row]) and S tokens"
        )
    num_heads, num_queries, _ = pattern.shape
    columns = min(columns, num_heads)
    rows = -(-num_heads // columns)
    figure, axes = new_figure(3.0 * columns + 0.7, 3.0 * rows, nrows=rows, ncols=columns)
    for place in axes.flat[num_heads:]:
        place.remove()
    values = pattern.detach().float().cpu().numpy()
    for head in range(num_heads):
        place, queries = axes.flat[head], list(tokens)[-num_queries:]
        image = draw_table(
            place, values[head], queries, list(tokens), ticks=20, cmap="Greys", vmin=0.0, vmax=1.0
        )
        place.set(title=f"head {head}", xlabel="key", ylabel="query")
    figure.colorbar(image, ax=figure.axes, label="weight")
    figure.suptitle(title)
    return figure


def draw_patching(table: PatchingTable, *, normalized: bool = False, columns: int = 4) -> Any:
    """Draw the effect of every place: sites by places, or a bar for each site where sites are not divided.

    A table with three axes has one panel for each site.

    Args:
        table: of `activation_patching`, `attribution_patching` or `path_patching`.
        normalized: 0 is no effect, 1 brings the clean metric back; otherwise units of the metric.
        columns: panels in a row.
    """
    values = table.normalized if normalized else table.effect
    label = "share of the clean metric brought back" if normalized else "effect (units of the metric)"
    sites = [short(site) for site in table.labels[0]]
    if values.ndim == 1:
        figure, axes = new_figure(6, 1 + 0.3 * len(sites))
        axes[0, 0].barh(sites, values)
        axes[0, 0].set(xlabel=label, ylabel="site")
        axes[0, 0].invert_yaxis()
        return figure
    panels = values[None] if values.ndim == 2 else values
    names = [sites, *table.labels[1:]][-2:]
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    height = 1.2 + 0.3 * min(len(names[0]), 32)
    figure, axes = new_figure(max(6.0, 4.0 * columns), height * rows, nrows=rows, ncols=columns)
    for place in axes.flat[len(panels) :]:
        place.remove()
    for index, panel in enumerate(panels):
        place = axes.flat[index]
        image = draw_table(place, panel, names[0], names[1], **two_sided(values))
        place.set(xlabel=table.axes[-1], ylabel=table.axes[-2])
        if values.ndim > 2:
            place.set_title(sites[index])
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
    """Draw what each site predicts at each position: the likeliest token is written, the colour is a value.

    Args:
        result: of `logit_lens` or `read_lens` on [B, T] tokens.
        tokens: T words, of the inputs of that row.
        row: of the batch.
        value: "target_log_prob", "target_rank", "entropy" or "kl".
        decode: token id -> word.

    Raises:
        InterpError: the result has no such value, or its leading axes are not [B, T].
    """
    values = getattr(result, value) if value in _LENS else None
    if values is None:
        there = [name for name in _LENS if getattr(result, name) is not None]
        raise InterpError(f"value is {value!r}; expected one of {there}, which this result has")
    if values.ndim != 3 or not -values.shape[1] <= row < values.shape[1]:
        raise InterpError(f"values are {list(values.shape)}, row is {row}; expected [L, B, T] and a row of B")
    words = [[decode(int(token)) for token in site[row, :, 0]] for site in result.top_ids]
    sites = [short(site) for site in result.sites]
    longest = max((len(word) for line in words for word in line), default=1)
    figure, axes = new_figure(2.5 + (0.17 + 0.07 * longest) * len(tokens), 1.6 + 0.35 * len(sites))
    table = values[:, row].double().cpu().numpy()
    image = draw_table(axes[0, 0], table, sites, list(tokens), words, ticks=len(tokens), cmap="viridis")
    axes[0, 0].set(xlabel="input token", ylabel="site")
    figure.colorbar(image, ax=axes[0, 0], label=_LENS[value])
    return figure


def draw_similarity(similarity: LayerSimilarity, *, rows: str = "", columns: str = "") -> Any:
    """Draw one number for each pair of layers, yellow is 1; up to 16 layers have it written in their cell.

    Args:
        similarity: of `linear_cka`, `compare_layers` or another measure.
        rows: what the rows are layers of.
        columns: the same for columns.
    """
    values = similarity.values
    is_few = max(values.shape) <= 16
    cells = [[f"{value:.2f}" for value in line] for line in values] if is_few else None
    across, down = (2.5 + 0.45 * min(size, 32) for size in reversed(values.shape))
    figure, axes = new_figure(across + 1.0, down)
    left, below = [[short(name) for name in side] for side in (similarity.rows, similarity.columns)]
    lowest = min(0.0, float(np.nanmin(values, initial=0.0)))
    image = draw_table(axes[0, 0], values, left, below, cells, cmap="viridis", vmin=lowest, vmax=1.0)
    axes[0, 0].set(ylabel=rows, xlabel=columns)
    figure.colorbar(image, ax=axes[0, 0], label=similarity.measure)
    return figure
