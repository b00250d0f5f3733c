"""Differences between torch 2.11 to 2.15, and workarounds for all of them."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_parallel.error import ParallelError
from forge_parallel.group_config import ProcessGroupConfig

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

NAME = "torch._dynamo"
_CACHE = "__dynamo_disable"


def group_options(
    device: torch.device, lone: bool, config: ProcessGroupConfig | None = None
) -> dict[str, Any]:
    """Return backend, device and store of the default process group.

    NCCL is given its device, which 2.15 would else guess from LOCAL_RANK or the rank. gloo is not: it has no
    use for it, and 2.11 rejects it.

    Args:
        device: the device that this rank computes on.
        lone: whether this process is alone, so that it needs no rendezvous.
        config: the section `[process_group]`; its defaults when it is missing.

    Raises:
        ParallelError: torch was built without the backend, the backend does not support the device, or
            high-priority streams are asked of a backend that is not NCCL.
    """
    import torch.distributed as dist

    config = config or ProcessGroupConfig()
    _require_backends(device, config)
    store = dist.HashStore() if lone else None  # pyright: ignore[reportPrivateImportUsage]
    if config.high_priority:
        os.environ["TORCH_NCCL_HIGH_PRIORITY"] = "1"  # of all groups, also those that a mesh makes
    if device.type != "cuda" and config.backend == "auto":
        return {"backend": "gloo", "store": store}
    backend = ",".join(f"{kind}:{name}" for kind, name in config.backends(device.type).items())
    return {"backend": backend, "store": store} | ({"device_id": device} if device.type == "cuda" else {})


def _require_backends(device: torch.device, config: ProcessGroupConfig) -> None:
    """Check that torch has the backends of the section; raises as `group_options`."""
    import torch.distributed as dist

    backends = config.backends(device.type)
    known = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    there = [name for name in known if dist.is_backend_available(name)]
    if missing := [name for name in backends.values() if name not in there]:
        raise ParallelError(
            f'process_group.backend = "{config.backend}", and this torch {torch.__version__} has no '
            f"{missing[0]}; it has {', '.join(there)}"
        )
    of_gpus = sorted(name for name in backends.values() if name.startswith("nccl"))
    if device.type not in backends or (device.type == "cpu" and backends["cpu"].startswith("nccl")):
        raise ParallelError(
            f'process_group.backend = "{config.backend}" has nothing for tensors on a {device.type}, which '
            'the ranks compute on; set it to "auto"'
        )
    if device.type == "cpu" and of_gpus:
        raise ParallelError(
            f'process_group.backend = "{config.backend}" has NCCL, which needs a GPU, and the ranks compute '
            'on a cpu; set it to "auto"'
        )
    if config.high_priority and (device.type != "cuda" or not of_gpus):
        raise ParallelError(
            f"process_group.high_priority = true is for NCCL, and the ranks compute on a {device.type} with "
            f"{', '.join(backends.values())}; set it to false"
        )


def store_of_restart(
    world_size: int, timeout: timedelta, environ: Mapping[str, str] = os.environ
) -> Store | None:
    """Return the store of ranks that torchrun has restarted in place; None where torch's own works.

    The agent's store outlives the ranks, and torch uses the same keys again (2.11 to 2.15): gloo then finds
    the addresses of dead ranks, and most restarts fail. Here each restart has its own keys.

    Args:
        world_size: number of ranks.
        timeout: how long to wait for a key.
        environ: the variables that torchrun sets.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = TCPStore(
        environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), world_size, is_master=False, timeout=timeout
    )
    return PrefixStore(f"forge/restart-{restarts}", store)


RECORDERS = ("gloo", "nccl", "nccl2", "nccl-legacy")
"""Backends that may keep a record of their collectives, each one of its own."""


def flight_record() -> bytes | None:
    """Return JSON of the last collectives of this rank and their states, if torch keeps a record.

    Torch does so if TORCH_FR_BUFFER_SIZE is above 0 when it is loaded; for gloo from 2.15 on. `entries` has
    the collectives of all backends, each with its `backend`; `backends` has what else each backend reports.
    """
    module = sys.modules.get("torch._C._distributed_c10d")
    if module is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    asked: dict[str, Callable[[], bytes]] = {}
    if (dump := getattr(module, "_dump_fr_trace_json", None)) is not None:
        asked = {name: partial(dump, backend=name) for name in RECORDERS}
    if (dump := getattr(module, "_dump_nccl_trace_json", None)) is not None:
        asked["nccl of torch"] = dump  # what ProcessGroupNCCL itself records: all there is before 2.15
    entries: list[Any] = []
    backends: dict[str, Any] = {}
    for name, ask in asked.items():
        record = json.loads(ask() or b"{}")
        mine = record.pop("entries", [])
        if mine or record.get("pg_status"):
            backends[name] = record
            entries += [{"backend": name, **entry} for entry in mine]
    return json.dumps({"entries": entries, "backends": backends}).encode()


def abort_groups() -> None:
    """Abort all process groups of this rank; waits for no collective that other ranks have not joined."""
    from torch.distributed import distributed_c10d

    try:
        distributed_c10d._abort_process_group()
    except Exception as error:  # this rank has failed already, and that is what is to be told
        logging.getLogger(__name__).warning("process groups could not be aborted: %s", error)


def bind_to_cores(device: torch.device, mode: str) -> None:
    """Bind the threads of this process to cores near its GPU; threads and processes it starts inherit this.

    Args:
        device: the device of this rank.
        mode: a mode of `torch.numa.binding.AffinityMode`; `none` changes nothing.

    Raises:
        ParallelError: the device is no GPU; or torch cannot find its NUMA node, or lacks numactl.
    """
    if mode == "none":
        return
    if device.type != "cuda":
        raise ParallelError(
            f'job.numa = "{mode}" binds ranks to cores near their GPUs, and this one computes on a '
            f'{device.type}; expected "none"'
        )
    from torch.numa import binding

    bind = binding._maybe_apply_numa_binding_to_current_process
    # of 2.11 it is gpu_index
    name = next(name for name in inspect.signature(bind).parameters if name.endswith("_index"))
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    try:
        bind(**{name: device.index, "numa_options": options})
    except (RuntimeError, OSError, ValueError) as error:
        raise ParallelError(f'job.numa = "{mode}" cannot be done here: {error}; set it to "none"') from error


def share_memory(group: ProcessGroup) -> bool:
    """Let the compiler use the memory of other GPUs of a group; returns whether it can.

    Up to 2.14 torch overlaps nothing, silently, for a group that is not enabled; from 2.15 on it enables all.
    """
    from torch.distributed import _symmetric_memory

    name = group.group_name
    if not _symmetric_memory.is_symm_mem_enabled_for_group(name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            _symmetric_memory.enable_symm_mem_for_group(name)
    return _symmetric_memory.is_symm_mem_enabled_for_group(name)


def host_group() -> ProcessGroup:
    """Make a CPU group of all ranks, with the timeout of the default group, which torch does not pass on."""
    import torch.distributed as dist

    group = dist.new_group(backend="gloo", timeout=_patience())
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group


def be_patient(mesh: DeviceMesh) -> DeviceMesh:
    """Give the groups of a device mesh the timeout of the default group, which torch does not pass on.

    `set_timeout` is public from 2.15 on.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    change = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    if (timeout := _patience()) is not None:
        for group in mesh.get_all_groups():
            change(timeout, group)
    return mesh


def _patience() -> timedelta | None:
    """Return the timeout of the default group, if its backend reports one."""
    import torch.distributed as dist

    assert dist.group.WORLD is not None
    options = getattr(dist.group.WORLD._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_timeout", None)


def scale_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors by one number, in place and in few kernels; torch has no public function for it."""
    torch._foreach_mul_(tensors, factor)  # pyright: ignore[reportPrivateImportUsage]


def norms(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the 2-norm of each of several tensors of one device, accumulated in a dtype, in few kernels."""
    return list(torch._foreach_norm(tensors, 2, dtype))  # pyright: ignore[reportPrivateImportUsage]


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Make one axis of all axes of a device mesh, with a group of its own. Collective.

    `DeviceMesh._flatten` has no public form in 2.11 to 2.15.
    """
    return mesh._flatten(name)


def unflatten(mesh: DeviceMesh, sizes: dict[str, int]) -> DeviceMesh:
    """Make several axes of a device mesh of one, the outermost first, with groups of their own. Collective.

    `DeviceMesh._unflatten` has no public form in 2.11 to 2.15.
    """
    return mesh._unflatten(0, tuple(sizes.values()), tuple(sizes))


def functional(name: str) -> Callable[..., Any]:
    """Return a traceable `all_gather` or `reduce_scatter`; 2.13 renamed `*_tensor` to `*_single`."""
    from torch.distributed import _functional_collectives as collectives

    return getattr(collectives, f"{name}_single", None) or getattr(collectives, f"{name}_tensor")


def cuts(placement: Placement, dim: int) -> bool:
    """Whether a placement shards a tensor dim. `is_shard` of 2.15 returns False for strided shards."""
    return getattr(placement, "dim", None) == dim


def split_factor(placement: Placement) -> int:
    """Return the number of chunks of a dim before this placement; 1 for all but strided shards."""
    return getattr(placement, "split_factor", 1)


def splits_backward() -> bool:
    """Whether pipelines can split the backward pass where a model has an autograd function of its own.

    2.11 cannot; 2.15 does in our tests.
    """
    version = tuple(int(part) for part in str(torch.__version__).split(".")[:2])
    return version >= (2, 15)


def run_schedule(schedule: Any, micro_batches: list[dict[str, Any]]) -> None:
    """Run a pipeline schedule on keyword arguments that are already split into micro-batches.

    Schedules of 2.11 to 2.14 can only split them themselves; this function does the rest of their `step`.
    """
    targets = [None] * len(micro_batches)
    if "kwarg_mbs" in inspect.signature(schedule.step).parameters:
        schedule.step(kwarg_mbs=micro_batches, target_mbs=targets, return_outputs=False)
        return
    for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
        stage.has_backward = True
        stage.clear_runtime_states()
        # a rank of a V would greet itself, which gloo cannot
        stage._get_init_p2p_neighbors_ops = list
    schedule._step_microbatches(kwarg_mbs=micro_batches, target_mbs=targets)


def selective_contexts(policy: Callable[..., Any]) -> Callable[[], Any]:
    """Return the `context_fn` of `torch.utils.checkpoint` for selective activation checkpointing."""
    from torch.utils import checkpoint

    _ignore_marks()
    return partial(checkpoint.create_selective_checkpoint_contexts, policy)


@cache
def _ignore_marks() -> None:
    """Let selective activation checkpointing ignore profiler marks, in all of this process.

    2.15 counts the marks of FSDP2 as operations of the region, and FSDP2 makes different ones when the region
    is recomputed: a crash where experts in a block are units of their own.
    """
    from torch.utils import checkpoint

    marks = torch.ops.profiler
    checkpoint.SAC_IGNORED_OPS |= {
        marks._record_function_enter_new.default,
        marks._record_function_exit._RecordFunction,
    }


def compiled(fn: Callable[..., Any], limit: int, **options: Any) -> Callable[..., Any]:
    """Call `torch.compile` with its own limit on recompilations of the function; torch's default is 8.

    Before 2.15 one limit holds for all functions; this call raises it.
    """
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = limit
        return torch.compile(fn, **options)
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, limit)
    return torch.compile(fn, **options)


class _StandIn(ModuleType):
    """Answers the two questions that eager code asks the compiler; any other attribute loads the compiler."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.wrapped: list[Callable[..., Any]] = []

    def disable(self, fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        self.wrapped.append(fn)
        return fn

    def graph_break(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # which the import of a module below it asks for
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(NAME), name)

    def leave(self) -> None:
        """Remove the stand-in, and every reference to it in functions that imported it."""
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
            del torch._dynamo
        for fn in self.wrapped:
            if fn.__dict__.get(_CACHE) is fn:
                delattr(fn, _CACHE)
        self.wrapped.clear()


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Run eager code, such as an optimizer, without loading the compiler, which takes seconds.

    Functions under `torch._disable_dynamo` and the step of every optimizer import `torch._dynamo` at their
    first call, only to exclude themselves from compilation (torch/_compile.py and torch/optim/optimizer.py of
    2.15). While the compiler is not loaded there is nothing to exclude them from, so a stand-in answers
    inside this block. It only serves lone processes on a CPU, where it shortens the start: it does nothing
    once the compiler is loaded, as `torch.compile` and FSDP2 do, or where there is a GPU.
    """
    if NAME in sys.modules or torch.cuda.is_available():
        yield
        return
    stand_in = _StandIn()
    sys.modules[NAME] = stand_in
    torch._dynamo = stand_in  # type: ignore[attr-defined,assignment]
    try:
        yield
    finally:
        stand_in.leave()
