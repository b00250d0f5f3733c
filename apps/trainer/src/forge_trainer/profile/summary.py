"""Assigns every moment of a window to one class of work, and sums the times. Imports no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from forge_trainer.clock import BETWEEN, TRAINING
from forge_trainer.profile.classes import (
    ATTENTION,
    CLASSES,
    COMMUNICATION,
    IDLE,
    MATMUL,
    MEMORY,
    OPTIMIZER,
    OTHER,
)
from forge_trainer.profile.trace import Piece, Timeline

STEPS = TRAINING | {BETWEEN}
"""Spans that are part of a step."""

LEAST_S = 1e-3
"""Shorter times outside the steps are not reported."""

LONGEST = 25
"""The number of rows in the table of the longest operations."""

HINTS = {
    MATMUL: "the products of the model itself: the larger this share is, the better",
    ATTENTION: "attention: see that it is a fused kernel, and that documents are masked by one",
    COMMUNICATION: "what nothing overlaps: another mesh or larger micro-batches; or a rank is slow",
    OPTIMIZER: "the step of the optimizer: a fused one, fewer and larger steps",
    MEMORY: "copies and fills: dtype conversions, concatenations, host to device",
    OTHER: "elementwise operations and reductions: compile.enabled fuses them",
    IDLE: "nothing runs: the span tells what the host did meanwhile",
}
"""A description of each class, and how to reduce it."""


def summarize(line: Timeline, steps: int) -> dict[str, Any]:
    """Sum the times of a window, in seconds a step.

    A moment belongs to the work that runs in it (of several, to the first); else to a collective
    in flight; else to a wait for a collective; else it is idle, and is reported by the host's clock span. So
    the classes add up to the step. Spans outside training, such as evaluations and checkpoints, are left out
    of the steps.

    Args:
        line: timeline of the window.
        steps: number of steps of the window.

    Returns:
        `step_s`; `classes_s` by class; `communication` by axis with `total_s`, `exposed_s`, `calls` and
        `bytes`; `idle_s` by span; `longest`, the longest first; and `beside_s`, the times left out of all
        steps together.
    """
    scale = 1e-6 / steps
    beside = [span for span in line.spans if span.label not in STEPS]
    rest = _give(beside, [(line.start, line.end)])
    step_us = sum(end - start for start, end in rest)
    starts = [span.start for span in beside]

    def of_steps(pieces: Iterable[Piece]) -> list[Piece]:
        return [one for one in pieces if not _within(one, beside, starts)]

    work, spans = of_steps(line.work), [span for span in line.spans if span.label in STEPS]
    collectives = of_steps(piece for piece in line.communication if piece.axis)
    waits = of_steps(piece for piece in line.communication if not piece.axis)
    for level in (work, collectives, waits, spans):
        rest = _give(level, rest)
    left = Piece(line.start, line.end, IDLE, BETWEEN, alone_us=sum(end - start for start, end in rest))
    pieces = [*work, *collectives, *waits, *spans, left]
    classes: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
    for piece in pieces:
        classes[piece.kind] += piece.alone_us * scale
    return {
        "step_s": step_us * scale,
        "on": "gpu" if line.on_gpu else "cpu",
        "classes_s": classes,
        "communication": _by_axis(collectives, steps),
        "idle_s": _added([*spans, left], scale),
        "beside_s": _added(beside, 1e-6),
        "longest": _longest(pieces, steps, line.on_gpu),
    }


def _within(piece: Piece, spans: Sequence[Piece], starts: Sequence[float]) -> bool:
    """Return whether the middle of a piece is in one of the spans, which begin at `starts`."""
    middle = (piece.start + piece.end) / 2
    index = bisect_right(starts, middle) - 1
    return index >= 0 and middle <= spans[index].end


def _give(pieces: list[Piece], free: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Assign free times to the pieces that run then, the first one first; return the remaining free times."""
    pieces.sort(key=lambda one: one.start)
    left: list[tuple[float, float]] = []
    index, until = 0, float("-inf")
    gap = free[0] if free else None
    for piece in pieces:
        begin = max(piece.start, until)
        while gap is not None and gap[1] <= begin:  # free before this piece
            left.append(gap)
            index += 1
            gap = free[index] if index < len(free) else None
        while gap is not None and gap[0] < piece.end and begin < piece.end:
            if gap[0] < begin:
                left.append((gap[0], begin))
            piece.alone_us += min(gap[1], piece.end) - max(gap[0], begin)
            if gap[1] <= piece.end:
                index += 1
                gap = free[index] if index < len(free) else None
            else:
                gap = (piece.end, gap[1])
        until = max(until, piece.end)
    return [*left, *([gap] if gap is not None else []), *free[index + 1 :]]


def _by_axis(pieces: Iterable[Piece], steps: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for piece in pieces:
        row = found.setdefault(piece.axis, {"total_s": 0, "exposed_s": 0, "calls": 0, "bytes": 0})
        row["total_s"] += (piece.end - piece.start) * 1e-6 / steps
        row["exposed_s"] += piece.alone_us * 1e-6 / steps
        row["calls"] += 1 / steps
        row["bytes"] += piece.bytes / steps
    return found


def _added(pieces: Iterable[Piece], scale: float) -> dict[str, float]:
    sums: dict[str, float] = {}
    for piece in pieces:
        sums[piece.label] = sums.get(piece.label, 0.0) + piece.alone_us * scale
    return dict(sorted(((n, s) for n, s in sums.items() if s > 0), key=lambda item: -item[1]))


def _longest(pieces: Iterable[Piece], steps: int, on_gpu: bool) -> list[dict[str, Any]]:
    sums: dict[tuple[str, str], list[float]] = {}
    for piece in pieces:
        row = sums.setdefault((piece.kind, piece.label), [0.0, 0.0])
        row[0] += piece.alone_us
        row[1] += piece.counts
    nothing = "the GPU waits, the host is in" if on_gpu else "no operator runs, the host is in"
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])[:LONGEST]
    return [
        {
            "class": kind,
            "what": f"{nothing} {label!r}" if kind == IDLE else label,
            "s": us * 1e-6 / steps,
            "calls": round(calls / steps, 2),
        }
        for (kind, label), (us, calls) in ordered
        if us > 0
    ]


def line_of(summary: dict[str, Any]) -> str:
    """Return one line with the three largest classes and the longest kernel."""
    step_s = summary["step_s"] or 1.0
    largest = sorted(summary["classes_s"].items(), key=lambda item: -item[1])[:3]
    classes = ", ".join(f"{kind} {s / step_s:.0%}" for kind, s in largest)
    first = next(iter(summary["longest"]), None)
    longest = f"; longest: {first['what']} {first['s'] / step_s:.0%}" if first else ""
    return f"profiled {summary['steps']} steps of {_ms(summary['step_s'])}: {classes}{longest}"


def markdown(summary: dict[str, Any]) -> str:
    """Format the summary as a Markdown page, the largest first.

    Args:
        summary: result of `summarize`, with `rank`, `device`, `first_step` and `steps`.
    """
    step_s = summary["step_s"] or 1.0
    last = summary["first_step"] + summary["steps"] - 1
    beside = ", ".join(f"{name} {_ms(s)}" for name, s in summary["beside_s"].items() if s >= LEAST_S)
    lines = [
        f"# Where the time of a step goes: steps {summary['first_step']} to {last}, rank {summary['rank']}",
        "",
        f"A step took {_ms(summary['step_s'])} on {summary['device']}. Every moment belongs to one row.",
        *([f"Beside all these steps there were {beside}."] if beside else []),
        "",
        "| class | ms a step | share | |",
        "|---|---:|---:|---|",
    ]
    for kind, s in sorted(summary["classes_s"].items(), key=lambda item: -item[1]):
        lines.append(f"| {kind} | {s * 1e3:.3f} | {s / step_s:.1%} | {HINTS[kind]} |")
    lines += ["", "## What took longest", "", "| | class | ms a step | share | calls a step |"]
    lines.append("|---|---|---:|---:|---:|")
    for row in summary["longest"]:
        what = row["what"].replace("|", "\\|")
        share = row["s"] / step_s
        lines.append(f"| {what} | {row['class']} | {row['s'] * 1e3:.3f} | {share:.1%} | {row['calls']:g} |")
    if summary["communication"]:
        lines += ["", "## Communication", "", "| over | ms a step | of it exposed | calls | MiB a step |"]
        lines.append("|---|---:|---:|---:|---:|")
        for axis, row in summary["communication"].items():
            size = row["bytes"] / (1 << 20)
            lines.append(
                f"| {axis} | {row['total_s'] * 1e3:.3f} | {row['exposed_s'] * 1e3:.3f} | "
                f"{row['calls']:g} | {size:.2f} |"
            )
    return "\n".join(lines) + "\n"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.3g} ms"
