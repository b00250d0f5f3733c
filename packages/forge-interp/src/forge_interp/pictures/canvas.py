"""How is an empty figure made, and a table drawn on one of its axes?"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from forge_interp.errors import InterpError, optional


def new_figure(width: float, height: float, **options: Any) -> tuple[Any, np.ndarray]:
    """A matplotlib Figure of so many inches, which no window and no global list holds, and its axes."""
    figure = optional("matplotlib.figure", "a picture", "pictures").Figure(
        figsize=(width, height), layout="constrained"
    )
    return figure, figure.subplots(squeeze=False, **options)


def short(site: str) -> str:
    """A site without what all pictures would repeat: "layers.3:out" -> "layers.3"."""
    return site.removesuffix(":out")


def two_sided(values: np.ndarray) -> dict[str, Any]:
    """Colours of values with a sign: white is 0, red above, blue below; symmetric about 0."""
    largest = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
    return {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}


def draw_table(
    axes: Any,
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Sequence[Sequence[str]] | None = None,
    *,
    ticks: int = 32,
    **colours: Any,
) -> Any:
    """Draw [rows, columns] as colours, the first row above; `cells` are written into them.

    At most `ticks` labels are written along one side: every second, third, ... where there are more.
    Returns the image, for a colour bar. NaN has no colour.

    Raises:
        InterpError: there is another number of labels than of rows or columns.
    """
    if values.shape != (len(rows), len(columns)):
        raise InterpError(
            f"the table is {list(values.shape)}, with {len(rows)} and {len(columns)} labels; "
            "expected one label for each row and each column"
        )
    image = axes.imshow(np.ma.masked_invalid(values), aspect="auto", interpolation="nearest", **colours)
    for labels, write, rotation in ((rows, axes.set_yticks, 0), (columns, axes.set_xticks, 90)):
        step = -(-len(labels) // ticks)
        marked = [visible(label) for label in labels[::step]]
        turned = rotation if max(map(len, marked), default=0) > 1 else 0
        write(range(0, len(labels), step), marked, rotation=turned, fontsize=8)
    for (row, column), text in np.ndenumerate(np.array(cells if cells is not None else [], dtype=object)):
        red, green, blue, _ = image.cmap(image.norm(values[row, column]))
        is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        colour = "white" if is_dark else "black"
        axes.text(column, row, visible(text), ha="center", va="center", fontsize=7, color=colour)
    return image


def visible(text: str) -> str:
    """A token as it can be seen: ends of lines, tabs and spaces have signs; `$` is no mathematics."""
    shown = text.replace("\n", "\u21b5").replace("\t", "\u21e5").replace("$", r"\$")
    return shown if shown.strip() else shown.replace(" ", "\u2423")
