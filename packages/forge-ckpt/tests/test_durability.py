"""What a save puts on the disk, and in which order; what it tidies up."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from forge_ckpt import CheckpointError, DamagedError, Store
from forge_ckpt import manifest as manifests


def save(store: Store, step: int) -> None:
    store.save(step, {"w": torch.full((3,), float(step))}, {"at": step})


def resumed_step(root: Path) -> int | None:
    found = Store(root).resume(lambda held: {"w": torch.zeros(3)})
    return found and found.step


def hidden(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


@pytest.fixture
def calls(tmp_path, monkeypatch) -> list[str]:
    """The calls that make things durable, with the paths they act on and the sizes of files."""
    made: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def plain(path) -> str:
        parts = Path(path).relative_to(tmp_path).parts
        return "/".join(".tmp" if part.startswith(".tmp-0") else part for part in parts) or "root"

    def logged_fsync(descriptor: int) -> None:
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        size = "" if os.path.isdir(path) else f" {os.stat(path).st_size}"
        made.append(f"fsync {plain(path)}{size}")

    def logged(name: str, act):
        def run(source, target) -> None:
            made.append(f"{name} {plain(source)} {plain(target)}")
            act(source, target)

        return run

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "rename", logged("rename", rename))
    monkeypatch.setattr(os, "replace", logged("replace", replace))
    monkeypatch.setattr("secrets.token_hex", lambda count: "0")
    return made


def test_save_syncs_files_before_their_folder_and_that_before_its_name(tmp_path, calls):
    store = Store(tmp_path)
    save(store, 2)
    size = (store.folder(2) / manifests.NAME).stat().st_size
    assert calls == [
        "fsync .tmp/rank-00000.bin 12",
        f"fsync .tmp/manifest.json {size}",
        "fsync .tmp",
        "rename .tmp step-000000002",
        "fsync root",
        "fsync .tmp-progress-0 1",
        "replace .tmp-progress-0 PROGRESS",
    ]


def test_save_that_failed_leaves_nothing_behind(tmp_path, monkeypatch):
    store = Store(tmp_path)
    save(store, 1)

    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("forge_ckpt.shards.write_boxes", fail)
        with pytest.raises(CheckpointError, match=r"rank 0: OSError: .*Input/output error"):
            save(store, 2)
    assert not hidden(tmp_path) and store.steps() == [1] and store.progress() == 1
    save(store, 2)
    assert resumed_step(tmp_path) == 2


def test_save_sweeps_what_dead_processes_left(tmp_path):
    store = Store(tmp_path)
    save(store, 1)
    shutil.copytree(store.folder(1), tmp_path / ".tmp-000000002-dead")
    shutil.copytree(store.folder(1), tmp_path / ".trash-000000000-dead")
    (tmp_path / ".tmp-progress-dead").write_text("7")
    shutil.copytree(store.folder(1), tmp_path / ".bad-000000000-kept")
    save(store, 2)
    assert hidden(tmp_path) == [".bad-000000000-kept"]


def test_progress_never_goes_back(tmp_path):
    store = Store(tmp_path)
    save(store, 9)
    save(store, 4)
    assert store.progress() == 9
    shutil.rmtree(store.folder(9))
    save(store, 5)
    assert store.progress() == 9


def test_link_to_a_file_is_damage_even_if_the_file_is_good(tmp_path):
    store = Store(tmp_path / "run")
    save(store, 1)
    file = store.folder(1) / "rank-00000.bin"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedError, match=r"rank-00000.bin is missing or has not"):
        store.verify(1)


def test_folder_that_vanishes_during_a_save_is_an_error_and_no_checkpoint(tmp_path, monkeypatch):
    store = Store(tmp_path / "run")
    save(store, 1)

    def vanish(file, name, tensors, rank):
        shutil.rmtree(tmp_path / "run")
        return {}

    with monkeypatch.context() as patch:
        patch.setattr("forge_ckpt.shards.write_boxes", vanish)
        with pytest.raises(FileNotFoundError):
            save(store, 2)
    assert store.steps() == []
    save(store, 3)
    assert resumed_step(tmp_path / "run") == 3
