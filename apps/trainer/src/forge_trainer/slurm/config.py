"""The cluster file of `forge launch`. Imports no torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from forge_config import Config, ConfigError, Meta, load

EARLY_S = 60
"""The most seconds that a signal may come early: SLURM checks limits once a minute."""

UNMEASURED_S = 120
"""The warning time of a run that has not measured yet how long a stop takes."""


class ClusterConfig(Config):
    """A cluster: where a run is submitted, and the resources of its ranks.

    Attributes:
        gpus_per_node: GPUs of a node, with one rank each; 0 computes on CPUs.
        ranks_per_node: ranks of a node of a cluster without GPUs.
        device: name of its GPUs in the table of `forge plan`, such as `h100`, so that a submission reports
            whether the job fits; empty if they are in no table.
        cpus_per_rank: cores of each rank, also for the workers that read data.
        memory: memory of a node in the format of `sbatch --mem`, such as `200G`; empty for the default of the
            partition, "0" for all memory.
        time: time limit of one start in the format of `sbatch --time`; the run continues in further starts.
        partition: partition of the cluster; empty for its default, as the next four.
        account: account that pays.
        qos: quality of service.
        constraint: features that nodes must have.
        reservation: name of a reservation of nodes.
        options: further options of sbatch, such as `--exclusive`.
        setup: lines of bash before the run, such as `module load cuda`.
        container: words before the command of each rank: `["apptainer", "exec", "--nv", "forge.sif"]`.
        step_options: options of srun, such as `--container-image=forge.sqsh` of pyxis.
        again: how the job runs again if it ends before the run does: `requeue` puts the same job back into
            the queue; `chain` submits the next job at the start of each, for clusters that forbid
            requeueing; `never` leaves it to the user.
        warning_s: seconds before the time limit at which SLURM sends a signal (or up to a minute earlier);
            default the measured time of a stop in earlier starts, with a margin. The run stops in time by
            itself, as it measures its saves; the signal is for a limit that was lowered.
    """

    gpus_per_node: Annotated[int, Meta(ge=0)] = 4
    ranks_per_node: Annotated[int, Meta(ge=1)] = 1
    device: str = ""
    cpus_per_rank: Annotated[int, Meta(ge=1)] = 4
    memory: str = ""
    time: str = "24:00:00"
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    options: list[str] = []
    setup: list[str] = []
    container: list[str] = []
    step_options: list[str] = []
    again: Literal["requeue", "chain", "never"] = "requeue"
    warning_s: Annotated[int, Meta(ge=1)] | None = None

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        for name in ("memory", "time", "partition", "account", "qos", "constraint", "reservation"):
            if any(letter.isspace() for letter in getattr(self, name)):
                yield f"{name} = {getattr(self, name)!r} has white space in it"
        warning_s = self.warning_s or UNMEASURED_S
        if (limit_s := seconds(self.time)) is not None and limit_s < warning_s + EARLY_S:
            yield (
                f"time = {self.time!r} with warning_s = {warning_s}: SLURM may send the warning up to "
                f"{EARLY_S} s earlier, before the run begins; expected at least {warning_s + EARLY_S} "
                "s, or a shorter warning"
            )
        for option in [*self.options, *self.step_options]:
            if not option.startswith("-") or "\n" in option:
                yield f"{option!r} is no option; each is one word that begins with -"

    @property
    def ranks(self) -> int:
        """The ranks of a node."""
        return self.gpus_per_node or self.ranks_per_node


def seconds(time: str) -> int | None:
    """Parse a limit in the format of `sbatch --time` to seconds; None if there is none, or no numbers.

    The forms are M, M:S, H:M:S, D-H, D-H:M and D-H:M:S.
    """
    days, dash, rest = time.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, secs = [*numbers, 0, 0][:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + secs
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    return numbers[0] * 60 + sum(numbers[1:])


class ClusterFile(Config):
    """A file of `configs/clusters/`.

    Attributes:
        cluster: its only section.
    """

    cluster: ClusterConfig


def load_cluster(path: Path | str) -> ClusterConfig:
    """Read a cluster file.

    Raises:
        ConfigError: the file cannot be read or used.
    """
    if not Path(path).is_file():
        raise ConfigError(f"{path} is no file; give one like configs/clusters/generic.toml with --cluster")
    return load(ClusterFile, path).value.cluster
