"""A study as one SLURM array: a task for each run that is left."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from forge_config import ConfigError
from forge_resilience.exit_codes import ExitCode

from forge_trainer.slurm.config import load_cluster
from forge_trainer.slurm.script import Launch, batch_script
from forge_trainer.slurm.submit import fewest_nodes, require_layout, submit_script
from forge_trainer.study.points import Point


def submit(options: argparse.Namespace, name: str, points: Sequence[Point], root: Path) -> int:
    """Submit runs, or print their batch script.

    Raises:
        ConfigError: a run does not fit the ranks, or SLURM refuses the script.
    """
    cluster = load_cluster(options.cluster)
    if not points:
        sys.stdout.write(f"{name}: nothing is left to run\n")
        return ExitCode.DONE
    if cluster.again == "chain":
        raise ConfigError(
            'a study with again = "chain": use "requeue" or "never", one job is an array of runs'
        )
    nodes = options.nodes or max(fewest_nodes(point.job, cluster) for point in points)
    for point in points:
        require_layout(point.job, nodes * cluster.ranks)
    made = Launch(
        name=name,
        root=root,
        folder=Path.cwd(),
        command=[*cluster.container, sys.executable, "-m", "forge_trainer", "train"],
        python=sys.executable,
        cluster=cluster,
        nodes=nodes,
        names=[point.name for point in points],
    )
    text = batch_script(made)
    if options.dry_run:
        sys.stdout.write(text)
        return ExitCode.DONE
    return submit_script(made, text)
