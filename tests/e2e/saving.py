"""A small training on some ranks that saves; loaded where it is forked from, with all that it needs."""

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # the first step of an optimizer would load it, in each process anew
import torch.distributed as dist
from forge_ckpt import Saver, Store, TrainState
from torch import nn

SAVED, FAILED, OTHER = 100, 1, 2
"""Exit codes: 100, plus 1 if the first save failed, plus 2 if the second did. Of a load: the step, or 9."""


def trained(step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after so many steps, the same in every process."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(step):
        advance(model, optimizer)
    return model, optimizer


def advance(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list]:
    return {key: t.tolist() for key, t in TrainState([model], optimizer).capture().tensors.items()}


def trace_me(root: Path, traced: bool) -> None:
    """Wait until strace looks at this process."""
    (root.parent / f"pid-{os.getpid()}").touch()
    while traced and "TracerPid:\t0" in Path("/proc/self/status").read_text():
        time.sleep(0.002)


def rank_of_training(root: Path, rank: int, ranks: int, port: int, traced: bool, mode: str) -> None:
    """Load step 1, train and save steps 2 and 3; or only load."""
    torch.set_num_threads(1)
    if ranks > 1:
        where = f"tcp://127.0.0.1:{port}"
        wait = timedelta(seconds=20)
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks, timeout=wait)
    model, optimizer = trained(0)
    store = Store(root, keep=2, group=dist.group.WORLD if ranks > 1 else None, marks=[root.parent / "MARK"])
    state = TrainState([model], optimizer)
    if mode == "load":
        trace_me(root, traced)
        try:
            found = store.resume(state.targets)
        except Exception:
            os._exit(9)
        assert found is not None and bits(model, optimizer) == bits(*trained(found.step))
        os._exit(found.step)
    found = store.resume(state.targets)
    assert found is not None and found.step == 1
    saver = Saver(store, state, asynchronous=mode == "async")
    code = SAVED
    trace_me(root, traced)
    for step, failed in ((2, FAILED), (3, OTHER)):
        advance(model, optimizer)
        before = saver.failures
        saver.save(step, {"at": step})
        saver.finish()
        code += failed * (saver.failures > before)
    os._exit(code)
