"""Draws small SVG pictures: points and lines over logarithmic or linear axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 400, 76, 48, 34, 150
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")


class Series(NamedTuple):
    """Points, a line and error bars in one colour.

    Attributes:
        name: name in the legend.
        points: points (x, y) to mark.
        line: points (x, y) to connect.
        bars: vertical error bars (x, low, high).
    """

    name: str
    points: Sequence[tuple[float, float]] = ()
    line: Sequence[tuple[float, float]] = ()
    bars: Sequence[tuple[float, float, float]] = ()


def picture(
    title: str, x: str, y: str, series: Sequence[Series], log_x: bool = True, log_y: bool = False
) -> str:
    """Draw a picture; return its SVG text.

    Args:
        title: title above the picture.
        x: name of the x axis.
        y: name of the y axis.
        series: the series, in the order of their colours.
        log_x: whether the x axis is logarithmic; then all x must be above 0.
        log_y: whether the y axis is logarithmic.
    """
    xs = [p[0] for s in series for p in (*s.points, *s.line, *s.bars)]
    ys = [v for s in series for p in (*s.points, *s.line) for v in p[1:]]
    ys += [v for s in series for bar in s.bars for v in bar[1:]]
    across = _Axis(xs, log_x, LEFT, WIDTH - RIGHT)
    up = _Axis(ys, log_y, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="11"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x)}</text>',
        f'<text x="14" y="{(TOP + HEIGHT - BOTTOM) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {(TOP + HEIGHT - BOTTOM) / 2})">{escape(y)}</text>',
    ]
    for tick in across.ticks():
        at = across(tick)
        parts.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{tick:.3g}</text>')
    for tick in up.ticks():
        at = up(tick)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    for number, one in enumerate(series):
        parts += _drawn(one, COLOURS[number % len(COLOURS)], across, up)
        colour, at = COLOURS[number % len(COLOURS)], TOP + 12 + 16 * number
        parts.append(f'<circle cx="{WIDTH - RIGHT + 12}" cy="{at - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 22}" y="{at}">{escape(one.name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawn(one: Series, colour: str, across: _Axis, up: _Axis) -> list[str]:
    found: list[str] = []
    if one.line:
        path = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in one.line)
        found.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    for x, low, high in one.bars:
        found.append(f'<path d="M{across(x):.1f} {up(low):.1f}V{up(high):.1f}" stroke="{colour}"/>')
    for x, y in one.points:
        found.append(f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3.5" fill="{colour}"/>')
    return found


class _Axis:
    """An axis, which maps a value to a place in the picture."""

    def __init__(self, values: Sequence[float], is_log: bool, start: float, end: float) -> None:
        self._is_log, self._start, self._end = is_log, start, end
        scaled = [self._scaled(value) for value in values if math.isfinite(value)] or [0.0, 1.0]
        low, high = min(scaled), max(scaled)
        margin = 0.05 * (high - low) or 0.5
        self._low, self._high = low - margin, high + margin

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self._is_log else value

    def __call__(self, value: float) -> float:
        share = (self._scaled(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Return round numbers in the range."""
        span = self._high - self._low
        if self._is_log and span > 1.2:
            return [10.0**n for n in range(math.ceil(self._low), math.floor(self._high) + 1)]
        if self._is_log:
            low, high = 10**self._low, 10**self._high
            found = [n * 10.0**e for e in range(-30, 31) for n in (1, 2, 5) if low <= n * 10.0**e <= high]
            return found if len(found) > 2 else _even(low, high)
        return _even(self._low, self._high)


def _even(low: float, high: float) -> list[float]:
    """Return round numbers at equal distances."""
    span = high - low
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(n for n in (1, 2, 5, 10) if span / (n * step) <= 6)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
