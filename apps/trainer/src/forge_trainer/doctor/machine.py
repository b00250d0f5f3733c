"""Checks of the machine: Python, torch, GPUs, memory, limits, names, ports, caches."""

import importlib.metadata
import os
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from forge_resilience.gpu_health import gpu_problems

from forge_trainer.doctor.finding import Finding, fine, skipped

OLDEST, NEWEST = (2, 11), (2, 15)
"""The oldest and the newest version of torch with which Forge is tested."""

SLOW_NCCL = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")

FILES = 4096
SHARED = 2**30


def machine_findings() -> list[Finding]:
    """Run all checks of the machine."""
    here = [_files(), _shared_memory(), _cores(), _name(), _port(), *_caches()]
    return [_python(), _torch(), *gpu_findings(), *here]


def _python() -> Finding:
    return fine("python", ".".join(map(str, sys.version_info[:3])))


def _torch() -> Finding:
    found = importlib.metadata.version("torch")
    version = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if not OLDEST <= version <= NEWEST:
        tested = f"tested with {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
        return Finding("torch", "warning", found, tested, "run `uv run pytest` once before you rely on it")
    return fine("torch", found)


def gpu_findings() -> list[Finding]:
    """Check the GPUs, their links, NCCL and their health; skipped without GPUs."""
    import torch
    from torch.cuda import nccl

    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        version = ".".join(map(str, nccl.version()))
        return [
            fine("GPUs", ", ".join(names)),
            fine("NCCL", version),
            nccl_settings(),
            _peers(names),
            _health(),
        ]
    if devices:
        why = "training would run on the CPU, a hundred times slower"
        remedy = f"driver and torch must fit: torch is built for CUDA {torch.version.cuda}; see nvidia-smi"
        return [Finding("GPUs", "wrong", f"torch sees none, but /dev has {', '.join(devices)}", why, remedy)]
    return [skipped(name, "no GPU here") for name in ("GPUs", "NCCL", "NCCL settings", "GPU health")]


def nccl_settings(environ: Mapping[str, str] = os.environ) -> Finding:
    """Check the variables that NCCL reads: none may disable a fast connection."""
    variables = {name: value for name, value in sorted(environ.items()) if "NCCL_" in name}
    found = (
        ", ".join(f"{name}={value}" for name, value in variables.items()) or "none: NCCL chooses by itself"
    )
    slow = [name for name in SLOW_NCCL if variables.get(name, "0") != "0"]
    if slow:
        why = "ranks then send through slower ways"
        return Finding("NCCL settings", "warning", found, why, f"unset {' '.join(slow)}, unless you need it")
    return fine("NCCL settings", found)


def _health() -> Finding:
    problems = gpu_problems()
    if problems is None:
        return skipped("GPU health", "no nvidia-smi")
    if problems:
        why = "such a GPU is slow, or computes wrong numbers, and all ranks wait for it"
        remedy = "tell who runs the cluster, and leave the node out (sbatch --exclude)"
        return Finding("GPU health", "wrong", "; ".join(problems), why, remedy)
    return fine("GPU health", "no memory errors, not slowed down")


def _peers(names: list[str]) -> Finding:
    import torch

    apart = [
        (a, b)
        for a in range(len(names))
        for b in range(len(names))
        if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    if apart:
        why = "GPUs that do not reach each other's memory send through the host"
        return Finding("GPU peers", "warning", f"not between {apart[0]} and others", why, "small mesh.tp")
    return fine("GPU peers", "all reach each other" if len(names) > 1 else "one GPU")


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:
        why = "ranks, workers and shards of checkpoints hold files and sockets open"
        remedy = f"ulimit -n {min(hard, 65536)} before the start (a line of `setup` in the cluster file)"
        return Finding("open files", "warning", f"at most {soft}", why, remedy)
    return fine("open files", f"at most {soft}")


def _shared_memory() -> Finding:
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return skipped("shared memory", "no /dev/shm")
    if size < SHARED:
        why = "workers of the data loader and ranks of one node send tensors through it"
        remedy = "docker run --shm-size=8g, or --ipc=host; or data.workers = 0"
        return Finding("shared memory", "warning", f"{size / 2**20:,.0f} MiB", why, remedy)
    return fine("shared memory", f"{size / 2**30:,.1f} GiB")


def _cores() -> Finding:
    usable, every = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{usable} of {every}" + (
        f", OMP_NUM_THREADS={threads}" if (threads := os.environ.get("OMP_NUM_THREADS")) else ""
    )
    if threads and int(threads) > usable:
        why = "more threads than cores fight for them"
        return Finding("cores", "warning", found, why, f"OMP_NUM_THREADS={usable} at most")
    return fine("cores", found)


def _name() -> Finding:
    """Check the host name: ranks get the name of the first host; gloo and NCCL look up their own."""
    name = socket.gethostname()
    remedy = "export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (see `ip addr`), or mend /etc/hosts"
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        why = "ranks of several nodes find each other by name; gloo looks up its own"
        return Finding("host name", "wrong", f"{name}: {error}", why, remedy)
    if address.startswith("127.") and int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1:
        why = "ranks on other nodes are told this address and cannot reach it"
        return Finding("host name", "wrong", f"{name} is {address}", why, remedy)
    return fine("host name", f"{name} is {address}")


def _port() -> Finding:
    try:
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                return fine("ports", "can be opened and reached")
    except OSError as error:
        why = "ranks meet at a port of the first"
        return Finding("ports", "wrong", str(error), why, "ask which ports are free (MASTER_PORT)")


def _caches(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Check the folders of caches, which may fill up."""
    home = Path(environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    places = {
        "HF_HOME": Path(environ.get("HF_HOME", home / "huggingface")),
        "TRITON_CACHE_DIR": Path(environ.get("TRITON_CACHE_DIR", Path.home() / ".triton")),
    }
    return [_cache(name, place) for name, place in places.items()]


def _cache(name: str, place: Path) -> Finding:
    folder = next(parent for parent in (place, *place.parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    remedy = f"export {name} to a folder on scratch (a line of `setup` in the cluster file)"
    if not os.access(folder, os.W_OK):
        return Finding(name, "warning", f"{place} cannot be written", "it fills as models are loaded", remedy)
    if free < 5 * 2**30:
        found = f"{place}, {free / 2**30:.1f} GiB free"
        return Finding(name, "warning", found, "a full home breaks logins as well", remedy)
    return fine(name, f"{place}, {free / 2**30:,.0f} GiB free")
