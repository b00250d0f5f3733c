"""What a power cut may leave of saves: the newest checkpoint that was confirmed is there, whatever is lost.

A disk owes nothing that was not synced. Of each folder, any of the changes to its names since it was synced
may be lost, and the others not; of each file, all that was written since it was synced. Every moment of a few
saves is cut so: all of it lost, all of it but the contents, and some of it at random. Stronger promises (ext4
keeps the order of changes) leave fewer states than these.
"""

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from faults import LONG, figure, on_ranks
from forge_ckpt import Snapshot, Store

CALLS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
Tree = dict[str, bytes | None]
"""Contents of files by path below the disk; None is a folder."""


class Disk:
    """Follows what happens below a folder, and collects what power cuts may leave of it.

    Args:
        monkeypatch: puts everything back.
        base: the folder, which is on the disk.
        draws: random states at each moment.
        confirmed: what was confirmed so far, kept with each state.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, base: Path, draws: int, confirmed: Callable[[], int]
    ) -> None:
        self.base, self.left = base, dict[tuple, Tree]()
        self._draw, self._draws, self._confirmed = random.Random(0), draws, confirmed
        self._lock, self._held = threading.RLock(), dict[int, int]()
        self._names: dict[int, dict[str, int]] = {}
        self._changes: dict[int, list[tuple[set[str], dict[str, int]]]] = {}
        self._synced_names: dict[int, dict[str, int]] = {}
        self._synced: dict[int, bytes] = {}
        self._top = base.stat().st_ino
        for name in CALLS:
            monkeypatch.setattr(os, name, self._followed(name, getattr(os, name)))

    def _followed(self, name: str, original: Callable) -> Callable:
        def call(*args, **kwargs):
            with self._lock:
                self._look()
                done = self._sync(*args) if name == "fsync" else original(*args, **kwargs)
                self._look()
                self._cut()
                return done

        return call

    def _sync(self, descriptor: int) -> None:
        number, path = os.fstat(descriptor).st_ino, Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not path.is_relative_to(self.base):
            return
        if path.is_dir():
            self._synced_names[number] = dict(self._names[number])
            self._changes[number] = []
        else:
            self._synced[number] = path.read_bytes()

    def _look(self) -> None:
        """Note what has changed in every folder since the last look."""
        found: dict[int, dict[str, int]] = {}
        for folder, _, _ in os.walk(self.base):
            entries = {entry.name: entry for entry in os.scandir(folder)}
            found[os.stat(folder).st_ino] = {name: entry.inode() for name, entry in entries.items()}
            for entry in entries.values():
                if entry.inode() not in self._held:  # so that its number is not given out again
                    self._held[entry.inode()] = os.open(entry.path, os.O_RDONLY)
        for number, now in found.items():
            before = self._names.get(number, {})
            gone, new = before.keys() - now.keys(), {n: i for n, i in now.items() if before.get(n) != i}
            if gone or new:
                self._changes.setdefault(number, []).append((set(gone), new))
        self._names |= found

    def _cut(self) -> None:
        for keeps in (0.0, 1.0, *(self._draw.random() for _ in range(self._draws))):
            tree: Tree = {}
            self._survives(self._top, "", keeps, tree)
            contents = ((name, data) for name, data in tree.items() if data is not None)
            self.left[self._confirmed(), *sorted(contents)] = tree

    def _survives(self, number: int, path: str, keeps: float, tree: Tree) -> None:
        names = dict(self._synced_names.get(number, {}))
        for gone, new in self._changes.get(number, []):
            if self._draw.random() < keeps:
                names = {name: inode for name, inode in names.items() if name not in gone} | new
        for name, inode in names.items():
            where = f"{path}{name}"
            if os.path.isdir(f"/proc/self/fd/{self._held[inode]}"):
                tree[where] = None
                self._survives(inode, where + "/", keeps, tree)
                continue
            size = os.fstat(self._held[inode]).st_size
            data = os.pread(self._held[inode], size, 0)
            if data != self._synced.get(inode):
                lost = [self._synced.get(inode, b""), data[: self._draw.randrange(size + 1)], bytes(size)]
                data = lost[0] if keeps == 0 else self._draw.choice(lost)
            tree[where] = data

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)


def tensors(content: int) -> dict[str, torch.Tensor]:
    return {"model.w": torch.full((5,), float(content)), "model.b": torch.arange(3) + content}


def store_on(disk: Path) -> Store:
    return Store(disk / "runs" / "one" / "checkpoints", keep=2, marks=[disk / "runs" / ".progress" / "one"])


def save(stores: list[Store], step: int, content: int) -> None:
    def on_rank(rank, ranks):
        stores[rank]._ranks = ranks
        stores[rank].save(step, Snapshot(tensors(content), {"content": content}))

    assert on_ranks(len(stores), on_rank) == [None] * len(stores)


def check(tree: Tree, disk: Path, confirmed: int) -> str:
    """The next start finds what was confirmed, or what came after it, and saves."""
    disk.mkdir()
    for name, data in sorted(tree.items()):
        if data is None:
            (disk / name).mkdir()
        else:
            (disk / name).write_bytes(data)
    live = tensors(-1)
    found = store_on(disk).resume(lambda held: live)
    at = found.meta["content"] if found is not None else 0
    assert at >= confirmed, f"{at} was found, and {confirmed} was confirmed: {sorted(tree)}"
    assert found is None or all(torch.equal(live[key], value) for key, value in tensors(at).items())
    save([store_on(disk)], 9, 99)
    again = store_on(disk).resume(lambda held: live)
    assert again is not None and again.meta == {"content": 99}
    return "what was confirmed" if at == confirmed else "what came after it"


@pytest.mark.parametrize("ranks", [1, 2])
def test_power_cut_at_any_moment_leaves_what_was_confirmed(tmp_path, ranks):
    confirmed = 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        (tmp_path / "disk").mkdir()
        disk = Disk(monkeypatch, tmp_path / "disk", 200 if LONG else 4, lambda: confirmed)
        stores = [store_on(disk.base) for _ in range(ranks)]
        for content, step in enumerate((1, 2, 3, 4, 4), start=1):
            if step < content:  # as if it had been unreadable: it is written again
                for store in stores:
                    store._passed_over.add(step)
            save(stores, step, content)
            confirmed = content
            disk._cut()
        disk.close()
    outcomes: dict[str, int] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        for number, (key, tree) in enumerate(disk.left.items()):
            told = check(tree, tmp_path / str(number), key[0])
            outcomes[told] = outcomes.get(told, 0) + 1
    assert len(disk.left) > 100 and len(outcomes) == 2, outcomes
    told = ", ".join(f"{count:,} {what}" for what, count in sorted(outcomes.items()))
    figure(f"power cut at any moment of saves, what was not synced lost in part, ranks: {ranks}",
           len(disk.left), f"the newest confirmed is found ({told})")  # fmt: skip
