"""Random sequences of saves, kills, faults, starts and prunings, compared with a model in memory.

The model knows each published checkpoint byte for byte. After every operation, what is on the disk is what
was published or damaged by the test, at least one checkpoint is intact, and nothing is removed that is to be
kept. Each start loads the newest intact checkpoint, bit for bit, on any number of ranks. 100 sequences here,
1,000 with `--slow`, 10,000 with `FORGE_FAULTS=long` as well.
"""

import errno
import os
import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from faults import LONG, Calls, Killed, figure, files, on_ranks, write_files
from forge_ckpt import CheckpointError, Snapshot, Store
from forge_ckpt import manifest as manifests
from forge_ckpt.layout import Entry
from forge_ckpt.pins import pin, unpin
from forge_ckpt.shards import Box

ROWS, MOST_RANKS = 7, 3
KEEP, EVERY = 2, 5


def tensors(content: int) -> dict[str, torch.Tensor]:
    """Different in every element for different contents."""
    w = torch.arange(ROWS * 2, dtype=torch.float64).reshape(ROWS, 2) + 1000 * content
    return {"model.w": w, "model.b": torch.full((3,), float(content))}


def cut(whole: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor | Box]:
    """What a rank holds: some rows, and all of the other tensor."""
    low, high = rank * ROWS // size, (rank + 1) * ROWS // size
    box = Box(whole["model.w"][low:high], (low, 0), True, Entry("float64", (ROWS, 2)))
    return {"model.w": box, "model.b": whole["model.b"]}


class Model:
    """A run on a disk, and what must be there."""

    def __init__(self, root: Path, calls: Calls, seed: int) -> None:
        self.draw, self.calls = random.Random(seed), calls
        self.folder, self.lease = root / "checkpoints", root / "lease"
        self.lease.mkdir(parents=True)
        self.published: dict[int, tuple[int, dict[str, bytes]]] = {}
        self.epoch = self.contents = self.step = 0
        self.sound: int | None = None
        self.pins: set[int] = set()
        self.sounds: dict[int, int | None] = {}
        self.doubtful: set[int] = set()
        self.stores: list[Store] = []
        self.done: Counter[str] = Counter()
        self.start()

    def disk(self) -> dict[int, Path]:
        """The checkpoints that are there; a spare counts while its step is missing."""
        found = {int(path.name.split("-")[1]): path for path in self.folder.glob(".swap-*")}
        return found | {int(path.name.split("-")[1]): path for path in self.folder.glob("step-*")}

    def intact(self) -> list[int]:
        return [s for s, path in sorted(self.disk().items()) if files(path) == self.published[s][1]]

    def looks_intact(self, step: int) -> bool:
        """Without reading values."""
        now, then = files(self.disk()[step]), self.published[step][1]
        return {name: len(data) if name.endswith(".bin") else data for name, data in now.items()} == {
            name: len(data) if name.endswith(".bin") else data for name, data in then.items()
        }

    def looks(self, verify: bool = False) -> dict[int, bool]:
        """Whether each checkpoint looks intact to who prunes."""
        good = self.intact()
        return {step: step in good if verify else self.looks_intact(step) for step in self.disk()}

    def kept(self, looks: dict[int, bool]) -> set[int]:
        """What pruning must leave, by its definition."""
        steps = sorted(looks.keys() - self.doubtful)
        good = [step for step in steps if looks[step]]
        passing = [step for step in steps if step % EVERY]
        if len(passing) <= KEEP or not good:
            return {*steps, *(looks.keys() & self.doubtful)}
        sound = self.newest_sound(steps) if self.sound is None else self.sound
        before = [s for s in good if sound is not None and s <= sound][-1:]
        doubtful = looks.keys() & self.doubtful
        stays = {s for s in steps if s % EVERY == 0 or s in self.pins}
        return {*doubtful, *passing[-KEEP:], good[-1], *before, *stays}

    def newest_sound(self, steps: list[int]) -> int | None:
        """What the newest checkpoint says that the run may go back to, if its manifest can be read."""
        for step in steps[::-1]:
            path = self.folder / f"step-{step:09d}" / manifests.NAME
            if not path.exists() and step not in self.disk():
                return None  # it is being saved
            if path.exists() and path.read_bytes() == self.published[step][1][manifests.NAME]:
                return self.sounds[step]
        return None

    def opened(self, size: int) -> list[Store]:
        """A new start of the run."""
        self.epoch += 1
        (self.lease / f"epoch-{self.epoch:09d}").touch()
        return [Store(self.folder, KEEP, EVERY, lease=self.lease) for _ in range(size)]

    def start(self, unreadable: int | None = None) -> None:
        """Load the newest intact checkpoint on some ranks."""
        size, expected = self.draw.randint(1, MOST_RANKS), self.intact() if self.published else []
        expected = [step for step in expected if step != unreadable]
        self.stores, self.sound = self.opened(size), None
        live = [
            {key: value.clone() if key == "model.b" else value._replace(values=value.values.clone())
             for key, value in cut(tensors(-1), rank, size).items()}
            for rank in range(size)
        ]  # fmt: skip

        def resume(rank, ranks):
            self.stores[rank]._ranks = ranks
            return self.stores[rank].resume(lambda held: live[rank])

        self.calls.unreadable = self.disk()[unreadable] if unreadable is not None else None
        found = on_ranks(size, resume)
        self.calls.unreadable = None
        if self.published and not expected:
            assert all(isinstance(one, CheckpointError) for one in found), found
            content, self.step = -1, -1
        elif not self.published:
            assert found == [None] * size
            content, self.step = -1, 0
        else:
            assert [one.step for one in found] == [expected[-1]] * size, (found, expected)
            self.step = expected[-1]
            content = self.published[self.step][0]
        self.doubtful = {step for step in self.disk() if step > self.step}
        for rank, held in enumerate(live):
            for key, value in cut(tensors(content), rank, size).items():
                mine, its = (one.values if isinstance(one, Box) else one for one in (held[key], value))
                assert torch.equal(mine, its), (key, rank)

    def save(self, step: int, stores: list[Store], arm=lambda: None, armed: int = 0) -> tuple[list, int]:
        """Save something new; returns what each rank returned or raised, and what was saved."""
        self.contents += 1
        content = self.contents

        def write(rank, ranks):
            stores[rank]._ranks = ranks
            stores[rank].known_good_step = self.sound
            if rank == armed:
                arm()
            stores[rank].save(step, Snapshot(cut(tensors(content), rank, len(stores)), {"content": content}))

        try:
            return on_ranks(len(stores), write), content
        finally:
            self.calls.stop()

    def take_note(self, step: int, content: int, beside: int = -1) -> bool:
        """Whether a save published; the other checkpoints, but that of `beside`, are as they were."""
        assert self.disk().keys() - {step, beside} <= self.published.keys()
        path = self.folder / f"step-{step:09d}"
        if not path.exists() or f'"content":{content}}}'.encode() not in (path / manifests.NAME).read_bytes():
            return False
        self.published[step] = content, files(path)
        self.sounds[step] = self.sound
        self.doubtful.discard(step)
        return True

    def check_kept(self, step: int, published: bool, looks: dict[int, bool], newest: list[int]) -> None:
        """After a save that was cut short: what had to stay is there."""
        expected = self.kept(looks | {step: True}) if published else looks.keys() - {step}
        assert expected <= self.disk().keys(), (expected, self.disk())
        assert not newest or self.intact()[-1] >= newest[-1], (newest, self.intact())

    # the operations

    def do_save(self) -> None:
        self.step += self.draw.randint(1, 2)
        looks = self.looks()
        results, content = self.save(self.step, self.stores)
        assert results == [None] * len(self.stores), results
        assert self.take_note(self.step, content)
        assert self.disk().keys() == self.kept(looks | {self.step: True}), (looks, self.disk().keys())

    def do_kill(self) -> None:
        self.step += self.draw.randint(1, 2)
        at, rank = self.draw.randrange(70), self.draw.randrange(len(self.stores))
        looks, newest = self.looks(), self.intact()[-1:]
        kill = partial(self.calls.before, at, self.calls.kill)
        results, content = self.save(self.step, self.stores, kill, rank)
        died = isinstance(results[rank], Killed)
        self.done["killed in a save"] += died
        published = self.take_note(self.step, content)
        assert published or died
        self.check_kept(self.step, published, looks, newest)
        self.start()

    def do_error(self) -> None:
        self.step += self.draw.randint(1, 2)
        at, rank = self.draw.randrange(70), self.draw.randrange(len(self.stores))
        number = self.draw.choice([errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE])
        looks, newest = self.looks(), self.intact()[-1:]
        fail = partial(self.calls.before, at, partial(self.calls.fail, number))
        results, content = self.save(self.step, self.stores, fail, rank)
        failed = [isinstance(one, CheckpointError) for one in results]
        assert all(failed) or results == [None] * len(results), results
        self.done["failed save"] += all(failed)
        published = self.take_note(self.step, content)
        assert published != all(failed), results
        self.check_kept(self.step, published, looks, newest)

    def do_race(self) -> None:
        """Another process takes the lease in the middle of a save, and saves and prunes."""
        self.step += 1
        at, step = self.draw.randrange(70), self.step + self.draw.randint(0, 1)
        others: list[int] = []

        def race():
            others.append(len(self.calls.paths))
            self.contents += 1
            others.append(self.contents)
            (store,) = self.opened(1)
            store.save(step, Snapshot(cut(tensors(self.contents), 0, 1), {"content": self.contents}))
            others.append(step)  # the other one's saves do not fail

        results, content = self.save(self.step, self.stores, partial(self.calls.before, at, race))
        assert all(one is None or isinstance(one, CheckpointError) for one in results), results
        published = self.take_note(self.step, content, step)
        if others:
            at, content, step = others
            if self.take_note(step, content):
                self.sounds[step] = None  # that process knows of nothing
            looks = [n for n, path in enumerate(self.calls.paths) if path == str(self.lease)]
            assert not published or looks[-1] < at - 1, "who lost the lease has published"
            self.done["raced"] += 1
        self.start()

    def do_corrupt(self) -> None:
        """Damage one checkpoint, and never the last intact one."""
        intact, there = self.intact(), sorted(self.folder.glob("step-*"))
        there = [path for path in there if len(intact) > 1 or int(path.name[5:]) not in intact]
        if not there:
            return
        folder = self.draw.choice(there)
        path = self.draw.choice(sorted(folder.iterdir()))
        kind = self.draw.choice(["flip", "flip", "cut", "grow", "delete", "swap", "folder", "gone"])
        other = self.draw.choice(sorted(self.folder.glob("step-*")))
        data = bytearray(path.read_bytes())
        if kind == "flip" and data:
            data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
            path.write_bytes(data)
        elif kind == "cut" and data:
            path.write_bytes(data[: self.draw.randrange(len(data))])
        elif kind == "grow":
            path.write_bytes(data + b"\0")
        elif kind == "delete":
            path.unlink()
        elif kind == "swap" and (other / path.name).exists():
            path.write_bytes((other / path.name).read_bytes())
        elif kind == "folder":
            write_files(folder, files(other))
        elif kind == "gone":
            shutil.rmtree(folder)
        self.done["damaged"] += 1

    def do_prune(self) -> None:
        expected = self.kept(self.looks(verify=True))
        self.stores[0].known_good_step = self.sound
        self.stores[0].prune()
        assert self.disk().keys() == expected

    def do_pin(self) -> None:
        self.sound = self.draw.choice([None, *self.disk(), 1000])

    def do_pin_by_hand(self) -> None:
        """As `forge-ckpt pin` and `unpin` do, whatever the run does."""
        step = self.draw.choice([int(path.name[5:]) for path in self.folder.glob("step-*")] or [1])
        if step in self.pins:
            unpin(self.folder, step)
            self.pins.discard(step)
        elif (self.folder / f"step-{step:09d}").exists():
            pin(self.folder, step)
            self.pins.add(step)
            self.done["pinned"] += 1

    def do_start(self) -> None:
        self.start()
        self.done["started"] += 1

    def do_start_unreadable(self) -> None:
        """The newest cannot be read now; whoever reads it later still has it."""
        before = self.intact()
        if len(before) < 2:
            return
        self.start(unreadable=before[-1])
        self.done["fell back"] += 1
        assert before[-1] in self.intact()

    def do_lose_all(self) -> None:
        """Every checkpoint is damaged: the run refuses to begin again."""
        for path in self.folder.glob("step-*"):
            (path / "manifest.json").write_bytes(b"")
        self.start()


OPERATIONS = {
    Model.do_save: 6,
    Model.do_kill: 4,
    Model.do_error: 2,
    Model.do_race: 2,
    Model.do_corrupt: 4,
    Model.do_prune: 1,
    Model.do_pin: 1,
    Model.do_pin_by_hand: 1,
    Model.do_start: 2,
    Model.do_start_unreadable: 2,
}


def run_sequence(root: Path, calls: Calls, seed: int, done: Counter[str]) -> None:
    """One sequence; the error of a failure names its seed and what was done."""
    model = Model(root, calls, seed)
    told = []
    try:
        for _ in range(model.draw.randint(3, 10)):
            operation = model.draw.choices([*OPERATIONS], [*OPERATIONS.values()])[0]
            told.append(operation.__name__)
            operation(model)
            done["operations"] += 1
            assert not model.published or model.intact(), "nothing is intact"
        if model.draw.random() < 0.1 and model.published:
            told.append("lose_all")
            model.do_lose_all()
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {' '.join(told)}: {type(error).__name__}: {error}") from error
    done.update(model.done)


def run_sequences(monkeypatch: pytest.MonkeyPatch, folder: Path, seeds: range) -> Counter[str]:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    calls, done = Calls(monkeypatch), Counter()
    for seed in seeds:
        root = folder / str(seed)
        run_sequence(root, calls, seed, done)
        shutil.rmtree(root)
    return done


def test_any_sequence_leaves_an_intact_checkpoint_that_the_next_start_finds(tmp_path, monkeypatch):
    done = run_sequences(monkeypatch, tmp_path, range(100))
    assert min(done[key] for key in ("killed in a save", "failed save", "raced", "damaged", "fell back")) > 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_sequences(tmp_path, monkeypatch):
    count = 10_000 if LONG else 1_000
    done = run_sequences(monkeypatch, tmp_path, range(1000, 1000 + count))
    told = ", ".join(f"{number:,} {what}" for what, number in sorted(done.items()))
    figure("random sequences against a model", count, f"always one intact, the newest found ({told})")
