"""Reads a trace of torch's profiler as pieces of time with their kinds. Imports no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from forge_trainer.profile.classes import (
    COMMUNICATION,
    IDLE,
    OPTIMIZER,
    OPTIMIZER_MARK,
    class_of_kernel,
    class_of_operator,
    short,
)

WINDOW_MARK = "forge: window"
"""The name of the mark over all steps of a window."""

SPAN_MARK = "forge span: "
"""The prefix of the names of marks for clock spans."""

_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver", "hip_runtime"}
_BACKENDS = ("gloo:", "nccl:", "mpi:", "ucc:")
_BYTES = {
    "float": 4,
    "double": 8,
    "half": 2,
    "bfloat16": 2,
    "long": 8,
    "int": 4,
    "char": 1,
    "byte": 1,
    "bool": 1,
}


class Event(msgspec.Struct):
    """An event of the trace; times in microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}

    @property
    def end(self) -> float:
        """The end of the event."""
        return self.ts + self.dur


class _Trace(msgspec.Struct):
    traceEvents: list[Event]


@dataclass
class Piece:
    """An activity from `start` to `end`, in microseconds.

    Attributes:
        kind: one of `CLASSES`.
        label: name of the activity; pieces with the same label are added up.
        axis: axis of a collective; empty for a wait.
        bytes: bytes that a rank receives in a communication, if the trace contains them.
        alone_us: time assigned to this piece, see `forge_trainer.profile.summary`.
        counts: whether it counts as a call; only the first part of an operator does.
    """

    start: float
    end: float
    kind: str
    label: str
    axis: str = ""
    bytes: int = 0
    alone_us: float = 0.0
    counts: bool = True


@dataclass
class Timeline:
    """Work, communication and spans of a profiled window.

    Attributes:
        start: start of the window, in microseconds.
        end: end of the window, in microseconds.
        on_gpu: whether the pieces ran on a GPU.
        work: all pieces except communication.
        communication: collectives, and waits for them.
        spans: clock spans of the host, one after the other.
    """

    start: float
    end: float
    on_gpu: bool
    work: list[Piece] = field(default_factory=list)
    communication: list[Piece] = field(default_factory=list)
    spans: list[Piece] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Add a piece, clipped to the window."""
        piece.start, piece.end = max(piece.start, self.start), min(piece.end, self.end)
        if piece.end > piece.start:
            (self.communication if piece.kind == COMMUNICATION else self.work).append(piece)


def read(path: Path, axis_of: Callable[[str, str], str]) -> Timeline:
    """Read a trace in Chrome's format.

    Args:
        path: path of the JSON.
        axis_of: returns the axis of a collective from the name of its process group (empty if the trace has
            none) and the clock span in which it began.

    Raises:
        ValueError: the file is incomplete, or contains no window.
    """
    events = [e for e in msgspec.json.decode(path.read_bytes(), type=_Trace).traceEvents if e.ph == "X"]
    window = next((e for e in events if e.name == WINDOW_MARK and e.cat == "user_annotation"), None)
    if window is None:
        raise ValueError(f"{path} holds no mark {WINDOW_MARK!r}")
    on_gpu = any(event.cat in _ON_DEVICE for event in events)
    line = Timeline(window.ts, window.end, on_gpu)
    marks = [e for e in events if e.name.startswith(SPAN_MARK) and e.cat == "user_annotation"]
    for mark in sorted(marks, key=lambda one: one.ts):
        name = mark.name.removeprefix(SPAN_MARK)
        line.spans.append(Piece(max(mark.ts, line.start), min(mark.end, line.end), IDLE, name))
    starts = [span.start for span in line.spans]

    def span_at(time: float) -> str:
        index = bisect_right(starts, time) - 1
        return line.spans[index].label if index >= 0 and time <= line.spans[index].end else ""

    for piece in _of_gpu(events, axis_of) if on_gpu else _of_cpu(events, axis_of, span_at):
        line.add(piece)
    return line


def _of_gpu(events: list[Event], axis_of: Callable[[str, str], str]) -> Iterator[Piece]:
    """Yield kernels, copies and fills; the launch time tells whether the optimizer started one."""
    optimizer = [
        (e.ts, e.end) for e in events if e.name.startswith(OPTIMIZER_MARK) and e.cat == "user_annotation"
    ]
    launched = {e.args.get("correlation"): e.ts for e in events if e.cat in _LAUNCHES}
    operators = {e.args.get("External id"): e for e in events if e.cat == "cpu_op"}
    for event in events:
        if event.cat not in _ON_DEVICE:
            continue
        at = launched.get(event.args.get("correlation"), -1.0)
        kind = class_of_kernel(event.name, any(start <= at <= end for start, end in optimizer))
        if kind == COMMUNICATION:
            collective = str(event.args.get("Collective name") or short(event.name))
            axis = axis_of(str(event.args.get("Process Group Name", "")), "")
            size = int(event.args.get("Out msg nelems") or 0) * _bytes_of(event.args.get("dtype"))
            yield Piece(event.ts, event.end, kind, f"{collective} over {axis}", axis, size)
            continue
        operator = operators.get(event.args.get("External id"))
        by = f" from {_named(operator)}" if operator is not None and kind != OPTIMIZER else ""
        yield Piece(event.ts, event.end, kind, short(event.name) + by)


def _of_cpu(
    events: list[Event], axis_of: Callable[[str, str], str], span_at: Callable[[float], str]
) -> Iterator[Piece]:
    """Yield operators with self time only, and collectives, which run in parallel."""
    threads: dict[int | str, list[Event]] = {}
    for event in events:
        if event.name.startswith(_BACKENDS):
            axis, collective = axis_of("", span_at(event.ts)), event.name.partition(":")[2]
            yield Piece(event.ts, event.end, COMMUNICATION, f"{collective} over {axis}", axis, _size(event))
        elif event.cat == "cpu_op" or event.name.startswith(OPTIMIZER_MARK):
            threads.setdefault(event.tid, []).append(event)
    for mine in threads.values():
        for event, path, start, end, first in alone(mine):
            kind = class_of_operator(path)
            label = "waiting for a collective" if kind == COMMUNICATION else _named(event)
            yield Piece(start, end, kind, label, counts=first)


def alone(events: Iterable[Event]) -> Iterator[tuple[Event, tuple[str, ...], float, float, bool]]:
    """Yield the times of nested events of one thread in which no inner event runs.

    Yields:
        The event, the names of outer events and its own, start, end, and whether it is the first part.
    """
    stack: list[tuple[Event, tuple[str, ...]]] = []
    at, fresh = 0.0, False
    for event in sorted(events, key=lambda one: (one.ts, -one.dur)):
        while stack and stack[-1][0].end <= event.ts:
            top, path = stack.pop()
            yield top, path, at, max(at, top.end), fresh
            at, fresh = max(at, top.end), False
        if stack:
            yield *stack[-1], at, event.ts, fresh
        stack.append((event, (*(stack[-1][1] if stack else ()), event.name)))
        at, fresh = event.ts, True
    while stack:
        top, path = stack.pop()
        yield top, path, at, max(at, top.end), fresh
        at, fresh = max(at, top.end), False


def _named(event: Event) -> str:
    """Return the name of an operator with the shapes of its first two inputs of two dims or more."""
    dims = [d for d in event.args.get("Input Dims") or () if isinstance(d, list) and len(d) > 1]
    shapes = [str(d) for d in dims[:2] if all(isinstance(size, int) for size in d)]
    return f"{event.name} {' x '.join(shapes)}".rstrip()


def _size(event: Event) -> int:
    """Return the bytes of the inputs of a collective on a CPU, if the trace has their shapes."""
    shapes: list[Any] = event.args.get("Input Dims") or []
    kinds: list[Any] = event.args.get("Input type") or []
    return sum(_elements(dims) * _bytes_of(kind) for dims, kind in zip(shapes, kinds, strict=False))


def _elements(dims: list[Any]) -> int:
    """Count the elements of a tensor, or of all tensors of a list."""
    if any(isinstance(one, list) for one in dims):
        return sum(_elements(one) for one in dims)
    return prod(dims)


def _bytes_of(kind: object) -> int:
    return _BYTES.get(str(kind).lower().removeprefix("c10::").removesuffix(" int"), 0)
