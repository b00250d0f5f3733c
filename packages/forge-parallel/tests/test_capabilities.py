import sys
from subprocess import run

import pytest


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
