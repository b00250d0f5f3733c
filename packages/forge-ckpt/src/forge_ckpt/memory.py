"""How much host memory may this process still take? Imports no torch.

The least of what the machine has left and what each cgroup around this process leaves, of version 1 or 2.
What a cgroup uses counts without the page cache that the kernel gives up first, as Kubernetes counts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def free_memory_bytes(root: Path = ROOT) -> int | None:
    """Bytes that may still be taken; None if nothing says so.

    Args:
        root: where `proc` and `sys` are.
    """
    found = [*_of_cgroups(root)]
    with suppress(OSError, ValueError, IndexError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return max(0, min(found)) if found else None


def _of_cgroups(root: Path) -> Iterator[int]:
    """The free memory of each cgroup around this process that has a limit."""
    mounted = root / "sys/fs/cgroup"
    for base, controller, limit, used in (
        (mounted, "", "memory.max", "memory.current"),
        (mounted / "unified", "", "memory.max", "memory.current"),
        (mounted / "memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for group in _around(_own(root, controller)):
            with suppress(OSError, ValueError):  # no such group, or "max"
                folder = base / group
                yield _number(folder / limit) - _number(folder / used) + _inactive(folder)


def _own(root: Path, controller: str) -> PurePosixPath:
    """The cgroup of this process, from its root; that itself where it is not told."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return PurePosixPath(path.lstrip("/"))
    return PurePosixPath()


def _around(group: PurePosixPath) -> list[PurePosixPath]:
    """A cgroup and all that it is in, the root too: within a container only that is there."""
    return [group, *group.parents] if group.parts else [group]


def _number(path: Path) -> int:
    return int(path.read_text())


def _inactive(folder: Path) -> int:
    """Page cache that is given up first, of a cgroup and those in it."""
    found = {}
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, value = line.split()
            found[name] = int(value)
    return found.get("total_inactive_file", found.get("inactive_file", 0))
