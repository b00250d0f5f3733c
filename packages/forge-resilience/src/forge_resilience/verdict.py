"""What should happen after a step, and how all ranks come to the same answer."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Verdict(IntEnum):
    """The request of a guard; of several verdicts the gravest counts."""

    CONTINUE = 0
    """Train on."""
    SAVE = 1
    """Write a checkpoint, then train on."""
    STOP = 2
    """Write a checkpoint, then end the run; it can be continued."""
    ROLLBACK = 3
    """Go back to a checkpoint from before the trouble and train on from there."""
    ABORT = 4
    """End the run without a checkpoint: the state is not worth keeping."""


def agree(verdict: Verdict, group: ProcessGroup | None) -> Verdict:
    """Return the gravest verdict of all ranks. Collective.

    Args:
        verdict: the verdict of this rank.
        group: a CPU (gloo) group, so that the device queue is not waited for; None in a lone process.
    """
    if group is None:
        return verdict
    import torch
    import torch.distributed as dist

    gravest = torch.tensor(int(verdict))
    dist.all_reduce(gravest, op=dist.ReduceOp.MAX, group=group)
    return Verdict(int(gravest))
