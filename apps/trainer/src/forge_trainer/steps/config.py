"""The steps that come with Forge. Imports no torch; `build()` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from forge_trainer.steps.base import Step, StepConfig, steps

if TYPE_CHECKING:
    from forge_parallel.mesh import Mesh
    from torch import nn

    from forge_trainer.steps.update import Update


@steps.register("text")
class TextStepConfig(StepConfig):
    """Next-token training."""

    def build(
        self,
        parts: Sequence[nn.Module],
        loss_fn: Callable[..., Any],
        mesh: Mesh,
        *,
        seed: int = 0,
        update: Update | None = None,
    ) -> Step:
        """See `StepConfig.build`."""
        from forge_trainer.steps.text import TextStep

        return TextStep(parts, loss_fn, mesh, seed, update)
