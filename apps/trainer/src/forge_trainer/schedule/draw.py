"""Draws a curve in a terminal."""

from collections.abc import Callable, Iterator

BLOCKS = " ▁▂▃▄▅▆▇█"


def draw(factor: Callable[[int], float], steps: int, width: int = 64, height: int = 8) -> Iterator[str]:
    """Yield the lines of a picture of the factor over all steps; each column shows one step of its range.

    Args:
        factor: returns the factor of a step (from 0), in [0, 1].
        steps: number of steps.
        width: largest number of columns.
        height: number of lines, without the axis.
    """
    width = min(width, steps)
    columns = [factor(round(i * (steps - 1) / max(1, width - 1))) for i in range(width)]
    for line in reversed(range(height)):
        filled = (round(8 * min(1.0, max(0.0, value * height - line))) for value in columns)
        label = f"{(line + 1) / height:.2f}" if line % 2 else "    "
        yield f"  {label} |{''.join(BLOCKS[eighths] for eighths in filled)}"
    yield f"       0{steps - 1:>{max(1, width - 1)},}"
