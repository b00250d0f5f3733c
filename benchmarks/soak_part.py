"""The part that `soak.py` has its runs import: faults from inside, as `FORGE_FAULT` says.

`nan:20` makes a gradient infinite once, 20 steps after the start; `full:2` lets two saves find no space.
"""

import errno
import os
from typing import Any

import torch
from forge_trainer.hooks import Hook, HookConfig, hooks
from forge_trainer.hooks.base import RunView


@hooks.register("soak")
class SoakConfig(HookConfig):
    """Injects what the environment asks for."""

    def build(self, run: RunView) -> Hook:
        """Nothing without `FORGE_FAULT`, and only on the last rank."""
        kind, _, count = os.environ.get("FORGE_FAULT", "").partition(":")
        last = run.env.rank == run.env.world_size - 1
        if kind == "nan" and last:
            _spoil_once(run, run.progress.step + int(count))
        if kind == "full" and last:
            _fill_disk(int(count))
        return Hook()


def _spoil_once(run: RunView, at: int) -> None:
    done: list[int] = []

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        if run.progress.step < at or done:
            return gradient
        done.append(run.progress.step)
        return gradient * float("inf")

    def watch(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(spoil)

    run.parts[0].get_submodule("norm").register_forward_hook(watch)


def _fill_disk(saves: int) -> None:
    from forge_ckpt.store import Store

    save, left = Store.save, [saves]
    sync = os.fsync

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def failing(self: Store, *args: Any, **kwargs: Any) -> None:
        left[0] -= 1
        os.fsync = full if left[0] >= 0 else sync
        try:
            save(self, *args, **kwargs)
        finally:
            os.fsync = sync

    Store.save = failing  # type: ignore[method-assign]
