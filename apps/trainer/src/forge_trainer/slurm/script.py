"""Writes the batch script of a run."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path

from forge_config import ConfigError

from forge_trainer.slurm.config import ClusterConfig
from forge_trainer.slurm.warning import WarningTime, warning_of

LOGS = "slurm"
"""The folder of scripts and logs, beside the runs."""


@dataclass(frozen=True)
class Launch:
    """A job to submit.

    Attributes:
        name: name of the run.
        root: folder of the runs, absolute.
        folder: working directory of the command, absolute.
        command: command of each rank, as words.
        python: Python interpreter that runs `forge after` at the end.
        cluster: settings of the cluster.
        nodes: number of nodes.
        sweep: axes of a grid of runs, each the overrides of one key; a job array has one run for each
            combination, in which the last axis changes fastest. Empty for a single run.
        names: names of the runs of a job array in place of `sweep`, each with a configuration
            `configs/<name>.toml` in `root`.
    """

    name: str
    root: Path
    folder: Path
    command: Sequence[str]
    python: str
    cluster: ClusterConfig
    nodes: int
    sweep: Sequence[Sequence[str]] = field(default=())
    names: Sequence[str] = field(default=())

    @property
    def runs(self) -> list[str]:
        """The names of the runs of a job array; empty for a single run."""
        count = prod(map(len, self.sweep)) if self.sweep else 0
        return [*self.names] or [f"{self.name}-{index}" for index in range(count)]

    @property
    def script(self) -> Path:
        """The path of the batch script."""
        return self.root / LOGS / f"{self.name}.sh"

    @cached_property
    def warning(self) -> WarningTime:
        """The time of SLURM's warning, learned from earlier starts."""
        return warning_of(self.cluster, [self.root / run for run in self.runs or [self.name]])


def batch_script(launch: Launch) -> str:
    """Return the script, of fewer than 60 lines; it may be submitted any number of times.

    Raises:
        ConfigError: a value would leave its `#SBATCH` comment and be executed, or the job would have no log.
    """
    options = list(_options(launch))
    for line in options:
        if not line.isprintable():
            raise ConfigError(f"given {line!r}; expected no control characters in what SLURM is told")
    if "\\" in str(launch.root):
        raise ConfigError(
            f"job.root = {str(launch.root)!r}; expected no backslash, with which SLURM names no log"
        )
    lines = [
        *options,
        *_traps(),
        *_before(launch),
        *_variables(launch.cluster),
        *_run(launch),
        *_after(launch),
    ]
    return "\n".join(lines) + "\n"


def _options(launch: Launch) -> Iterator[str]:
    cluster = launch.cluster
    named = {
        "job-name": launch.name,
        "nodes": launch.nodes,
        "ntasks-per-node": cluster.ranks,
        "gpus-per-node": cluster.gpus_per_node or "",
        "cpus-per-task": cluster.cpus_per_rank,
        "mem": cluster.memory,
        "time": cluster.time,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "reservation": cluster.reservation,
        "signal": f"B:USR1@{launch.warning.seconds}",
        "open-mode": "append",
        "output": str(launch.root / LOGS / launch.name).replace("%", "%%")
        + ("-%A_%a.log" if launch.runs else "-%j.log"),
        "array": f"0-{len(launch.runs) - 1}" if launch.runs else "",
    }
    yield "#!/bin/bash"
    yield from (f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in named.items() if value != "")
    yield f"#SBATCH --{'requeue' if cluster.again == 'requeue' else 'no-requeue'}"
    yield from (f"#SBATCH {option}" for option in cluster.options)
    yield f"# Warned {launch.warning}."


def _traps() -> Iterator[str]:
    yield ""
    yield "# First of all: a warning may come at any time, and without a trap it ends the job for good."
    yield "asked= step="
    yield "# Warnings reach this shell only, and go on to all ranks, which save and leave with exit code 85."
    yield "trap 'asked=1; [ -z \"$step\" ] || kill -USR1 $step' USR1"
    yield "trap 'asked=1' TERM  # the ranks are told by SLURM"


def _before(launch: Launch) -> Iterator[str]:
    yield ""
    yield f"cd {shlex.quote(str(launch.folder))} || exit 78"
    yield from launch.cluster.setup
    yield f"run={shlex.quote(str(launch.root / launch.name))}"
    if launch.sweep:
        yield "overrides=()"
        stride = prod(map(len, launch.sweep))
        for values in launch.sweep:
            stride //= len(values)
            yield f"values=({shlex.join(values)})"
            yield f'overrides+=("${{values[SLURM_ARRAY_TASK_ID / {stride} % {len(values)}]}}")'
        yield "run=$run-$SLURM_ARRAY_TASK_ID"
    if launch.names:
        yield f"names=({shlex.join(launch.names)})"
        yield f'run={shlex.quote(str(launch.root))}/"${{names[SLURM_ARRAY_TASK_ID]}}"'
    if launch.cluster.again == "chain":
        yield from _link(launch)


def _link(launch: Launch) -> Iterator[str]:
    """Yield lines of a link of a chain: it ends if the previous link was cancelled, and submits the next."""
    state = "$(scontrol show job \"$1\" 2>/dev/null | grep -o 'JobState=[A-Z_]*')"
    yield 'if [ -n "$1" ]; then  # the link before this one'
    yield "  for _ in {1..100}; do"
    yield f'    state={state}; [ "$state" = JobState=COMPLETING ] || break; sleep 3'
    yield "  done"
    yield '  [ "$state" != JobState=CANCELLED ] || { echo "job $1 was cancelled: the chain ends"; exit 0; }'
    yield "fi"
    yield "# The next link waits until this one is gone; it is cancelled when the run is complete."
    yield "next="
    yield 'if [ -n "$SLURM_JOB_ID" ] && scontrol show job "$SLURM_JOB_ID" | grep -q BatchFlag=1; then'
    submit = f"sbatch --parsable --dependency=singleton {shlex.quote(str(launch.script))}"
    yield f'  next=$({submit} "$SLURM_JOB_ID")'
    yield "  next=${next%%;*}"
    yield "fi"


def _variables(cluster: ClusterConfig) -> Iterator[str]:
    """Yield lines that set environment variables of the ranks; variables set by the user stay."""
    yield "# From SLURM 22.05 on srun does not take the cores of a task from the job."
    yield f"export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-{cluster.cpus_per_rank}}}"
    if cluster.gpus_per_node:
        unset = '[ -n "$PYTORCH_ALLOC_CONF$PYTORCH_CUDA_ALLOC_CONF" ]'
        yield "# Memory of GPUs in pieces that grow: tensors of changing sizes leave no holes in it."
        yield f"{unset} || export PYTORCH_ALLOC_CONF=expandable_segments:True"


def _run(launch: Launch) -> Iterator[str]:
    overrides = ' --job.name="${run##*/}" "${overrides[@]}"' if launch.sweep else ""
    overrides = ' "${run%/*}/configs/${run##*/}.toml"' if launch.names else overrides
    step = shlex.join(["srun", "--kill-on-bad-exit=1", *launch.cluster.step_options, *launch.command])
    job = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if launch.runs else "$SLURM_JOB_ID"
    yield "# A run stops in time by itself; this is for SLURM versions that do not say when the job ends."
    yield f"end=$(squeue -h -j {job} -o %e 2>/dev/null)"
    yield 'end=${end:+$(date -d "$end" +%s 2>/dev/null)}  # of no text, date would make the last midnight'
    yield "export SLURM_JOB_END_TIME=${SLURM_JOB_END_TIME:-$end}"
    yield '[ -n "$SLURM_JOB_END_TIME" ] || unset SLURM_JOB_END_TIME'
    yield ""
    yield "code=85"
    yield 'if [ -z "$asked" ]; then'
    yield f"  {step}{overrides} &"
    yield "  step=$!"
    yield '  [ -z "$asked" ] || kill -USR1 $step  # it came between the last two lines'
    yield "  while kill -0 $step 2>/dev/null; do wait $step; done  # a signal ends a wait"
    yield "  wait $step; code=$?"
    yield "fi"


def _after(launch: Launch) -> Iterator[str]:
    chained = ' --chained="$next"' if launch.cluster.again == "chain" else ""
    never = " --never" if launch.cluster.again == "never" else ""
    yield "# Says why it ended; runs the job again if that helps."
    yield f'{shlex.quote(launch.python)} -m forge_trainer after "$run" --code=$code{chained}{never}'
