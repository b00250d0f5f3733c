"""How a non-finite step leaves no trace, decided on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forge_resilience.verdict import Verdict

LAST_STEPS = 2
"""A run whose last so many steps were all not finite has not ended well; one may happen to any run."""

_COUNTS = ("in_a_row", "worst", "skipped", "worst_end")


class BuffersBefore:
    """The persistent buffers of a model as they were before a step, so that a skipped step can leave them so.

    What a forward pass or an update between backward and optimizer writes (running statistics, the bias of a
    router) may be NaN like the gradient. Costs a copy of the buffers a step; nothing for a model without any.

    Args:
        model: before the first forward pass of the step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._copies = [
            (module, name, _local(buffer).detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]

    @torch.no_grad()
    def restore_unless(self, finite: Tensor) -> None:
        """Bring them back if the step was not finite, on the device; also those that were bound anew.

        Args:
            finite: [] bool, the same on every rank.
        """
        for module, name, before in self._copies:
            now = _local(getattr(module, name))
            assert now.shape == before.shape, f"buffer {name} changed its shape within a step"
            now.copy_(torch.where(finite, now, before))


def _local(tensor: Any) -> Tensor:
    """The part of a DTensor that this rank holds; other tensors as they are."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def step_if_finite(optimizer: Optimizer, finite: Tensor, buffers: BuffersBefore | None = None) -> None:
    """Take the optimizer step, or leave parameters, moments and step counters bit for bit as they are.

    Uses the `found_inf` protocol of torch.amp for optimizers that know it (fused Adam, AdamW, SGD): no host
    sync. For others the flag is read on the host, once a step: their counters may be plain Python numbers,
    which nothing on the device can bring back, and a second copy of parameters and moments would cost more
    than the wait. An optimizer of one's own avoids it by the protocol: `_step_supports_amp_scaling = True`,
    and a `step` that does nothing where its `found_inf` ([] float32) is not 0.

    Never multiplies by zero: 0 * inf is NaN.

    Args:
        optimizer: with gradients in place.
        finite: [] bool, the same on every rank.
        buffers: buffers to bring back as well.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
    elif finite.item():
        optimizer.step()
    if buffers is not None:
        buffers.restore_unless(finite)


class NonFiniteCounter:
    """Counts steps that were not finite, on the device, and reads the counts every few steps.

    Args:
        patience: so many bad steps in a row end the run.
        read_every_steps: distance of the reads (each waits for the device).
    """

    def __init__(self, patience: int, read_every_steps: int) -> None:
        self._patience = patience
        self._read_every_steps = read_every_steps
        # In a row now, in a row at worst, in all, and where the worst row ended.
        self._counts: list[Tensor] = [torch.zeros((), dtype=torch.int64) for _ in _COUNTS]
        self._spent = False

    def count(self, finite: Tensor, step: int = 0) -> None:
        """Count a step.

        Args:
            finite: [] bool of the step just taken.
            step: steps taken so far, this one included.
        """
        in_a_row, worst, skipped, ended = (counts.to(finite.device) for counts in self._counts)
        in_a_row = torch.where(finite, 0, in_a_row + 1)
        ended = torch.where(in_a_row > worst, step, ended)
        self._counts = [in_a_row, torch.maximum(worst, in_a_row), skipped + ~finite, ended]

    def verdict(self, step: int, read: bool = False, last: bool = False) -> Verdict:
        """ABORT once `patience` steps in a row were not finite, or all of the last steps of the run.

        Args:
            step: steps taken so far.
            read: read the counts now, as something depends on them: a checkpoint, for one.
            last: the run is complete with this step.
        """
        if self._spent:
            return Verdict.ABORT
        if read or last or step % self._read_every_steps == 0:
            in_a_row, worst = (int(counts) for counts in self._counts[:2])
            self._spent = worst >= self._patience or (last and in_a_row >= LAST_STEPS)
        return Verdict.ABORT if self._spent else Verdict.CONTINUE

    def skipped(self) -> int:
        """Steps of the run that were not finite. Waits for the device."""
        return int(self._counts[2])

    def in_a_row(self) -> int:
        """How many of the last steps were not finite. Waits for the device."""
        return int(self._counts[0])

    def worst_steps(self) -> tuple[int, int]:
        """The longest row of steps that were not finite: its first, from 0, and the one behind its last."""
        worst, ended = int(self._counts[1]), int(self._counts[3])
        return ended - worst, ended

    def state(self) -> dict[str, int]:
        """State for the checkpoint. Waits for the device."""
        return {name: int(counts) for name, counts in zip(_COUNTS, self._counts, strict=True)}

    def load_state(self, state: dict[str, int]) -> None:
        """Go on from a checkpoint: a run that was ended does not start again with a clean slate."""
        self._counts = [torch.tensor(state.get(name, 0)) for name in _COUNTS]
        self._spent = False
        self._spent = state["worst"] >= self._patience
