"""The section `[checkpoint]`. Imports no torch."""

from collections.abc import Iterator
from math import ceil
from typing import Annotated, Literal

from forge_config import ALL_KEYS, Config, Meta


class DenseConfig(Config):
    """One entry of `[[checkpoint.dense]]`: a window of steps with further checkpoints that are kept for good.

    Attributes:
        to_step: the last step of the window.
        from_step: its first step.
        every: distance of the steps in it, counted from `from_step`; or "powers_of_two".
    """

    free_keys = (ALL_KEYS,)

    to_step: Annotated[int, Meta(ge=1)]
    from_step: Annotated[int, Meta(ge=1)] = 1
    every: Annotated[int, Meta(ge=1)] | Literal["powers_of_two"] = "powers_of_two"

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.to_step < self.from_step:
            yield f"to_step = {self.to_step} is before from_step = {self.from_step}"
        if self.every == "powers_of_two" and self.to_step.bit_length() == (self.from_step - 1).bit_length():
            yield f"there is no power of two from {self.from_step} to {self.to_step}"

    def holds(self, step: int) -> bool:
        """Whether a step is one of the window."""
        if not self.from_step <= step <= self.to_step:
            return False
        if self.every == "powers_of_two":
            return step & (step - 1) == 0
        return (step - self.from_step) % self.every == 0


class CheckpointConfig(Config):
    """When checkpoints are written and which are kept.

    Attributes:
        every_steps: distance of checkpoints; the last step is always saved. "auto" computes it from the
            measured time that training waits for one, and the measured rate of failures.
        asynchronous: training waits only until its state is copied to host memory, and goes on while it is
            written; where there is no memory for a copy, it waits and says so.
        keep: number of newest checkpoints that are kept, beside those kept for good; at least 2, so that
            there is one to fall back to.
        keep_every_steps: checkpoints at multiples of this are saved as well, and kept for good; 0 keeps none.
        keep_initial: save the initial state as step 0, and keep it for good.
        keep_growing: save steps that grow by this factor (1, 2, 4, ... for 2) as well, and keep them.
        dense: windows of steps that are saved as well, and kept for good.
    """

    free_keys = (ALL_KEYS,)

    every_steps: Annotated[int, Meta(ge=1)] | Literal["auto"] = 1000
    asynchronous: bool = True
    keep: Annotated[int, Meta(ge=2)] = 3
    keep_every_steps: Annotated[int, Meta(ge=0)] = 0
    keep_initial: bool = False
    keep_growing: Annotated[float, Meta(ge=1.01, le=1e6)] | None = None
    dense: tuple[DenseConfig, ...] = ()

    def is_dense(self, step: int) -> bool:
        """Whether a step stays for good though it is no multiple of `keep_every_steps`."""
        if step == 0:
            return self.keep_initial
        return any(window.holds(step) for window in self.dense) or self._grows_to(step)

    def _grows_to(self, step: int) -> bool:
        if self.keep_growing is None:
            return False
        reached = 1
        while reached < step:
            reached = max(reached + 1, ceil(reached * self.keep_growing))
        return reached == step
