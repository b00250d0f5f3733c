"""What `[checkpoint]` holds. Imports no torch."""

from typing import Annotated, Literal

from forge_config import ALL_KEYS, Config, Meta


class CheckpointConfig(Config):
    """When checkpoints are written and which are kept.

    Attributes:
        every_steps: distance of checkpoints; the last step is always saved. "auto" follows from how long
            training waits for one and how often the run has failed, as measured.
        asynchronous: training waits only until its state is copied to host memory, and goes on while it is
            written; where memory does not suffice for a copy, it waits, and says so.
        keep: newest checkpoints that stay; at least 2, so that there is one to fall back to.
        keep_every_steps: checkpoints at multiples of this stay for good; 0 keeps none.
    """

    free_keys = (ALL_KEYS,)

    every_steps: Annotated[int, Meta(ge=1)] | Literal["auto"] = 1000
    asynchronous: bool = True
    keep: Annotated[int, Meta(ge=2)] = 3
    keep_every_steps: Annotated[int, Meta(ge=0)] = 0
