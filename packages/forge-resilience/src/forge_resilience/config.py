"""The section `[resilience]`. Imports no torch."""

from typing import Annotated

from forge_config import ALL_KEYS, Config, Meta


class ResilienceConfig(Config):
    """When a run ends before its last step.

    Attributes:
        max_runtime_s: seconds from the start of the process to its end, within which the run saves and stops;
            SLURM's own limit always holds.
        save_margin_s: least time kept for the last checkpoint; grows with the measured saves. Measured time
            for another step and for the hooks is kept beside it.
        max_bad_steps: number of steps in a row with a non-finite loss or gradient that are trouble; at the
            end of a run, two are enough.
        repeat_bad_steps: when the count is read and the last step was not finite, repeat it from the same
            inputs, which tells faulty hardware from bad data.
        spike_deviations: a loss is a spike if it is this many standard deviations above the median of the
            last `spike_window` losses; 0 looks for none.
        spike_window: number of losses that define the usual range.
        spike_steps: number of spikes in a row that are trouble.
        max_rollbacks: number of times that trouble within a thousand steps sends the run back to an earlier
            checkpoint, without the data that caused it; then the run ends. 0 ends it at once.
        rollback_margin_steps: the checkpoint lies at least this many steps before the trouble, and this many
            steps before and after the trouble are left out as well.
        compare_copies_every_steps: distance of the steps at which replicas (`mesh.dp_replicate`) compare
            their weights bit for bit; they also do before each checkpoint. Different copies send the run back
            to when they were equal. 0 never compares.
        compare_speed_every_steps: distance of the steps at which the ranks compare how long each waits for
            data and takes for the same small computation, look at the health of the GPUs, and check that sums
            over ranks are right (at the start too); 0 never does.
        collective_timeout_s: how long a rank waits for the others in a collective before it fails, in every
            group. The watchdog, which reports more, is quicker where it is on.
        watchdog: a process beside each rank ends the run when something hangs, and reports what.
        hang_least_s: shortest time after which a phase hangs; the limit is ten times its longest duration.
        hang_first_s: how long the first phase of a kind may take, because it may compile, or load.
        check_every_steps: distance of the steps at which counts and losses are read from the device; they
            also are before each checkpoint.
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
