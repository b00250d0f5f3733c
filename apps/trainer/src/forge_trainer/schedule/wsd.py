"""Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395 eq. 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from forge_config import Meta, part_of

from forge_trainer.schedule.base import ScheduleConfig, cosine, schedules

SHAPES = {
    "cosine": cosine,
    "linear": lambda progress: 1 - progress,
    "1-sqrt": lambda progress: 1 - math.sqrt(progress),
}


@schedules.register("wsd")
class WSDConfig(ScheduleConfig):
    """The peak for most of the run, then a decay that ends with it.

    Before the decay, nothing depends on the length of the run: it can be extended, or `forge branch` can
    start a decay from one of its checkpoints.

    Attributes:
        decay_steps: length of the decay; default `decay_fraction` of all steps.
        decay_fraction: length of the decay as a fraction of all steps, if `decay_steps` is absent.
        shape: shape of the decay; `1-sqrt` is from Hägele et al. 2024, arXiv:2405.18392 eq. 1.
        floor: end of the decay, as a fraction of the peak.
    """

    decay_steps: Annotated[int, Meta(ge=0)] | None = None
    decay_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.2
    shape: Literal["cosine", "linear", "1-sqrt"] = "1-sqrt"
    floor: Annotated[float, Meta(ge=0, le=1)] = 0.0

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        yield from super().contradictions()
        if self.decay_steps == 1:
            yield (
                "decay_steps = 1 would be the peak once more, at which a decay begins; use 0, or 2 and more"
            )

    def after(self, step: int, steps: int, warmup: int) -> float:
        """See `ScheduleConfig.after`."""
        wanted = part_of(self.decay_fraction, steps) if self.decay_steps is None else self.decay_steps
        length = min(wanted, steps - warmup)
        progress = (step - (steps - length)) / max(1, length)
        return (
            1.0 if progress <= 0 else self.floor + (1 - self.floor) * SHAPES[self.shape](min(1.0, progress))
        )
