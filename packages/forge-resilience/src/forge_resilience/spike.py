"""Whether the loss has left its range, learnt from the run itself."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from forge_resilience.verdict import Verdict

NORMAL = 1.4826
"""The standard deviation of a normal distribution in units of its median absolute deviation."""

LEAST = 1e-3
"""A spread below this part of the median is taken for this, so that a loss that hardly varies may move."""


class SpikeCounter:
    """Calls a loss a spike if it is far above the median of the last losses that were no spikes.

    Far is `deviations` times the standard deviation as the median absolute deviation estimates it, which
    single outliers do not move (Leys et al. 2013, doi:10.1016/j.jesp.2013.03.013). Nothing is judged before
    there are `window` losses. Losses stay on the device until they are read, all in one copy; decisions do
    not depend on when that is. `NonFiniteCounter` handles losses that are not finite.

    Args:
        deviations: 0 finds no spikes.
        window: number of losses that define the range.
        patience: number of spikes in a row that are trouble.
        read_every_steps: distance of the reads (each waits for the device).
    """

    def __init__(self, deviations: float, window: int, patience: int, read_every_steps: int) -> None:
        self._deviations, self._patience = deviations, patience
        self._read_every_steps = read_every_steps
        self._window: deque[float] = deque(maxlen=window)
        self._pending: list[tuple[int, Tensor]] = []
        self._in_a_row = 0
        self._spikes = 0
        self._trouble: tuple[int, int] | None = None

    def count(self, loss: Tensor, step: int) -> None:
        """Take the loss of a step.

        Args:
            loss: [] of the global batch, the same on every rank.
            step: steps taken so far, this one included.
        """
        if self._deviations:
            self._pending.append((step, loss.detach()))

    def verdict(self, step: int, read: bool = False) -> Verdict:
        """Return ABORT once `patience` losses in a row were spikes.

        Args:
            step: steps taken so far.
            read: read the losses now, because something depends on them, such as a checkpoint.
        """
        if read or step % self._read_every_steps == 0:
            self._read()
        return Verdict.CONTINUE if self._trouble is None else Verdict.ABORT

    def in_a_row(self) -> int:
        """Return how many of the last losses were spikes. Waits for the device."""
        self._read()
        return self._in_a_row

    def spikes(self) -> int:
        """Return the number of spikes of the run. Waits for the device."""
        self._read()
        return self._spikes

    def trouble(self) -> tuple[int, int]:
        """Return the trouble, a row of spikes: its first step, from 0, and the one after its last."""
        assert self._trouble is not None
        return self._trouble

    def _read(self) -> None:
        if self._pending:
            steps, losses = zip(*self._pending, strict=True)
            self._pending = []
            for step, loss in zip(steps, torch.stack(losses).double().tolist(), strict=True):
                self._judge(step, loss)

    def _judge(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            return
        if not self._is_spike(loss):
            self._window.append(loss)
            self._in_a_row = 0
            return
        self._spikes += 1
        self._in_a_row += 1
        if self._in_a_row >= self._patience:
            first = self._trouble[0] if self._trouble is not None else step - self._in_a_row
            self._trouble = (first, step)

    def _is_spike(self, loss: float) -> bool:
        if len(self._window) < (self._window.maxlen or 1):
            return False
        middle, spread = _range_of(self._window)
        return loss > middle + self._deviations * spread

    def state(self) -> dict[str, Any]:
        """State for the checkpoint. Waits for the device."""
        self._read()
        return {
            "window": list(self._window),
            "in_a_row": self._in_a_row,
            "spikes": self._spikes,
            "trouble": self._trouble,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        self._pending = []
        self._window = deque(state["window"], maxlen=self._window.maxlen)
        self._in_a_row, self._spikes = state["in_a_row"], state["spikes"]
        self._trouble = (state["trouble"][0], state["trouble"][1]) if state["trouble"] else None


def _range_of(losses: Iterable[float]) -> tuple[float, float]:
    """Return the median, and the deviation around it."""
    losses = list(losses)
    middle = median(losses)
    spread = NORMAL * median(abs(loss - middle) for loss in losses)
    return middle, max(spread, LEAST * abs(middle))
