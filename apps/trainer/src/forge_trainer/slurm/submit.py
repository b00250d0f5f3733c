"""`forge launch`: checks the job, writes its batch script and submits it."""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from math import prod
from pathlib import Path

from forge_config import ConfigError
from forge_parallel.error import ParallelError
from forge_resilience.exit_codes import ExitCode

from forge_trainer.config.job import Job, load_job
from forge_trainer.run_dir.files import recorded_changes
from forge_trainer.slurm.config import ClusterConfig, load_cluster
from forge_trainer.slurm.script import Launch, batch_script


def launch(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Submit a run, or print its script.

    Raises:
        ConfigError: the job or the cluster file cannot be used, the job does not fit the ranks, or SLURM
            refuses it.
    """
    cluster = load_cluster(options.cluster)
    job = load_job(options.config, overrides).value
    nodes = options.nodes or fewest_nodes(job, cluster)
    sweep = axes_of(options.sweep or [])
    if sweep and cluster.again == "chain":
        raise ConfigError(
            '--sweep with again = "chain": each run of the array would submit all of them; use "requeue" or '
            '"never"'
        )
    for each in product(*sweep):
        one = load_job(options.config, [*overrides, *each]).value
        require_layout(one, nodes * cluster.ranks)
        if not sweep:
            recorded_changes(one, options.change)
    made = Launch(
        name=job.job.name,
        root=Path(job.job.root).absolute(),
        folder=Path.cwd(),
        command=[*cluster.container, *_command(options, overrides)],
        python=sys.executable,
        cluster=cluster,
        nodes=nodes,
        sweep=sweep,
    )
    text = batch_script(made)
    if options.dry_run:
        sys.stdout.write(text)
    if device := options.device or cluster.device:
        too_large = _report_plan(options, overrides, device, nodes, cluster.ranks)
        if too_large and options.strict:
            raise ConfigError(f"{too_large}; without --strict it would be submitted")
    return ExitCode.DONE if options.dry_run else submit_script(made, text)


def _report_plan(
    options: argparse.Namespace, overrides: Sequence[str], device: str, nodes: int, node_ranks: int
) -> str:
    """Print the planned needs and speed of the job before it is submitted.

    Returns:
        A message if the job does not fit; empty if it does.

    Raises:
        ConfigError: there is no such device.
    """
    from forge_trainer.plan.devices import device_of, load_table
    from forge_trainer.plan.record import does_not_fit, record_of, short_lines

    table = load_table()
    device_of(table, device)
    job = load_job(options.config, overrides, on_paper=True).value

    # torch is loaded here and not before
    from forge_trainer.plan.report import as_data, plan_of

    try:
        record = record_of(as_data(plan_of(job, nodes * node_ranks, node_ranks, device, table)))
    except Exception as error:  # what cannot be planned may be trained
        sys.stderr.write(f"{job.job.name} is not planned: {error or type(error).__name__}\n")
        return ""
    sys.stderr.write("\n".join([f"{job.job.name} on paper", *short_lines(record)]) + "\n")
    return does_not_fit(record)


def _command(options: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    flags = [f"--{name}" for name in ("change", "strict") if getattr(options, name)]
    return [sys.executable, "-m", "forge_trainer", "train", str(options.config), *flags, *overrides]


def fewest_nodes(job: Job, cluster: ClusterConfig) -> int:
    """Return the smallest number of nodes that fits the axes of the mesh with a given size."""
    # ep takes no ranks of its own
    axes = (getattr(job.mesh, name) for name in job.mesh.__struct_fields__ if name != "ep")
    return -(-prod(size for size in axes if size > 0) // cluster.ranks)


def require_layout(job: Job, ranks: int) -> None:
    """Check that a job can be arranged on a number of ranks.

    Raises:
        ConfigError: it cannot.
    """
    try:
        job.require_layout(ranks)
    except ParallelError as error:
        raise ConfigError(f"{ranks} ranks: {error}") from None


def axes_of(sweeps: Sequence[str]) -> list[list[str]]:
    """Return the axes of a grid of runs: for each key, one override for each value.

    Args:
        sweeps: texts such as `optimizer.lr=1e-3,2e-3`.

    Raises:
        ConfigError: a text does not have this form, or two have the same key.
    """
    axes = [_values(text) for text in sweeps]
    names = [values[0].partition("=")[0] for values in axes]
    if len(set(names)) < len(names):
        raise ConfigError(f"--sweep of {', '.join(names)}; expected each key once")
    return axes


def _values(text: str) -> list[str]:
    """Split `optimizer.lr=1e-3,2e-3` into one override for each value."""
    key, equals, values = text.partition("=")
    if not equals or not values or set(values) & set("[]{}\"'"):
        raise ConfigError(f"--sweep={text}; expected section.key=value,value,... of plain values")
    return [f"--{key.lstrip('-')}={value}" for value in values.split(",")]


def submit_script(launch: Launch, text: str) -> int:
    """Write a batch script and submit it.

    Raises:
        ConfigError: SLURM refuses it.
    """
    launch.script.parent.mkdir(parents=True, exist_ok=True)
    partial = launch.script.with_suffix(f".{os.getpid()}")
    partial.write_text(text)
    partial.replace(launch.script)
    try:
        result = subprocess.run(
            ["sbatch", "--parsable", str(launch.script)], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise ConfigError(f"sbatch cannot be started ({error}); is this a login node of a cluster?") from None
    if result.returncode:
        raise ConfigError(f"SLURM refuses {launch.script}: {result.stderr.strip()}")
    job = result.stdout.strip().partition(";")[0]
    sys.stdout.write(f"job {job}: {launch.nodes} nodes of {launch.cluster.ranks} ranks, {launch.script}\n")
    sys.stdout.write(
        f"  log     {launch.script.parent / launch.name}-{job}{'_*' if launch.runs else ''}.log\n"
    )
    sys.stdout.write(f"  warned  {launch.warning}\n")
    watched = launch.root if launch.names else f"{launch.root / launch.name}{'-N' if launch.sweep else ''}"
    sys.stdout.write(f"  watch   forge status {watched}\n")
    return ExitCode.DONE
