"""Who this process is among the ranks, and the process group around a run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch

from forge_parallel import capabilities
from forge_parallel.error import ParallelError
from forge_parallel.group_config import ProcessGroupConfig

FIRST_PORT = 20000
PORTS = 12000
"""Below 32768, from where Linux takes the ports of outgoing connections."""

STEP_STRIDE = 997
"""Distance of the ports of two steps of one job; prime, so that steps of neighbouring jobs do not meet."""


@dataclass(frozen=True)
class Env:
    """The place of this process.

    Attributes:
        rank: in 0..world_size-1.
        local_rank: index among the ranks of this host.
        world_size: number of ranks.
        device: the device that this rank computes on; a GPU without a number becomes the GPU of this rank.
        launcher: the program that started it.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    launcher: str

    def __post_init__(self) -> None:
        if self.device.type == "cuda" and self.device.index is None:
            object.__setattr__(self, "device", _gpu(self.local_rank))

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> Env:
        """Read the variables of torchrun or of a SLURM step; without either the process is alone.

        Raises:
            ParallelError: some of the variables are missing, or this host has fewer GPUs than ranks.
        """
        if "RANK" in environ:
            names, launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE"), "torchrun"
        elif int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in environ:
            names, launcher = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"), "slurm"
        else:
            return cls(0, 0, 1, _device(0), "none")
        missing = [name for name in names if name not in environ]
        if missing:
            raise ParallelError(
                f"{names[0]} is set but not {', '.join(missing)}; start with torchrun or srun, "
                f"or unset {names[0]} for a lone process"
            )
        rank, local_rank, world_size = (int(environ[name]) for name in names)
        return cls(rank, local_rank, world_size, _device(local_rank), launcher)


def _device(local_rank: int) -> torch.device:
    """Return a GPU if there are any, else the CPU."""
    return _gpu(local_rank) if torch.cuda.is_available() else torch.device("cpu")


def _gpu(local_rank: int) -> torch.device:
    """Return the GPU of a rank. SLURM may show each rank only its own GPU, as number 0."""
    count = torch.cuda.device_count()
    if local_rank >= count > 1:
        raise ParallelError(f"local rank {local_rank} on a host with {count} GPUs; start one rank a GPU")
    return torch.device("cuda", local_rank if count > 1 else 0)


@contextmanager
def process_group(
    env: Env,
    needed: bool = False,
    timeout_s: float = 1800,
    config: ProcessGroupConfig | None = None,
) -> Iterator[None]:
    """Enter the default process group for the time of a run. Collective.

    Args:
        env: from `Env.detect`.
        needed: make a group even for a lone process, which else has none and saves its start-up time.
        timeout_s: how long a collective may wait for another rank.
        config: the section `[process_group]`; its defaults when it is missing.

    Raises:
        ParallelError: this build of torch or the device lacks what the section asks for.

    By default the backend is gloo on CPUs; on GPUs NCCL, and gloo for tensors on the CPU. Where a rank with a
    GPU fails, it aborts its collectives, because NCCL collectives that other ranks never join never end.
    """
    if env.device.type == "cuda":
        torch.cuda.set_device(env.device)
    if env.world_size == 1 and not needed:
        yield
        return
    import torch.distributed as dist

    if env.launcher == "slurm":
        _find_master()
    options = capabilities.group_options(env.device, env.launcher == "none", config)
    if env.launcher == "torchrun":
        options["store"] = capabilities.store_of_restart(env.world_size, timedelta(seconds=timeout_s))
    dist.init_process_group(
        **options,
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    except BaseException:
        if env.device.type == "cuda":
            capabilities.abort_groups()
        else:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _find_master() -> None:
    """Set the rendezvous of a SLURM step: its first host, and a port that depends on job and step."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ["SLURM_JOB_NODELIST"]
    hosts = subprocess.run(
        ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
    )
    os.environ.setdefault("MASTER_ADDR", hosts.stdout.split()[0])
    number = int(os.environ["SLURM_JOB_ID"]) + STEP_STRIDE * int(os.environ.get("SLURM_STEP_ID", "0"))
    port = FIRST_PORT + number % PORTS
    os.environ.setdefault("MASTER_PORT", str(port))
