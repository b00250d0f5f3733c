"""The section `[resilience]`. Imports no torch."""

from typing import Annotated

from forge_config import ALL_KEYS, Config, Meta


class ResilienceConfig(Config):
    """When a run ends before its last step.

    Attributes:
        max_runtime_s: seconds from the start of the process to its end, within which the run saves and stops;
            SLURM's own limit is always respected.
        save_margin_s: least time kept for the last checkpoint; grows with the saves measured. Time for
            another step and for the hooks is kept beside it, as measured.
        max_bad_steps: so many steps in a row with a non-finite loss or gradient are trouble; so are the last
            two steps of a run, if they are such ones.
        repeat_bad_steps: where the count is read and the last step was not finite, it is taken once more from
            the same inputs, which tells faulty hardware from data.
        spike_deviations: a loss so many standard deviations above the median of the last `spike_window` ones
            is a spike; 0 looks for none.
        spike_window: losses that say what is usual.
        spike_steps: so many spikes in a row are trouble.
        max_rollbacks: how often trouble within a thousand steps of each other sends the run back to a
            checkpoint from before, without the data that caused it; then it ends. 0 ends it at once.
        rollback_margin_steps: how many steps before the trouble that checkpoint lies at least, and as many
            steps before and after the trouble are left out as well.
        compare_copies_every_steps: replicas (`mesh.dp_replicate`) compare their weights bit for bit so often,
            and before each checkpoint; copies that differ send the run back to when they were the same. 0
            never compares.
        compare_speed_every_steps: the ranks compare so often how long each waits for data and takes for the
            same small computation, look at the health of the GPUs, and check, at the start too, that sums
            over ranks are right; 0 never does.
        collective_timeout_s: so long a rank waits for the others in a collective before it fails; every
            group has it. The watchdog, which says more, is quicker where it is on.
        watchdog: a process beside each rank ends the run when something hangs, and says what.
        hang_least_s: nothing is called hung before; otherwise ten times the longest of its kind so far.
        hang_first_s: how long something may take that comes for the first time: it may compile, or load.
        check_every_steps: how often counts and losses are read from the device; they also are before each
            checkpoint.
    """

    free_keys = (ALL_KEYS,)

    max_runtime_s: Annotated[float, Meta(gt=0)] | None = None
    save_margin_s: Annotated[float, Meta(ge=0)] = 30.0
    max_bad_steps: Annotated[int, Meta(ge=1)] = 10
    repeat_bad_steps: bool = True
    spike_deviations: Annotated[float, Meta(ge=0)] = 0.0
    spike_window: Annotated[int, Meta(ge=8)] = 128
    spike_steps: Annotated[int, Meta(ge=1)] = 5
    max_rollbacks: Annotated[int, Meta(ge=0)] = 3
    rollback_margin_steps: Annotated[int, Meta(ge=0)] = 0
    compare_copies_every_steps: Annotated[int, Meta(ge=0)] = 100
    compare_speed_every_steps: Annotated[int, Meta(ge=0)] = 100
    collective_timeout_s: Annotated[float, Meta(gt=0)] = 1800.0
    watchdog: bool = True
    hang_least_s: Annotated[float, Meta(gt=0)] = 300.0
    hang_first_s: Annotated[float, Meta(gt=0)] = 3600.0
    check_every_steps: Annotated[int, Meta(ge=1)] = 10
