import sys
from subprocess import run

import pytest
import torch
from forge_parallel import ParallelError
from forge_parallel.capabilities import bind_to_cores


def script(text: str) -> None:
    done = run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_without_dynamo_gives_way_when_the_compiler_is_really_wanted():
    script("""
import sys, torch
from forge_parallel.capabilities import without_dynamo
with without_dynamo():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1)
    import torch._dynamo
    assert torch._dynamo.config.recompile_limit > 0
    assert hasattr(sys.modules["torch._dynamo"], "optimize")
assert hasattr(sys.modules["torch._dynamo"], "optimize")
assert torch._dynamo is sys.modules["torch._dynamo"]
with without_dynamo():
    assert hasattr(sys.modules["torch._dynamo"], "optimize")
    optimizer.zero_grad()
assert torch.optim.Optimizer.zero_grad.__wrapped__.__dict__["__dynamo_disable"] is not None
double = torch.compile(lambda x: x * 2, backend="eager")
assert double(torch.ones(1)).item() == 2
""")


@pytest.mark.slow
def test_without_dynamo_gives_way_to_a_module_of_the_compiler():
    script("""
import torch
from forge_parallel.capabilities import without_dynamo
with without_dynamo():
    double = torch.compile(lambda x: x * 2, backend="eager")
    assert double(torch.ones(1)).item() == 2
""")


def test_flight_record_has_the_collectives_of_every_backend():
    script("""
import json, os
os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
import torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from forge_parallel.capabilities import flight_record
assert flight_record() is None
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
real = c10d._dump_fr_trace_json
def played(includeCollectives=None, onlyActive=None, backend="gloo"):
    entry = {"profiling_name": "nccl:all_gather", "state": "started"}
    return json.dumps({"entries": [entry]}).encode() if backend == "nccl2" else real(backend=backend)
c10d._dump_fr_trace_json = played
found = json.loads(flight_record())
names = {(entry["backend"], entry["profiling_name"]) for entry in found["entries"]}
assert names == {("gloo", "gloo:all_reduce"), ("nccl2", "nccl:all_gather")}, names
del c10d._dump_fr_trace_json
c10d._dump_nccl_trace_json = lambda: json.dumps({"entries": [{"profiling_name": "nccl:x"}]}).encode()
(entry,) = json.loads(flight_record())["entries"]
assert entry["profiling_name"] == "nccl:x"
""")


@pytest.mark.parametrize("name", ["gpu_index", "device_index"])
def test_rank_is_bound_to_cores_near_its_gpu(name, monkeypatch):
    """By what torch has for that, whose argument 2.11 and 2.15 call differently."""
    from torch.numa import binding

    bound = {}
    if name == "gpu_index":

        def bind(*, gpu_index, numa_options):
            bound[gpu_index] = numa_options
    else:

        def bind(*, device_index, numa_options):
            bound[device_index] = numa_options

    monkeypatch.setattr(binding, "_maybe_apply_numa_binding_to_current_process", bind)
    bind_to_cores(torch.device("cuda", 3), "none")
    assert not bound
    bind_to_cores(torch.device("cuda", 3), "core-complex")
    (options,) = bound.values()
    assert bound.keys() == {3} and options.affinity_mode is binding.AffinityMode.CORE_COMPLEX
    assert not options.should_fall_back_if_binding_fails


def test_cores_near_a_gpu_are_the_ones_of_its_node_that_this_process_may_use():
    """With the binding of torch itself: of a GPU on NUMA node 0, whose cores are read from /sys."""
    script("""
import os, shutil, torch
from unittest.mock import patch
from forge_parallel.capabilities import bind_to_cores
from torch.numa import binding
allowed = os.sched_getaffinity(0)
one = {min(allowed)}
with patch.object(shutil, "which", lambda name: name), patch.object(
    binding, "_get_numa_node_index_for_device_index", lambda device_index: 0
), patch.object(binding, "_get_allowed_logical_cpu_indices_for_numa_node", lambda numa_node_index: one):
    bind_to_cores(torch.device("cuda", 0), "node")
assert os.sched_getaffinity(0) == one
""")


@pytest.mark.parametrize(
    ("device", "said"),
    [("cpu", "computes on a cpu"), ("cuda:0", 'job.numa = "node" cannot be done here: no numactl')],
)
def test_binding_that_cannot_be_done_is_refused(device, said, monkeypatch):
    from torch.numa import binding

    def bind(*, device_index, numa_options):
        raise RuntimeError("no numactl")

    monkeypatch.setattr(binding, "_maybe_apply_numa_binding_to_current_process", bind)
    with pytest.raises(ParallelError, match=said):
        bind_to_cores(torch.device(device), "node")
