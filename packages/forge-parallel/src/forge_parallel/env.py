"""Who this process is among the ranks, and the process group around a run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch

FIRST_PORT = 20000
PORTS = 20000


@dataclass(frozen=True)
class Env:
    """The place of this process.

    Attributes:
        rank: in 0..world_size-1.
        local_rank: among the ranks of this host.
        world_size: number of ranks.
        device: what this rank computes on.
        launcher: who started it.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    launcher: str

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> Env:
        """Read the variables of torchrun or of a SLURM step; without either the process is alone."""
        if "RANK" in environ:
            numbers, launcher = [environ[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE")], "torchrun"
        elif int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in environ:
            names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
            numbers, launcher = [environ[k] for k in names], "slurm"
        else:
            numbers, launcher = ["0", "0", "1"], "none"
        rank, local_rank, world_size = map(int, numbers)
        device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
        return cls(rank, local_rank, world_size, device, launcher)


@contextmanager
def process_group(env: Env, needed: bool = False, timeout_s: float = 1800) -> Iterator[None]:
    """The default process group for the time of a run. Collective.

    Args:
        env: from `Env.detect`.
        needed: make a group even for a lone process; otherwise that has none, and pays no start-up for it.
        timeout_s: how long a collective may wait for another rank.
    """
    if env.device.type == "cuda":
        torch.cuda.set_device(env.device)
    if env.world_size == 1 and not needed:
        yield
        return
    import torch.distributed as dist

    if env.launcher == "slurm":
        _find_master()
    backend = "cpu:gloo,cuda:nccl" if env.device.type == "cuda" else "gloo"
    store = dist.HashStore() if env.launcher == "none" else None
    dist.init_process_group(
        backend,
        store=store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _find_master() -> None:
    """Set the rendezvous of a SLURM step: its first host, and a port that depends on the job."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ["SLURM_JOB_NODELIST"]
    hosts = subprocess.run(
        ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
    )
    os.environ.setdefault("MASTER_ADDR", hosts.stdout.split()[0])
    port = FIRST_PORT + int(os.environ["SLURM_JOB_ID"]) % PORTS
    os.environ.setdefault("MASTER_PORT", str(port))
