"""Submits a study as SLURM arrays, one for each layout, with a task for each remaining run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from forge_config import ConfigError
from forge_resilience.exit_codes import ExitCode
from msgspec import structs

from forge_trainer.slurm.config import ClusterConfig, load_cluster
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
    groups: dict[tuple[int, int], list[Point]] = {}
    for point in points:
        groups.setdefault(layout_of(point, cluster, options.nodes), []).append(point)
    for (nodes, ranks), members in groups.items():
        shrunk = structs.replace(cluster, gpus_per_node=cluster.gpus_per_node and ranks, ranks_per_node=ranks)
        made = Launch(
            name=name if len(groups) == 1 else f"{name}-{nodes * ranks}",
            root=root,
            folder=Path.cwd(),
            command=[*cluster.container, sys.executable, "-m", "forge_trainer", "train"],
            python=sys.executable,
            cluster=shrunk,
            nodes=nodes,
            names=[point.name for point in members],
        )
        text = batch_script(made)
        if options.dry_run:
            sys.stdout.write(text)
        else:
            submit_script(made, text)
    return ExitCode.DONE


def layout_of(point: Point, cluster: ClusterConfig, nodes: int | None) -> tuple[int, int]:
    """Return the nodes of a run and the ranks of each; from its mesh, if all axes are given.

    Raises:
        ConfigError: the run does not fit them.
    """
    mesh = point.job.mesh
    if nodes is None and mesh.dp_shard > 0:
        world = mesh.pp * mesh.dp_replicate * mesh.dp_shard * mesh.cp * mesh.tp
        ranks = min(cluster.ranks, world)
        found = -(-world // ranks), ranks
    else:
        found = nodes or fewest_nodes(point.job, cluster), cluster.ranks
    try:
        require_layout(point.job, found[0] * found[1])
    except ConfigError as error:
        raise ConfigError(f"run {point.name} on {found[0]} nodes: {error}") from None
    return found
