"""The steps that come with Forge. Imports no torch; `build()` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from forge_config import Meta

from forge_trainer.steps.base import Step, StepConfig, steps

if TYPE_CHECKING:
    from forge_parallel.mesh import Mesh
    from torch import nn

    from forge_trainer.steps.update import Update


@steps.register("text")
class TextStepConfig(StepConfig):
    """Next-token training.

    Attributes:
        noise_scale_every_steps: steps between measurements of the gradient noise scale; a measured step sums
            gradients over the ranks twice; 0 never measures.
        answers: whether evaluations report the fraction of targets that are the model's likeliest token
            (`accuracy`), and of documents in which all targets are (`answers`), as in greedy decoding.
    """

    noise_scale_every_steps: Annotated[int, Meta(ge=0)] = 0
    answers: bool = False

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
        from forge_trainer.steps.noise_scale import NoiseScaleStep
        from forge_trainer.steps.text import TextStep

        if self.noise_scale_every_steps:
            every = self.noise_scale_every_steps
            return NoiseScaleStep(parts, loss_fn, mesh, seed, update, self.answers, every)
        return TextStep(parts, loss_fn, mesh, seed, update, self.answers)
