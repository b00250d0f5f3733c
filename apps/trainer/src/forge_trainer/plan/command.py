"""`forge plan`: prints the plan of a job, its parameters and its schedule."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from math import prod

from forge_config import ConfigError
from forge_parallel.error import ParallelError
from forge_resilience.exit_codes import ExitCode

from forge_trainer.config.job import Job, load_job
from forge_trainer.plan.devices import Device, device_of, load_table


def plan_job(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the plan of a job.

    Raises:
        ConfigError: the job or the table of devices cannot be used, or the ranks do not fit the mesh.
    """
    loaded = load_job(options.config, overrides, on_paper=True)
    job, table = loaded.value, load_table(options.device_table)
    device_name = options.device or device_here()
    device = device_of(table, device_name)
    if options.search and device is None:
        raise ConfigError(
            f"--search looks for what fits, and the memory of a {device_name} is not known; give --device"
        )
    ranks, node_ranks = ranks_of(options, job, device)

    # torch is loaded here and not before
    from forge_trainer.plan.lines import plan_lines_of
    from forge_trainer.plan.report import as_data, plan_of
    from forge_trainer.plan.search import search
    from forge_trainer.report.plan import plan_lines

    try:
        plan = plan_of(job, ranks, node_ranks, device_name, table, skew=SKEW)
    except ParallelError as error:
        raise ConfigError(f"{ranks} ranks: {error}") from None
    found = None
    if options.search:
        found = search(plan, table, lambda line: _say(f"{line}\n"), options.search_limit)
    if options.json:
        data = as_data(plan) | ({} if found is None else {"search": found.as_data()})
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
    else:
        sys.stdout.write(
            "\n".join(
                [*plan_lines_of(plan), *(found.lines() if found else ()), "", *plan_lines(job, loaded.unused)]
            )
            + "\n"
        )
    return ExitCode.CONFIG if options.strict and plan.fits is False else ExitCode.DONE


def _say(text: str) -> None:
    sys.stderr.write(text)


SKEW = 2.0
"""The assumed load of the most loaded rank, in multiples of the rows of even routing."""


def device_here() -> str:
    """Return the name of this machine's GPU if it is in the table, else `h100`."""
    import torch

    from forge_trainer.plan.devices import name_of_gpu

    if torch.cuda.is_available() and (name := name_of_gpu(torch.cuda.get_device_name(0))) is not None:
        return name
    return "h100"


def ranks_of(options: argparse.Namespace, job: Job, device: Device | None) -> tuple[int, int | None]:
    """Return the number of ranks, and of ranks on a node; by default as few as fit the mesh.

    Raises:
        ConfigError: the options contradict each other.
    """
    given = options.gpus_per_node
    if options.ranks is not None and options.nodes is not None:
        raise ConfigError("--ranks and --nodes are given; say one of them")
    each = given or (device.node_ranks if device else 1)
    if options.nodes is not None:
        return options.nodes * each, each
    return options.ranks or fewest_ranks(job), given


def fewest_ranks(job: Job) -> int:
    """Return the product of the axes of the mesh with a given size; ep shares the ranks of other axes."""
    axes = (getattr(job.mesh, name) for name in job.mesh.__struct_fields__ if name != "ep")
    least = prod(size for size in axes if size > 0)
    return least if job.mesh.ep == 1 or job.mesh.dp_shard > 0 else least * job.mesh.ep
