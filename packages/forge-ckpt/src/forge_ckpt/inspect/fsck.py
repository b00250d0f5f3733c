"""The contents of a folder of checkpoints, and whether each is as it should be. Changes nothing."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from forge_ckpt.folders import PROGRESS, Folders, marks_around
from forge_ckpt.inspect.report import CANNOT, FINE, FOUND, Row, code_of, rows
from forge_ckpt.lease import newest_epoch, read_holder
from forge_ckpt.manifest import step_name
from forge_ckpt.pins import pins
from forge_ckpt.store import Store

LEFTOVERS = {
    "tmp": "a save that was cut off; the next one removes it",
    "bad": "put aside because it is damaged; remove it when you have looked",
    "old": "could not be read and was written again; remove it when you have looked",
    "swap": "a save that was cut off; the next start puts it back",
    "trash": "a removal that was cut off; the next save ends it",
}
"""What starts with a dot, and what becomes of it."""

_HIDDEN = re.compile(r"\.(tmp|bad|old|swap|trash)-.*")
_STEP = re.compile(r"step-\d{9,}")
_PIN = re.compile(r"pin-\d{9,}")


def fsck(root: Path) -> Iterator[Row]:
    """Check everything in a folder of checkpoints; reads every byte of them.

    Args:
        root: the folder.

    Yields:
        For each entry an object: `what` is checkpoint, leftover, pin, odd, progress, lease or verdict;
            `state`
        is its state, `why` the consequence. The last is the verdict: `intact` steps, the exit `code`.

    Raises:
        OSError: the folder cannot be listed.
    """
    store, names = Store(root), sorted(os.listdir(root))
    found: list[Row] = []
    for one in rows(store, verify=True):
        folder = store.folder(one["step"])
        if folder.is_symlink():
            one["why"] = f"{one.get('why', '')} is a link to {os.readlink(folder)}".strip()
        found.append({"what": "checkpoint", **one})
        yield found[-1]
    lease = _lease(root.parent / "lease")
    for name in names:
        if entry := _other(root, name, lease["state"] == "held"):
            yield entry
    for step in pins(root):
        if not (root / step_name(step)).exists():
            yield {"what": "pin", "step": step, "state": "dangling", "why": "there is no such checkpoint"}
    progress = Folders(root, marks=marks_around(root)).progress()
    intact = [one["step"] for one in found if one["state"] == "intact"]
    yield {"what": "progress", "step": progress, **_behind(progress, max(intact, default=-1))}
    yield {"what": "lease", **lease}
    code = code_of(one["state"] for one in found) or (FOUND if progress >= 0 and not intact else FINE)
    state = _VERDICTS[code] if found or code else "there are no checkpoints"
    yield {"what": "verdict", "state": state, "intact": intact, "code": code}


_VERDICTS = {
    FINE: "all checkpoints are intact",
    FOUND: "something is damaged or lost",
    CANNOT: "something cannot be read, or not by this version",
}


def _behind(progress: int, newest: int) -> Row:
    if progress < 0:
        return {"state": "none", "why": "nothing was ever published here"}
    if newest < 0:
        return {"state": "lost", "why": f"step {progress} was published, and no intact checkpoint is left"}
    if newest < progress:
        return {
            "state": "behind",
            "why": f"the newest intact one is {newest}: a rollback, or {progress} is lost",
        }
    return {"state": "reached"}


def _other(root: Path, name: str, is_leased: bool) -> Row | None:
    """Return the kind of a name that is no checkpoint; None if nothing need be reported."""
    if match := _HIDDEN.fullmatch(name):
        megabytes = round(_num_bytes(root / name) / 1e6, 1)
        if is_leased and match[1] == "tmp":
            return {
                "what": "leftover",
                "name": name,
                "state": "busy",
                "MB": megabytes,
                "why": "being written",
            }
        return {
            "what": "leftover",
            "name": name,
            "state": match[1],
            "MB": megabytes,
            "why": LEFTOVERS[match[1]],
        }
    if name == PROGRESS or _STEP.fullmatch(name) or _PIN.fullmatch(name) or name.startswith(f".{PROGRESS}-"):
        return None
    return {"what": "odd", "name": name, "state": "unknown", "why": "nothing of ours has such a name"}


def _num_bytes(path: Path) -> int:
    """Return the size of all files below; links are not followed."""
    total = 0
    for folder, _, files in os.walk(path):
        for file in files:
            try:
                found = os.lstat(os.path.join(folder, file))
            except OSError:
                continue
            total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total


def _lease(folder: Path) -> Row:
    if not newest_epoch(folder):
        return {"state": "none", "why": "no start took it"}
    holder = read_holder(folder)
    if holder is None:
        return {"state": "free"}
    alive = holder.is_alive()
    state = {True: "held", False: "left", None: "unknown"}[alive]
    why = {True: "", False: ", which has ended", None: ", on another machine"}[alive]
    return {"state": state, "why": f"{holder}{why}"}
