"""How a non-finite step leaves no trace, decided on the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from forge_resilience.verdict import Verdict


def step_if_finite(optimizer: Optimizer, finite: Tensor) -> None:
    """Take the optimizer step, or leave parameters, moments and step counters bit for bit as they are.

    Uses the `found_inf` protocol of torch.amp for optimizers that know it (fused Adam, AdamW, SGD): no host
    sync. For others the flag is read on the host once. Never multiplies by zero: 0 * inf is NaN.

    Args:
        optimizer: with gradients in place.
        finite: [] bool, the same on every rank.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
    elif finite.item():
        optimizer.step()


class FiniteGuard:
    """Counts steps in a row that were not finite, on the device, and reads the count every few steps.

    Args:
        patience: so many bad steps in a row end the run.
        read_every_steps: distance of the reads (each waits for the device).
    """

    def __init__(self, patience: int, read_every_steps: int) -> None:
        self._patience = patience
        self._read_every_steps = read_every_steps
        self._bad: Tensor | None = None
        self._worst: Tensor | None = None

    def verdict(self, step: int, finite: Tensor) -> Verdict:
        """ABORT once `patience` steps in a row were not finite; told at the next read.

        Args:
            step: steps taken so far.
            finite: [] bool of the step just taken.
        """
        if self._bad is None or self._worst is None:
            self._bad = self._worst = torch.zeros((), dtype=torch.int32, device=finite.device)
        self._bad = torch.where(finite, 0, self._bad + 1)
        self._worst = torch.maximum(self._worst, self._bad)
        if step % self._read_every_steps == 0 and int(self._worst) >= self._patience:
            return Verdict.ABORT
        return Verdict.CONTINUE
