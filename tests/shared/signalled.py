"""A part that jobs of tests import: the process signals itself, and its workers, in a chosen phase.

`FORGE_SIGNAL` says when and how: `phase=backward step=4 number=15 every_s=0.01`. Without it nothing happens.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from forge_ckpt.store import Store
from forge_trainer import build
from forge_trainer.checkpoints.checkpoints import Checkpoints
from forge_trainer.clock import Clock
from forge_trainer.steps import update
from torch._dynamo import register_backend

PHASES = ("start", "data", "forward", "backward", "step", "save", "write", "evaluation", "compile", "end")
SPANS = {"data": "data", "evaluate": "evaluation", "save": "save"}


class Sender:
    """Signals this process once it is in the chosen phase.

    Args:
        phase: one of `PHASES`.
        step: the training step in progress then, from 1.
        number: of the signal.
        every_s: repeat it at this distance until the process is gone; 0 sends it once.
    """

    def __init__(self, phase: str, step: int, number: int, every_s: float = 0.0) -> None:
        self.phase, self.at, self.number, self.every_s = phase, step, number, every_s
        self.step = 0
        self.sent = False

    def __call__(self, phase: str, anywhere: bool = False) -> None:
        """The process is in a phase now."""
        if self.sent or phase != self.phase or not (anywhere or self.step == self.at):
            return
        self.sent = True
        sys.stderr.write(f"signalled in {phase} of step {self.step}\n")
        sys.stderr.flush()
        if self.every_s:
            threading.Thread(target=self._repeat, daemon=True).start()
        self._send()

    def _repeat(self) -> None:
        while True:
            time.sleep(self.every_s)
            self._send()

    def _send(self) -> None:
        for pid in [*workers(), os.getpid()]:
            try:
                os.kill(pid, self.number)
            except ProcessLookupError:
                continue


def workers() -> list[int]:
    """Processes that this one has started."""
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in _children(task)]


def _children(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except OSError:
        return []


def before(owner: Any, name: str, call: Callable[..., object]) -> None:
    """Call something with the same arguments before each call of a function."""
    function = getattr(owner, name)

    @wraps(function)
    def both(*args: Any, **kwargs: Any) -> Any:
        call(*args, **kwargs)
        return function(*args, **kwargs)

    setattr(owner, name, both)


def watch(send: Sender) -> None:
    """Tell the sender of all phases."""

    def entered(clock: Clock, name: str) -> None:
        send.step += name == "data"
        send(SPANS.get(name, ""))

    def forward(module: Any, inputs: Any, output: Any) -> None:
        send("forward")
        if isinstance(output, torch.Tensor) and output.requires_grad and send.phase == "backward":
            output.register_hook(lambda gradient: send("backward"))

    before(Clock, "enter", entered)
    before(build, "resume_or_start", lambda *_: send("start", anywhere=True))
    before(update, "step_if_finite", lambda *_: send("step"))
    before(Store, "save", lambda *_: send("write"))
    before(Checkpoints, "finish", lambda *_: send("end"))
    if send.phase in ("forward", "backward"):
        torch.nn.modules.module.register_module_forward_hook(forward)


SEND: Sender | None = None
if told := os.environ.get("FORGE_SIGNAL"):
    words = dict(word.split("=") for word in told.split())
    SEND = Sender(
        words["phase"], int(words["step"]), signal.Signals(int(words["number"])), float(words["every_s"])
    )
    watch(SEND)


@register_backend
def signalled(graph: Any, inputs: Any) -> Any:
    """A compiler that changes nothing and takes a while, in which it is signalled."""
    if SEND is not None:
        SEND("compile", anywhere=True)
        time.sleep(0.05)
    return graph.forward
