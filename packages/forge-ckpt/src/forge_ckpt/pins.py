"""The checkpoints that somebody wants to keep. Imports no torch.

checkpoints/pin-000000300    step 300 is not pruned while this file is there
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from forge_ckpt.disk import sync
from forge_ckpt.error import CheckpointError
from forge_ckpt.manifest import step_name

_PIN = re.compile(r"pin-(\d{9,})")


def pins(root: Path) -> list[int]:
    """Return the pinned steps, ascending.

    Raises:
        OSError: the folder cannot be listed.
    """
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _PIN.fullmatch(name)))


def pin(root: Path, step: int) -> None:
    """Pin the checkpoint of a step, so that no process prunes it.

    Raises:
        CheckpointError: there is none, or it was removed at this moment.
        OSError: the folder cannot be written to.
    """
    path = _path(root, step)
    if (root / step_name(step)).is_dir():
        path.touch()
        sync(root)
        if (root / step_name(step)).is_dir():  # whoever prunes from now on sees the pin
            return
        path.unlink(missing_ok=True)
    raise CheckpointError(f"there is no checkpoint of step {step} in {root}")


def unpin(root: Path, step: int) -> None:
    """Unpin the checkpoint of a step.

    Raises:
        CheckpointError: it is not pinned.
        OSError: the folder cannot be written to.
    """
    try:
        _path(root, step).unlink()
    except FileNotFoundError:
        raise CheckpointError(f"step {step} is not pinned in {root}") from None


def _path(root: Path, step: int) -> Path:
    return root / f"pin-{step:09d}"
