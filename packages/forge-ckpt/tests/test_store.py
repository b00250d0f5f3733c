import errno
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from forge_ckpt import CheckpointError, DamagedError, Snapshot, Store
from forge_ckpt import manifest as manifests
from forge_ckpt.layout import Entry
from forge_ckpt.shards import Box, copy_boxes
from torch._subclasses.fake_tensor import FakeTensorMode


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model.w": torch.randn(7, 5, generator=generator),
        "model.b": torch.randn(3, generator=generator).bfloat16(),
        "optimizer.step.w": torch.tensor(float(step)),
        "model.ids": torch.arange(step, step + 4),
        "model.empty": torch.zeros(0, 3),
    }


def blanks() -> dict[str, torch.Tensor]:
    return {key: torch.full_like(value, 77) for key, value in tensors(0).items()}


def resume(root) -> tuple[dict[str, torch.Tensor], manifests.Manifest | None]:
    into = blanks()
    return into, Store(root).resume(lambda held: into)


def assert_holds(into: dict[str, torch.Tensor], step: int) -> None:
    for key, value in tensors(step).items():
        assert torch.equal(into[key], value) and into[key].dtype == value.dtype, key


def saved(root, *steps: int, **options) -> Store:
    store = Store(root, **options)
    for step in steps:
        store.save(step, Snapshot(tensors(step), {"at": step}))
    return store


def test_store_gives_back_every_bit_and_the_meta(tmp_path):
    saved(tmp_path, 1, 2)
    into, found = resume(tmp_path)
    assert found is not None and found.meta == {"at": 2} and found.step == 2
    assert_holds(into, 2)


def test_store_of_a_new_run_has_nothing_to_resume(tmp_path):
    assert resume(tmp_path / "none")[1] is None


def test_saving_a_step_twice_changes_nothing(tmp_path):
    store = saved(tmp_path, 5)
    before = {p.name: p.stat().st_mtime_ns for p in store.folder(5).iterdir()}
    store.save(5, Snapshot(tensors(6), {}))
    assert {p.name: p.stat().st_mtime_ns for p in store.folder(5).iterdir()} == before


def test_saving_a_damaged_step_again_replaces_it(tmp_path):
    store = saved(tmp_path, 4, 5)
    (store.folder(5) / "rank-00000.bin").unlink()
    store.save(5, Snapshot(tensors(5), {}))
    store.verify(5)


def damage_every_byte(path, rng: random.Random, count: int = 40):
    """Copies of a file with one bit flipped, at places all over it."""
    data = path.read_bytes()
    for place in {0, len(data) - 1, *(rng.randrange(len(data)) for _ in range(count))}:
        changed = bytearray(data)
        changed[place] ^= 1 << rng.randrange(8)
        yield bytes(changed)
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.json", "rank-00000.bin"])
def test_flipped_bit_anywhere_is_found(tmp_path, name):
    store = saved(tmp_path, 1)
    path = store.folder(1) / name
    for changed in damage_every_byte(path, random.Random(0)):
        path.write_bytes(changed)
        with pytest.raises(DamagedError):
            store.verify(1)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.json", "rank-00000.bin"])
@pytest.mark.parametrize("how", ["truncated", "missing", "stale", "symlink"])
def test_damaged_newest_is_put_aside_and_the_older_one_taken(tmp_path, name, how):
    store = saved(tmp_path, 1, 2)
    path = store.folder(2) / name
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "missing":
        path.unlink()
    elif how == "stale":
        path.write_bytes((store.folder(1) / name).read_bytes())
    else:
        elsewhere = tmp_path / "elsewhere"
        # the data are intact there, but who prunes or copies the checkpoint does not take them along
        intact = path.read_bytes()
        elsewhere.write_bytes(intact[:-1] + b"x" if name == "manifest.json" else intact)
        path.unlink()
        path.symlink_to(elsewhere)
    into, found = resume(tmp_path)
    if how == "stale" and name == "manifest.json":
        # the manifest of step 1 in the folder of step 2 does not describe the data of step 2
        assert found is not None and found.meta == {"at": 1}
    assert found is not None and found.step == 1
    assert_holds(into, 1)
    assert list(tmp_path.glob(".bad-000000002-*"))


def test_run_that_lost_all_its_checkpoints_does_not_start_anew(tmp_path):
    store = saved(tmp_path, 1, 2)
    for step in (1, 2):
        (store.folder(step) / "manifest.json").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="once held step 2"):
        resume(tmp_path)


def test_live_tensors_stay_untouched_when_nothing_is_intact(tmp_path):
    store = saved(tmp_path, 1)
    path = store.folder(1) / "rank-00000.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    into = blanks()
    with pytest.raises(CheckpointError):
        Store(tmp_path).resume(lambda held: into)
    assert all(torch.equal(value, blanks()[key]) for key, value in into.items())


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"model.w": torch.zeros(7, 6)}, r"model.w is float32 \[7, 5\], wanted float32 \[7, 6\]"),
        ({"model.w": torch.zeros(7, 5, dtype=torch.float64)}, "wanted float64"),
        ({"model.new": torch.zeros(1)}, "model.new is not in the checkpoint"),
    ],
)
def test_checkpoint_that_does_not_fit_is_an_error_not_damage(tmp_path, change, needle):
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=needle):
        Store(tmp_path).resume(lambda held: blanks() | change)
    assert Store(tmp_path).steps() == [1]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't allocate memory: you tried to allocate 9")]
)
def test_memory_that_is_short_while_a_checkpoint_is_read_is_no_misfit(tmp_path, monkeypatch, error):
    def short(*_):
        raise error

    saved(tmp_path, 1)
    monkeypatch.setattr("forge_ckpt.shards._read_blocks", short)
    with pytest.raises(CheckpointError) as caught:
        resume(tmp_path)
    told = f": {error}" if str(error) else ""
    assert str(caught.value) == f"step 1 could not be loaded on rank 0: {type(error).__name__}{told}"
    assert [path.name for path in tmp_path.glob("*step*")] == ["step-000000001"]


def test_tensor_that_nobody_wants_is_an_error(tmp_path):
    saved(tmp_path, 1)
    wanted = {key: value for key, value in blanks().items() if key != "model.b"}
    with pytest.raises(CheckpointError, match=r"model.b is not wanted"):
        Store(tmp_path).resume(lambda held: wanted)


def test_prune_keeps_the_newest_and_the_milestones(tmp_path):
    store = saved(tmp_path, *range(1, 11), keep=2, keep_every_steps=4)
    assert store.steps() == [4, 8, 9, 10]
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith((".tmp", ".trash"))]


def test_prune_never_removes_the_last_intact_one(tmp_path):
    store = saved(tmp_path, 1, 2, 3, 4, keep=4)
    for step in (2, 3, 4):
        (store.folder(step) / "manifest.json").unlink()
    store.keep = 2
    store.prune()
    assert 1 in store.steps()
    assert_holds(resume(tmp_path)[0], 1)


@pytest.mark.parametrize("failing", ["write", "fsync", "rename"])
def test_disk_that_is_full_is_an_error_and_leaves_the_older_one(tmp_path, monkeypatch, failing):
    store = saved(tmp_path, 1)

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if failing == "write":
        monkeypatch.setattr("forge_ckpt.shards.write_boxes", fail)
    else:
        monkeypatch.setattr(os, failing, fail)
    with pytest.raises(CheckpointError, match="No space left"):
        store.save(2, Snapshot(tensors(2), {}))
    monkeypatch.undo()
    assert [path.name for path in tmp_path.glob(".tmp-*")] == []
    into, found = resume(tmp_path)
    assert found is not None and found.step == 1
    assert_holds(into, 1)


@pytest.mark.parametrize("done", [True, False])
def test_rename_that_is_told_not_to_have_been_done_counts_if_it_was(tmp_path, monkeypatch, done):
    """As NFS does when a client repeats a request whose answer was lost."""
    store, rename = saved(tmp_path, 1), os.rename

    def repeated(source, target):
        if done or not Path(source).name.startswith(".tmp-"):
            rename(source, target)
        if Path(source).name.startswith(".tmp-"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)

    monkeypatch.setattr(os, "rename", repeated)
    if done:
        store.save(2, Snapshot(tensors(2), {}))
    else:
        with pytest.raises(CheckpointError, match="step 2 could not be saved"):
            store.save(2, Snapshot(tensors(2), {}))
    monkeypatch.undo()
    into, found = resume(tmp_path)
    assert found is not None and found.step == 1 + done
    assert_holds(into, found.step)


def save_forever(root) -> None:
    store = Store(root, keep=2)
    step = max([0, *store.steps()])
    while True:
        step += 1
        store.save(step, Snapshot(tensors(step), {"at": step}))


@pytest.mark.slow
def test_killed_at_any_moment_leaves_an_intact_newest(tmp_path, forks):
    rng = random.Random(0)
    newest = 0
    for _ in range(25):
        child = forks.start(save_forever, tmp_path)
        end = time.monotonic() + 30
        while time.monotonic() < end and Store(tmp_path).progress() <= newest:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        assert forks.wait(child) == -signal.SIGKILL
        committed = Store(tmp_path).progress()
        into, found = resume(tmp_path)
        assert found is not None and found.step >= committed > newest
        assert_holds(into, found.step)
        newest = committed


def save_until(root, call: int) -> None:
    """Save, and end just before the given one of the calls that make it durable, as by SIGKILL."""
    count = 0

    def counted(original):
        def run(*args, **kwargs):
            nonlocal count
            count += 1
            if count == call:
                os._exit(9)
            return original(*args, **kwargs)

        return run

    os.fsync, os.rename, os.replace = counted(os.fsync), counted(os.rename), counted(os.replace)
    saved(root, 2)


@pytest.mark.parametrize("call", range(1, 9))
def test_killed_at_each_durable_call_of_a_save(tmp_path, forks, call):
    saved(tmp_path, 1)
    code = forks.run(save_until, tmp_path, call)
    into, found = resume(tmp_path)
    assert found is not None
    assert found.step == (2 if code == 0 or call > 5 else 1)
    assert_holds(into, found.step)
    saved(tmp_path, 3)
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".t")]


def rewrite(path, old: bytes, new: bytes) -> None:
    """Change a manifest, with a good digest."""
    body = path.read_bytes().partition(b"\n")[2]
    assert old in body
    body = body.replace(old, new, 1)
    path.write_bytes(manifests.digest(body).hex().encode() + b"\n" + body)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"[7,5]", b"[7,9]"),
        (b"[[0,0]]", b"[[-1,0]]"),
        (b"[[0,0]]", b"[[1,0]]"),
        (b'"float32",[7,5]', b'"float32",[7000000000,5000000000]'),
        (b'"float32",[7,5]', b'"object",[7,5]'),
        (b'"float32",[7,5]', b'"Tensor.__reduce__",[7,5]'),
        (b'"layouts":[[[0]', b'"layouts":[[[7]'),
        (b'"layouts":[[[0]', b'"layouts":[[[0,0]'),
        (b'"meta":{', b'"meta":{"x":' + b"[" * 3000 + b"]" * 3000 + b","),
        (b'"format":2', b'"format":9'),
        (b'"format":2', b'"format":1'),
    ],
)
def test_manifest_with_a_good_digest_but_bad_content_is_refused_and_stays(tmp_path, old, new):
    store = saved(tmp_path, 1, 2)
    rewrite(store.folder(2) / manifests.NAME, old, new)
    with pytest.raises(CheckpointError) as caught:
        resume(tmp_path)
    assert "step-000000002" in str(caught.value)
    assert store.steps() == [1, 2]


def test_checkpoint_of_a_newer_version_is_no_damage(tmp_path):
    store = saved(tmp_path, 1, 2)
    rewrite(store.folder(2) / manifests.NAME, b'{"format":2', b'{"news":1,"format":3')
    with pytest.raises(CheckpointError, match="has format 3; this version reads format 2"):
        resume(tmp_path)
    assert store.steps() == [1, 2]


def test_folder_of_another_step_is_put_aside(tmp_path):
    store = saved(tmp_path, 26, 30)
    for file in store.folder(26).iterdir():
        (store.folder(30) / file.name).write_bytes(file.read_bytes())
    found = resume(tmp_path)[1]
    assert found is not None and found.step == 26
    assert store.steps() == [26]
    store.save(30, Snapshot(tensors(30), {"at": 30}))
    assert_holds(resume(tmp_path)[0], 30)


def test_read_error_falls_back_and_leaves_the_checkpoint_alone(tmp_path, monkeypatch):
    store = saved(tmp_path, 1, 2)
    monkeypatch.setattr("forge_ckpt.shards._read_blocks", failing_once(tmp_path / "step-000000002"))
    into = blanks()
    found = store.resume(lambda held: into)
    assert found is not None and found.step == 1
    assert_holds(into, 1)
    assert store.steps() == [1, 2]
    monkeypatch.undo()
    assert_holds(resume(tmp_path)[0], 2)
    # the run that fell back comes to step 2 again, and that is what is kept
    store.save(2, Snapshot(tensors(2), {"at": "again"}))
    assert resume(tmp_path)[1].meta == {"at": "again"}
    assert list(tmp_path.glob(".old-000000002-*"))


def failing_once(folder):
    from forge_ckpt import shards

    original = shards._read_blocks

    def read(file, path, *rest):
        if path.parent == folder:
            raise OSError(errno.EIO, "Input/output error")
        return original(file, path, *rest)

    return read


def test_progress_that_cannot_be_understood_or_is_gone_with_its_folder_still_counts(tmp_path):
    mark = tmp_path / "marks" / "run"
    store = saved(tmp_path / "checkpoints", 3, marks=[mark])
    import shutil

    shutil.rmtree(store.root)
    with pytest.raises(CheckpointError, match=r"once held step 3.*marks/run"):
        Store(store.root, marks=[mark]).resume(lambda held: blanks())
    mark.write_text("?")
    with pytest.raises(CheckpointError, match="once held step 0"):
        Store(store.root, marks=[mark]).resume(lambda held: blanks())
    mark.unlink()
    assert Store(store.root, marks=[mark]).resume(lambda held: blanks()) is None


def test_highest_step_ever_saved_never_sinks(tmp_path):
    saved(tmp_path, 5)
    Store(tmp_path).save(3, Snapshot(tensors(3), {}))  # of a run that went back to an older checkpoint
    assert Store(tmp_path).progress() == 5


@pytest.mark.parametrize(
    ("work", "said"),
    [("_mark", "step 4 is saved, but"), ("_to_trash", "older checkpoints could not be removed")],
)
def test_error_after_the_commit_is_no_failed_save(tmp_path, monkeypatch, caplog, work, said):
    store = saved(tmp_path, 1, 2, 3)

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(f"forge_ckpt.folders.Folders.{work}", fail)
    store.save(4, Snapshot(tensors(4), {"at": 4}))
    assert said in caplog.text
    monkeypatch.undo()
    assert_holds(resume(tmp_path)[0], 4)


def test_writer_that_lost_the_lease_does_not_publish(tmp_path):
    from forge_ckpt.lease import take

    lease = take(tmp_path / "lease")
    store = saved(tmp_path / "checkpoints", 1, lease=tmp_path / "lease")
    lease.release()
    take(tmp_path / "lease").release()
    with pytest.raises(CheckpointError, match="another process took over"):
        store.save(2, Snapshot(tensors(2), {}))
    assert store.steps() == [1]


def test_sweeping_leaves_what_a_later_start_writes(tmp_path):
    from forge_ckpt.folders import Folders
    from forge_ckpt.lease import take

    take(tmp_path / "lease").release()
    older = Folders(tmp_path / "checkpoints", tmp_path / "lease")
    left = older.begin(1)
    take(tmp_path / "lease").release()
    newer = Folders(tmp_path / "checkpoints", tmp_path / "lease")
    mine = newer.begin(2)
    assert not left.exists() and mine.exists()
    older.sweep()
    assert mine.exists()


def test_two_writers_never_destroy_a_committed_checkpoint(tmp_path, forks):
    """Without a lease: each sweeps what the other is writing, and publishes the same steps."""
    saved(tmp_path, 1)
    for step in range(2, 2 + RACES):
        peers = [forks.start(save_if_possible, tmp_path, step) for _ in range(2)]
        codes = [forks.wait(peer) for peer in peers]
        steps = Store(tmp_path).steps()
        assert steps and (0 not in codes or step in steps)
        for there in steps:
            Store(tmp_path).verify(there)


RACES = 3


def save_if_possible(root, step: int) -> None:
    try:
        saved(root, step)
    except CheckpointError:
        os._exit(3)


def test_prune_by_hand_reads_every_byte_and_keeps_milestones(tmp_path):
    from forge_ckpt.cli import main

    store = saved(tmp_path, 1, 2, 3, 4, 5, keep=9, keep_every_steps=2)
    for step in (4, 5):
        path = store.folder(step) / "rank-00000.bin"
        data = bytearray(path.read_bytes())
        data[3] ^= 1
        path.write_bytes(data)
    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0
    assert store.steps() == [2, 3, 4, 5]  # 2 and 4 are milestones, 3 is the newest that is intact
    assert resume(tmp_path)[1].step == 3


@pytest.mark.parametrize(
    ("starts", "sizes", "needle"),
    [
        ([(0, 0), (2, 0)], [(2, 4), (2, 4)], None),
        ([(0, 0), (0, 2), (2, 0)], [(2, 2), (2, 2), (2, 4)], None),
        ([(0, 0), (0, 0)], [(2, 4), (2, 4)], "overlap"),
        ([(0, 0), (1, 0)], [(2, 4), (2, 4)], "overlap"),
        ([(0, 0)], [(2, 4)], "8 elements, not 16"),
        ([(0, 0), (3, 0)], [(2, 4), (2, 4)], "starts at"),
        ([(0, 0), (2, 0)], [(2, 4), (2, -4)], "starts at"),
    ],
)
def test_boxes_make_up_a_tensor_exactly(starts, sizes, needle):
    from forge_ckpt.layout import Layout, require_cover

    layout = Layout(list(range(len(starts))), starts, sizes)
    if needle is None:
        require_cover("w", (4, 4), layout)
    else:
        with pytest.raises(CheckpointError, match=needle):
            require_cover("w", (4, 4), layout)


@pytest.mark.parametrize("seed", range(8))
def test_any_box_of_any_layout_is_read_as_it_was(tmp_path, seed, monkeypatch):
    """Boxes of a tensor cut at random, written with tiny blocks, read in boxes cut at random."""
    from forge_ckpt import shards

    monkeypatch.setattr(shards, "READ_BYTES", 256)
    monkeypatch.setattr(shards, "BLOCK_BYTES", 64)
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(0, 4)))
    store = Store(tmp_path)
    value = torch.randn(shape)
    store.save(1, Snapshot({"w": value, "a": torch.randn(5)}))
    for _ in range(20):
        low = tuple(rng.randrange(n) for n in shape)
        high = tuple(rng.randint(a + 1, n) for a, n in zip(low, shape, strict=True))
        box = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
        into = torch.full(tuple(b - a for a, b in zip(low, high, strict=True)), 7.0)
        opened = manifests.read(store.folder(1))
        wanted = shards.Box(into, low, True, opened.tensors["w"])
        staged = shards.read_verified(store.folder(1), opened, {"w": wanted})
        assert torch.equal(staged["w"], value[box])


@pytest.mark.parametrize("meta", [{"x": float("nan")}, {"x": {1: 2}}, {"x": b"bytes"}, {"x": [object()]}])
def test_meta_that_would_not_come_back_is_refused(tmp_path, meta):
    with pytest.raises(CheckpointError, match="'x' would not come back as it is"):
        Store(tmp_path).save(1, Snapshot({}, meta))
    assert Store(tmp_path).steps() == []


def test_steps_below_zero_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="given step -1"):
        Store(tmp_path).save(-1, Snapshot({}, {}))


def test_what_comes_after_a_way_back_is_saved(tmp_path):
    saved(tmp_path, 1, 2, 3, keep=9)
    store, into = Store(tmp_path, keep=2), blanks()
    found = store.resume(lambda held: into, until=1)
    assert found is not None and found.step == 1
    for step, content in ((2, 12), (3, 13)):
        store.save(step, Snapshot(tensors(content), {"at": content}))
        assert store.newest().meta == {"at": content} if step == 3 else step in store.steps()
    assert {key: torch.equal(store.tensors(2)[key], value) for key, value in tensors(12).items()}
    into, found = resume(tmp_path)
    assert found is not None and found.step == 3
    assert_holds(into, 13)


def test_views_are_saved_as_what_they_show(tmp_path):
    x = torch.randn(3, 4, dtype=torch.complex64)
    held = {"conj": x.conj(), "neg": x.conj().imag, "t": x.T, "one": torch.ones(()).expand(3)}
    store = Store(tmp_path)
    store.save(1, Snapshot(held))
    assert all(torch.equal(store.tensors(1)[key], value) for key, value in held.items())


@pytest.mark.parametrize("target", [torch.zeros(2).expand(7, 5, 2)[..., 0], torch.zeros(7, 5, device="meta")])
def test_targets_that_take_no_values_are_refused_before_any_changes(tmp_path, target):
    saved(tmp_path, 1)
    into = blanks()
    for load in (Store(tmp_path).resume, lambda targets: Store(tmp_path).load(1, targets({}))):
        with pytest.raises(CheckpointError, match=r"model.w is to be loaded into a tensor"):
            load(lambda held: into | {"model.w": target})
    assert_unchanged = blanks()
    assert all(torch.equal(into[key], value) for key, value in assert_unchanged.items())


def test_files_that_a_crash_has_left_beside_marks_are_removed(tmp_path):
    mark, root = tmp_path / "marks" / "run", tmp_path / "run"
    Store(root, marks=[mark]).save(1, Snapshot({}))
    left = [root / ".PROGRESS-0123abcd", mark.parent / ".run-0123abcd"]
    others = [mark.parent / ".run-2-0123abcd", mark.parent / "run-0123abcd"]
    for path in (*left, *others):
        path.touch()
    Store(root, marks=[mark]).save(2, Snapshot({}))
    assert [path.exists() for path in (*left, *others)] == [False, False, True, True]


def test_copy_of_a_gpu_waits_for_the_stream_of_its_copies_only(monkeypatch):
    """Not for collectives and copies of other streams. Tensors of a GPU are played."""
    waited = []

    class Stream:
        def synchronize(self):
            waited.append("stream")

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self.device.type == "cpu")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append("device"))
    with FakeTensorMode():
        names = {"a", "b"}
        boxes = {
            name: Box(torch.empty(4, 3, device="cuda"), (0, 0), None, Entry("float32", (4, 3)))
            for name in names
        }
        copied = copy_boxes(boxes, {})
    assert waited == ["stream"]
    assert {name: box.values.device.type for name, box in copied.items()} == dict.fromkeys(names, "cpu")
