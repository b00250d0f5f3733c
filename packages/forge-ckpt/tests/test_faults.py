"""Checkpoints that were damaged, mixed up, forged or raced for: found before anything live changes."""

import contextlib
import json
import os
import pickle
import random
import resource
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from faults import LONG, figure, files, on_ranks, write_files
from forge_ckpt import CheckpointError, Snapshot, Store
from forge_ckpt import lease as leases
from forge_ckpt import manifest as manifests
from forge_ckpt.cli import main
from forge_ckpt.inspect.checkpointed import Checkpointed
from forge_ckpt.layout import Entry
from forge_ckpt.shards import Box

ROWS, RANKS = 12, 3
CANARY = -7.0


def tensors(content: float) -> dict[str, torch.Tensor]:
    w = torch.arange(ROWS * 40, dtype=torch.float64).reshape(ROWS, 40) + 1000 * content
    return {"model.w": w, "model.b": torch.full((9,), float(content))}


def cut(whole: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor | Box]:
    low, high = rank * ROWS // size, (rank + 1) * ROWS // size
    box = Box(whole["model.w"][low:high], (low, 0), True, Entry("float64", (ROWS, 40)))
    return {"model.w": box, "model.b": whole["model.b"]}


def save(root: Path, step: int, size: int = RANKS) -> None:
    def write(rank, ranks):
        store = Store(root)
        store._ranks = ranks
        store.save(step, Snapshot(cut(tensors(step), rank, size), {"at": step}))

    assert on_ranks(size, write) == [None] * size


def resume(root: Path, size: int) -> tuple[list, list[float]]:
    """What each rank returned or raised, and of which step each live tensor is afterwards."""
    live = [{key: torch.full_like(value, CANARY) for key, value in tensors(0).items()} for _ in range(size)]

    def read(rank, ranks):
        store = Store(root)
        store._ranks = ranks
        return store.resume(lambda held: cut(live[rank], rank, size))

    found = on_ranks(size, read)
    for rank, held in enumerate(live):
        step = CANARY if isinstance(found[rank], Exception) else found[rank].step
        expected = tensors(step) if step >= 0 else {k: torch.full_like(v, CANARY) for k, v in held.items()}
        mine, its = cut(held, rank, size), cut(expected, rank, size)
        assert torch.equal(mine["model.w"].values, its["model.w"].values), "something else was loaded"
        assert torch.equal(mine["model.b"], its["model.b"]), "something else was loaded"
    return found, [CANARY if isinstance(one, Exception) else one.step for one in found]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr("forge_ckpt.shards.BLOCK_BYTES", 256)


@pytest.fixture
def two(tmp_path, small_blocks):
    """Checkpoints of steps 1 and 2 by three ranks."""
    root = tmp_path / "checkpoints"
    save(root, 1)
    save(root, 2)
    return root


def flips(root: Path, count: int, seed: int) -> Counter[str]:
    """Flip one bit, resume, and put everything back; again and again, in every file."""
    draw, found = random.Random(seed), Counter()
    whole = {folder.name: files(folder) for folder in root.iterdir() if folder.is_dir()}
    progress = (root / "PROGRESS").read_bytes()
    names = [*(f"step-000000002/{name}" for name in whole["step-000000002"]), "PROGRESS"]
    for index in range(count):
        alone = draw.random() < 0.3
        shutil.rmtree(root)
        for name, held in whole.items():
            if not (alone and name == "step-000000001"):
                write_files(root / name, held)
        (root / "PROGRESS").write_bytes(progress)
        path = root / names[index % len(names)]
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        _, steps = resume(root, draw.randint(1, RANKS))
        if path.name == "PROGRESS":
            assert set(steps) == {2}
            found["harmless, in PROGRESS"] += 1
        else:
            assert set(steps) == ({CANARY} if alone else {1}), (path, steps)
            found["refused, nothing older being there" if alone else "found, and the older one taken"] += 1
    return found


def test_flipped_bits_are_found_before_live_state_changes(two):
    assert flips(two, 40, seed=0).total() == 40


@pytest.mark.slow
def test_two_thousand_flipped_bits(two):
    found = flips(two, 2000, seed=1)
    figure("one flipped bit in a file of a checkpoint", 2000, told(found))


def told(found: Counter[str]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in sorted(found.items()))


def beside(path: Path, kind: str) -> Path:
    """The file to take the place of another one."""
    if kind == "stale":
        return path.parent.parent / "step-000000001" / path.name
    number = int(path.name[5:10]) if path.name.startswith("rank") else 0
    return path.with_name(path.name.replace(f"{number:05d}", f"{(number + 1) % RANKS:05d}"))


def harm(path: Path, kind: str) -> None:
    data = path.read_bytes()
    if kind in ("swapped", "stale"):
        other = beside(path, kind)
        path.write_bytes(other.read_bytes())
        if kind == "swapped":
            other.write_bytes(data)
        return
    path.unlink()
    elsewhere = path.parent.parent / "elsewhere"
    make = {
        "short": lambda: path.write_bytes(data[:-1]),
        "emptied": path.touch,
        "long": lambda: path.write_bytes(data + b"\0"),
        "zeros": lambda: path.write_bytes(bytes(len(data))),
        "a folder": path.mkdir,
        "a pipe": lambda: os.mkfifo(path),
        "a link": lambda: (elsewhere.write_bytes(data), path.symlink_to(elsewhere)),
        "a pickle": lambda: path.write_bytes(pickle.dumps(Evil(str(path.parent.parent / "executed")))),
    }
    make.get(kind, lambda: None)()


class Evil:
    """What unpickles this makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


KINDS = [
    "short",
    "emptied",
    "long",
    "zeros",
    "missing",
    "swapped",
    "stale",
    "a folder",
    "a pipe",
    "a link",
    "a pickle",
]


def test_file_that_is_not_what_was_written_is_found_whatever_it_is(two):
    whole = {folder.name: files(folder) for folder in two.iterdir() if folder.is_dir()}
    tried = 0
    for name in whole["step-000000002"]:
        for kind in KINDS:
            if kind == "swapped" and not name.startswith("rank"):
                continue
            for path in two.iterdir():
                shutil.rmtree(path) if path.is_dir() else None
            for folder, held in whole.items():
                write_files(two / folder, held)
            harm(two / "step-000000002" / name, kind)
            _, steps = resume(two, 1 + tried % RANKS)
            assert set(steps) == {1}, (name, kind)
            assert not (two / "executed").exists()
            tried += 1
    figure("a file short, long, missing, swapped, stale, zeros, a link, a folder, a pipe or a pickle", tried,
           "found, and the older one taken")  # fmt: skip


def sign(path: Path, body: bytes) -> bytes:
    """Write a manifest or index with a good digest."""
    data = manifests.digest(body).hex().encode() + b"\n" + body
    path.write_bytes(data)
    return data


def forge_index(folder: Path, rank: int, body: bytes) -> None:
    """Write an index with a good digest, which the manifest then names."""
    data = sign(folder / manifests.index_file_name(rank), body)
    told = json.loads((folder / manifests.NAME).read_bytes().partition(b"\n")[2])
    told["files"][rank][1:] = [len(data), manifests.digest(data).hex()]
    sign(folder / manifests.NAME, json.dumps(told).encode())


HOSTILE = [
    -1, 0, 1, 7, 2**31, 2**63 - 1, 2**64, 10**300, 1e308, -0.5, "", "x", "../../../etc/passwd", "/etc/passwd",
    None, True, [], [[]], {}, {"__class__": "os.system"}, [0] * 10_000, [10**9] * 3000, "A" * 100_000,
    [[0, 0]] * 500,
]  # fmt: skip


def places(value, path=()):
    """The places of all values within JSON."""
    yield path
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from places(item, (*path, key))


def put(value, path, new):
    """The JSON with one value, or the name of one, changed."""
    if not path:
        return new
    key, *rest = path
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = put(value[key], rest, new)
    return copy


def touch_all(root: Path) -> str:
    """Do all that reads a checkpoint; every error must be one of ours. Returns how resuming ended."""
    store = Store(root)
    for work in (
        lambda: store.verify(2),
        lambda: [tensor.sum() for tensor in Checkpointed(store.folder(2)).values()],
        store.newest,
    ):
        with contextlib.suppress(CheckpointError):
            work()
    for command in ("ls", "show", "verify"):
        main([command, str(root), *(["--step", "2"] if command != "ls" else [])])
    found, steps = resume(root, 1)
    assert not isinstance(found[0], Exception) or isinstance(found[0], CheckpointError), found
    return {1: "passed over", 2: "loaded, what is asked for being right"}.get(steps[0], "refused")


def forgeries(root: Path, count: int, seed: int) -> Counter[str]:
    """Change one value of a manifest or index to something hostile, with good digests."""
    draw, outcomes = random.Random(seed), Counter()
    whole = {folder.name: files(folder) for folder in root.iterdir() if folder.is_dir()}
    folder = root / "step-000000002"
    for index in range(count):
        for name, held in whole.items():
            write_files(root / name, held)
        name = draw.choice([manifests.NAME, manifests.NAME, "rank-00001.json"])
        body = json.loads((folder / name).read_bytes().partition(b"\n")[2])
        path = draw.choice([place for place in places(body) if place])
        forged = json.dumps(put(body, path, draw.choice(HOSTILE))).encode()
        try:
            sign(folder / name, forged) if name == manifests.NAME else forge_index(folder, 1, forged)
            outcomes[touch_all(root)] += 1
        except AssertionError as error:
            raise AssertionError(f"{index}: {name} {path}: {forged[:2000]!r}") from error
        for left in root.glob(".bad-*"):
            shutil.rmtree(left)
    return outcomes


@pytest.fixture
def small(tmp_path):
    """Checkpoints of steps 1 and 2 by two ranks; some of their bytes may be garbage, so ours are constant."""
    root = tmp_path / "checkpoints"
    save(root, 1, 2)
    save(root, 2, 2)
    return root


def test_forged_manifest_or_index_is_refused_or_harmless(small, capsys):
    assert forgeries(small, 60, seed=0).total() == 60


@pytest.mark.slow
def test_a_thousand_forged_manifests_and_indices(small, capsys):
    outcomes = forgeries(small, 1000, seed=1)
    capsys.readouterr()
    figure("a hostile value in a manifest or index, digests made good", 1000, told(outcomes))


def peak_mb(path: Path, out: str) -> None:
    """In a process of its own: how much memory it takes to look at everything."""
    torch.arange(10.0).sum()
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.monotonic()
    touch_all(path)
    took_s = time.monotonic() - began_s
    Path(out).write_text(f"{(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin) / 1e3} {took_s}")


AROUND = (
    b'{"format":2,"step":2,"torch":"","milestone":false,"meta":{"x":',
    b'},"values":{},"files":[],"layouts":[],"tensors":{}}',
)


def bombs():
    def nested(folder):
        deep = b"[" * 20_000_000 + b"]" * 20_000_000
        sign(folder / manifests.NAME, AROUND[0] + deep + AROUND[1])

    def wide(folder):
        many = b"[]," * 80_000_000 + b"[]"
        sign(folder / manifests.NAME, AROUND[0] + b"[" + many + b"]" + AROUND[1])

    def one_block(folder):
        """A file with a hole of a terabyte, in one block."""
        size = 1 << 40
        os.truncate(folder / "rank-00000.bin", size)
        index = {"block_bytes": size, "digests": "A" * 22 + "==", "offsets": {"model.b": 0, "model.w": 64}}
        grow(folder, size, index)

    def hole(folder):
        """The same in blocks of ours, none of them right."""
        size = 1 << 34
        os.truncate(folder / "rank-00000.bin", size)
        blocks = size // (1 << 18)
        grow(folder, size, {
            "block_bytes": 1 << 18, "digests": manifests.encode_digests([bytes(16)] * blocks),
            "offsets": {"model.b": 0, "model.w": 64},
        })  # fmt: skip

    def dims(folder):
        told = json.loads((folder / manifests.NAME).read_bytes().partition(b"\n")[2])
        told["tensors"]["model.w"][1] = [10**18] * 1_000_000
        sign(folder / manifests.NAME, json.dumps(told).encode())

    return [nested, wide, one_block, hole, dims]


def grow(folder: Path, size: int, index: dict) -> None:
    forge_index(folder, 0, json.dumps(index).encode())
    told = json.loads((folder / manifests.NAME).read_bytes().partition(b"\n")[2])
    told["files"][0][0] = size
    told["tensors"]["model.w"][1] = [ROWS, 40]
    sign(folder / manifests.NAME, json.dumps(told).encode())


@pytest.mark.slow
@pytest.mark.parametrize("bomb", bombs(), ids=lambda bomb: bomb.__name__)
def test_forged_checkpoint_takes_little_memory_and_time(small, forks, tmp_path, bomb):
    bomb(small / "step-000000002")
    assert forks.run(peak_mb, small, str(tmp_path / "peak")) == 0
    megabytes, seconds = map(float, (tmp_path / "peak").read_text().split())
    figure(f"a checkpoint made to take memory: {bomb.__name__.replace('_', ' ')}", 1,
           f"{megabytes:.0f} MB at most, {seconds:.1f} s")  # fmt: skip
    assert megabytes < 600 and seconds < 20


def test_nothing_outside_of_the_folder_is_written_or_removed(tmp_path):
    root, outside = tmp_path / "run" / "checkpoints", tmp_path / "outside"
    for step in range(1, 5):
        Store(root, keep=9).save(step, Snapshot({"model.../../../evil": torch.ones(2)}))
    shutil.copytree(root / "step-000000004", outside)
    before = files(outside)
    shutil.rmtree(root / "step-000000002")
    (root / "step-000000002").symlink_to(outside)
    (root / ".trash-x").symlink_to(outside)
    (root / ".tmp-0-000000009-x").symlink_to(outside)
    Store(root, keep=2).save(5, Snapshot({"model.../../../evil": torch.ones(2)}))
    assert main(["export", str(root), str(tmp_path / "run" / "out"), "--step", "5"]) == 0
    assert files(outside) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "run"]


def test_mount_that_is_empty_vanished_or_something_else_is_no_new_run(tmp_path):
    root, mark = tmp_path / "disk" / "checkpoints", tmp_path / "marks" / "run"

    def started():
        live = {"w": torch.zeros(2)}
        return Store(root, marks=[mark]).resume(lambda held: live)

    assert started() is None
    Store(root, marks=[mark]).save(3, Snapshot({"w": torch.ones(2)}))
    assert started().step == 3
    away = tmp_path / "away"
    os.rename(root, away)
    for make in (lambda: None, root.mkdir, lambda: (root.rmdir(), root.touch())):
        make()
        with pytest.raises(CheckpointError):
            started()
    root.unlink()
    os.rename(away, root)
    assert started().step == 3


def test_disk_that_vanishes_under_a_run_gets_no_checkpoint_and_comes_back(tmp_path):
    run, away = tmp_path / "run", tmp_path / "away"
    lease = leases.take(run / "lease")
    store = Store(run / "checkpoints", lease=run / "lease")
    store.save(1, Snapshot({"w": torch.ones(2)}))
    os.rename(run, away)
    with pytest.raises(CheckpointError, match="is the disk there"):
        store.save(2, Snapshot({"w": torch.ones(2)}))
    assert not list(run.glob("checkpoints/*"))
    shutil.rmtree(run, ignore_errors=True)
    os.rename(away, run)
    store.save(3, Snapshot({"w": torch.ones(2)}))
    assert store.steps() == [1, 3]
    lease.release()


# two writers


def contend(root: Path, writer: int, step: int) -> None:
    """Take the lease and save; exit code 4 when another one holds it."""
    try:
        lease = leases.take(root / "lease")
    except CheckpointError:
        os._exit(4)
    store = Store(root / "checkpoints", keep=3, lease=root / "lease")
    store.save(step, Snapshot(tensors(writer), {"writer": writer}))
    lease.release()


def orphan(root: Path) -> None:
    """A start on another machine, which hears of nothing: saves until it may not any more."""
    leases.this_machine = lambda: "another machine"
    leases.take(root / "lease", beat_s=1000)
    store = Store(root / "checkpoints", keep=3, lease=root / "lease")
    (root / "ready").touch()
    step = 0
    with (root / "log").open("w", buffering=1) as log:
        while True:
            step += 1
            begin = time.monotonic()
            try:
                store.save(step, Snapshot(tensors(1), {"writer": 1}))
            except CheckpointError as error:
                os._exit(5 if "took over" in str(error) or "No such file" in str(error) else 6)
            log.write(f"{begin}\n")


def successor(root: Path) -> None:
    """Take over from a holder that shows nothing, and save the steps after the newest."""
    leases.take(root / "lease", beat_s=0.01, stale_s=0.02)
    (root / "taken").write_text(str(time.monotonic()))
    store = Store(root / "checkpoints", keep=3, lease=root / "lease")
    newest = max([0, *store.steps()])
    for step in range(newest, newest + 4):
        try:
            store.save(step, Snapshot(tensors(2), {"writer": 2}))
        except CheckpointError as error:  # the orphan was between its look at the lease and the rename
            assert "not empty" in str(error), error


def check_unmixed(root: Path) -> Counter[int]:
    """Every checkpoint is whole and of one writer; returns how many each has."""
    store, writers = Store(root / "checkpoints"), Counter()
    for step in store.steps():
        writer = store.verify(step).meta["writer"]
        held = store.tensors(step)
        assert all(torch.equal(held[key], value) for key, value in tensors(writer).items()), step
        writers[writer] += 1
    return writers


def race_for_the_lease(root: Path, forks, rounds: int) -> Counter[str]:
    outcomes = Counter()
    for step in range(1, rounds + 1):
        peers = [forks.start(contend, root, writer, step) for writer in (1, 2)]
        codes = sorted(forks.wait(peer) for peer in peers)
        assert codes in ([0, 0], [0, 4]), codes
        outcomes["one after the other" if codes == [0, 0] else "one refused"] += 1
        check_unmixed(root)
        assert max(Store(root / "checkpoints").steps()) == step
    return outcomes


def race_with_an_orphan(root: Path, forks, rounds: int, seed: int) -> Counter[str]:
    draw, outcomes = random.Random(seed), Counter()
    for number in range(rounds):
        run = root / f"orphan-{number}"
        run.mkdir(parents=True)
        first = forks.start(orphan, run)
        end = time.monotonic() + 20
        while not (run / "ready").exists() and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.05))
        assert forks.run(successor, run) == 0
        assert forks.wait(first) == 5
        taken = float((run / "taken").read_text())
        begun = [float(line) for line in (run / "log").read_text().split()]
        assert all(begin < taken for begin in begun), "who lost the lease has published"
        writers = check_unmixed(run)
        assert writers[2] >= 2
        outcomes["the one without the lease stopped"] += 1
        shutil.rmtree(run)
    return outcomes


def test_two_starts_race_for_the_lease(tmp_path, forks):
    assert race_for_the_lease(tmp_path, forks, 3).total() == 3


@pytest.mark.slow
def test_a_hundred_races_of_two_writers(tmp_path, forks):
    count = 100 if LONG else 25
    found = race_for_the_lease(tmp_path, forks, count)
    figure("two starts at once take the lease and save", count, told(found) + "; no folder mixed")
    found = race_with_an_orphan(tmp_path, forks, count, seed=0)
    figure("an orphan saves on while its successor takes over", count, told(found) + "; no folder mixed")
