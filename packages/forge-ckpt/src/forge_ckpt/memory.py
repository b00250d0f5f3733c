"""The host memory that this process may still allocate. Imports no torch.

It is the least of the free memory of the machine and of each cgroup around this process, of version 1 or 2.
The use of a cgroup counts without the page cache that the kernel gives up first, as Kubernetes counts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def free_memory_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes that may still be allocated; None if the system does not report them.

    Args:
        root: the folder of `proc` and `sys`.
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
    """Return the cgroup of this process, from the root of cgroups; the root itself if it is unknown."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return PurePosixPath(path.lstrip("/"))
    return PurePosixPath()


def _around(group: PurePosixPath) -> list[PurePosixPath]:
    """Return a cgroup and all that contain it, the root too: a container only has the root."""
    return [group, *group.parents] if group.parts else [group]


def _number(path: Path) -> int:
    return int(path.read_text())


def _inactive(folder: Path) -> int:
    """Return the page cache that is given up first, of a cgroup and the cgroups in it."""
    found = {}
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, value = line.split()
            found[name] = int(value)
    return found.get("total_inactive_file", found.get("inactive_file", 0))
