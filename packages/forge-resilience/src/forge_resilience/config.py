"""What `[resilience]` holds. Imports no torch."""

from typing import Annotated

from forge_config import ALL_KEYS, Config, Meta


class ResilienceConfig(Config):
    """When a run ends before its last step.

    Attributes:
        max_runtime_s: seconds from the start of the process to its end, within which the run saves and stops;
            SLURM's own limit is always respected.
        save_margin_s: least time kept for the last checkpoint; grows with the saves measured. Time for
            another step and for the hooks is kept beside it, as measured.
        max_bad_steps: so many steps in a row with a non-finite loss or gradient end the run; so does a run
            whose last two steps are such ones.
        watchdog: a process beside each rank ends the run when something hangs, and says what.
        hang_least_s: nothing is called hung before; otherwise ten times the longest of its kind so far.
        hang_first_s: how long something may take that comes for the first time: it may compile, or load.
        check_every_steps: how often that count is read from the device; it also is before each checkpoint.
    """

    free_keys = (ALL_KEYS,)

    max_runtime_s: Annotated[float, Meta(gt=0)] | None = None
    save_margin_s: Annotated[float, Meta(ge=0)] = 30.0
    max_bad_steps: Annotated[int, Meta(ge=1)] = 10
    watchdog: bool = True
    hang_least_s: Annotated[float, Meta(gt=0)] = 300.0
    hang_first_s: Annotated[float, Meta(gt=0)] = 3600.0
    check_every_steps: Annotated[int, Meta(ge=1)] = 10
