"""What is published stays: when it is replaced, when it cannot be read, when somebody else owns the run."""

import errno
import os
import shutil

import pytest
import torch
from forge_ckpt import CheckpointError, Snapshot, Store
from forge_ckpt import manifest as manifests
from forge_ckpt.cli import main
from forge_ckpt.folders import Folders
from forge_ckpt.lease import take
from forge_ckpt.pins import pin


def saved(root, *steps: int, **options) -> Store:
    store = Store(root, **options)
    for step in steps:
        store.save(step, Snapshot({"w": torch.tensor(float(step))}))
    return store


def resumed(store: Store) -> int:
    live = {"w": torch.zeros(())}
    found = store.resume(lambda held: live)
    assert found is not None and live["w"] == found.step
    return found.step


def fail(*_) -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("renames", [0, 1])
def test_checkpoint_that_could_not_be_read_stays_until_its_successor_is_there(tmp_path, monkeypatch, renames):
    saved(tmp_path, 1, 2)
    store, rename, done = Store(tmp_path), os.rename, []
    with monkeypatch.context() as patched:
        patched.setattr("forge_ckpt.shards._read_blocks", lambda file, path, *_: fail())
        with pytest.raises(CheckpointError, match="no intact checkpoint is left"):
            store.resume(lambda held: {"w": torch.zeros(())})

    def die(source, target):
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(rename(source, target))

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "rename", die)
        patched.setattr(Folders, "settle", lambda self: None)
        store.save(2, Snapshot({"w": torch.tensor(2.0)}))
    assert resumed(Store(tmp_path)) == 2


def test_checkpoint_that_cannot_be_read_now_is_not_removed(tmp_path, monkeypatch):
    store = saved(tmp_path, 1, 2, 3, 4, keep=9)
    store.keep, store.known_good_step, read = 1, 2, manifests.read_index

    def unreadable(folder, *rest):
        return fail() if folder.name in ("step-000000002", "step-000000003") else read(folder, *rest)

    def translated(folder, *rest):
        try:
            return unreadable(folder, *rest)
        except OSError as error:
            raise manifests.UnreadableError(str(error)) from None

    monkeypatch.setattr(manifests, "read_index", translated)
    assert store.prune(verify=False) == [3]
    assert store.steps() == [1, 2, 4]


def test_what_was_passed_over_does_not_count_when_older_ones_are_removed(tmp_path, monkeypatch):
    saved(tmp_path, 1, 5, 6)
    read = manifests.read
    store = Store(tmp_path, keep=2)

    def unreadable(folder, sizes=True):
        if folder.name != "step-000000001":
            raise manifests.UnreadableError(str(folder))
        return read(folder, sizes)

    with monkeypatch.context() as patched:
        patched.setattr(manifests, "read", unreadable)
        assert resumed(store) == 1
    for step in (2, 3):
        store.save(step, Snapshot({"w": torch.tensor(float(step))}))
    assert store.steps() == [2, 3, 5, 6]


def test_last_intact_one_before_a_spike_stays_when_a_newer_one_is_damaged(tmp_path):
    store = saved(tmp_path, 1, 2, 3, 4, keep=9)
    (store.folder(2) / "rank-00000.json").write_bytes(b"")
    store.keep, store.known_good_step = 1, 2
    assert store.prune() == [2, 3]
    assert store.steps() == [1, 4]


def test_crash_between_publishing_and_noting_it_is_no_new_run_once_all_is_damaged(tmp_path):
    store = saved(tmp_path, 1)
    (tmp_path / "PROGRESS").unlink()  # as if it had been killed right after the rename
    (store.folder(1) / "rank-00000.bin").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="once held step 1"):
            resumed(Store(tmp_path))


def test_start_that_lost_the_lease_before_its_first_save_does_not_publish(tmp_path):
    lease = take(tmp_path / "lease")
    store = Store(tmp_path / "checkpoints", lease=tmp_path / "lease")
    lease.release()
    take(tmp_path / "lease").release()
    with pytest.raises(CheckpointError, match="another process took over"):
        store.save(1, Snapshot({"w": torch.ones(())}))
    assert store.steps() == []


def test_start_that_lost_the_lease_hears_of_it_though_its_successor_has_saved_the_step(tmp_path):
    lease = take(tmp_path / "lease")
    store = saved(tmp_path / "checkpoints", 1, lease=tmp_path / "lease")
    lease.release()
    later = take(tmp_path / "lease")
    saved(tmp_path / "checkpoints", 2, lease=tmp_path / "lease")
    with pytest.raises(CheckpointError, match="another process took over"):
        store.save(2, Snapshot({"w": torch.ones(())}))
    later.release()


def test_run_whose_disk_is_gone_makes_no_folders_in_its_place(tmp_path):
    lease = take(tmp_path / "run" / "lease")
    store = saved(tmp_path / "run" / "checkpoints", 1, lease=tmp_path / "run" / "lease")
    lease.release()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(CheckpointError, match="is the disk there"):
        store.save(2, Snapshot({"w": torch.ones(())}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("values", "needle"),
    [({"tensor": 1, "dtype": "load"}, "no value"), ({"int": "x"}, "no value"), ({}, "no value")],
)
def test_value_that_nobody_wrote_is_an_error(values, needle):
    from forge_ckpt.values import from_json

    with pytest.raises(CheckpointError, match=needle):
        from_json(values)


@pytest.mark.parametrize("kind", [manifests.Manifest, manifests.Index])
def test_manifest_that_could_not_be_read_again_is_not_written(monkeypatch, kind):
    monkeypatch.setattr(manifests, "MAX_BYTES", 100)
    monkeypatch.setattr(manifests, "MAX_INDEX_BYTES", 100)
    made = manifests.Index(64, "A" * 200, {})
    if kind is manifests.Manifest:
        made = manifests.Manifest(2, 1, "x" * 200, False, {}, {}, [], [], {})
    with pytest.raises(CheckpointError, match="expected at most 100"):
        manifests.encode(made)


def test_pin_that_comes_while_its_checkpoint_is_removed_keeps_it(tmp_path, monkeypatch):
    saved(tmp_path, 1, 2, 3, keep=9)
    to_trash = Folders._to_trash

    def pinned_just_before(self, path):
        pin(tmp_path, 1) if path.name == "step-000000001" else None
        return to_trash(self, path)

    monkeypatch.setattr(Folders, "_to_trash", pinned_just_before)
    assert Store(tmp_path, keep=1).prune() == [2]
    Store(tmp_path).verify(1)
    assert Store(tmp_path).steps() == [1, 3] and not list(tmp_path.glob(".trash-*"))


def test_whoever_prunes_keeps_what_the_run_may_go_back_to(tmp_path, capsys):
    store = saved(tmp_path, 1, 2, 3, keep=9)
    store.known_good_step = 2
    store.save(4, Snapshot({"w": torch.tensor(4.0)}))
    store.save(5, Snapshot({"w": torch.tensor(5.0)}))
    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0
    assert Store(tmp_path).steps() == [2, 5]


def test_start_whose_lease_was_taken_over_before_it_had_a_store_does_not_save(tmp_path):
    mine = take(tmp_path / "lease", beat_s=1000)
    (tmp_path / "lease" / f"epoch-{mine.epoch + 1:09d}").touch()
    store = Store(tmp_path / "run", lease=tmp_path / "lease", epoch=mine.epoch)
    with pytest.raises(CheckpointError, match="another process took over"):
        store.save(1, Snapshot({}))
    mine.release()


def test_damaged_checkpoint_that_cannot_be_put_aside_is_passed_over(tmp_path, monkeypatch):
    saved(tmp_path, 1, 2)
    (tmp_path / "step-000000002" / "rank-00000.bin").write_bytes(b"")
    monkeypatch.setattr(Folders, "put_aside", fail)
    assert resumed(Store(tmp_path)) == 1
