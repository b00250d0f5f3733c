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
