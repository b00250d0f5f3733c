import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from forge_interp.errors import InterpError
from forge_interp.extraction import merge as merging
from forge_interp.extraction.extract import extract_representations
from forge_interp.extraction.journal import Shard, lock
from forge_interp.extraction.merge import merge, missing_ranks, shard_folder, working_folder
from forge_interp.extraction.store import ActivationStore
from forks import Forks
from torch import Tensor, nn

IDS = torch.randint(9, (12, 5), generator=torch.Generator().manual_seed(0))


def extract(out: Path, **options: int) -> ActivationStore:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))
    return extract_representations(model, IDS, "*", out, batch_size=2, progress=False, **options)


def fill(folder: Path, request: dict, site: str, values: Tensor) -> None:
    with Shard(folder, request) as shard:
        shard.write(site, values)
        for name in ("sample_id", "position", "token_id"):
            shard.write(name, torch.arange(len(values)))
        shard.commit(0)
        shard.seal()


def test_merge_does_nothing_where_nothing_is(tmp_path: Path):
    assert not merge(tmp_path / "a.npz")
    assert not list(tmp_path.iterdir())


def test_merge_waits_for_all_shards(tmp_path: Path):
    out = tmp_path / "a.npz"
    fill(shard_folder(out, 1, 2), {"a": 1}, "x:out", torch.zeros(3, 2))
    assert missing_ranks(out) == [0]
    assert not merge(out) and not out.exists()
    with Shard(shard_folder(out, 0, 2), {"a": 1}):
        assert not merge(out)
    fill(shard_folder(out, 0, 2), {"a": 1}, "x:out", torch.ones(2, 2))
    assert merge(out) and not working_folder(out).exists()
    assert ActivationStore.open(out)["x"].tolist() == [[1, 1], [1, 1], [0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("request_of_0", "site", "text"),
    [
        ({"a": 2}, "x:out", "a: 1 there, 2 asked"),
        ({"a": 1}, "y:out", r"holds x:out \[2\] float32, .*others hold"),
    ],
)
def test_merge_refuses_shards_of_different_runs(tmp_path: Path, request_of_0: dict, site: str, text: str):
    out = tmp_path / "a.npz"
    fill(shard_folder(out, 0, 2), request_of_0, site, torch.zeros(3, 2))
    fill(shard_folder(out, 1, 2), {"a": 1}, "x:out", torch.zeros(3, 2))
    with pytest.raises(InterpError, match=text):
        merge(out)
    assert not out.exists() and missing_ranks(out) == []


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors", "a.zarr", "a", "a.npy"])
def test_merge_leaves_the_shards_when_the_disk_is_full(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    def sync(descriptor: int) -> None:
        if not os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out, site = tmp_path / name, "0:out"
    fill(shard_folder(out, 0, 1), {}, site, torch.ones(3, 2))
    with monkeypatch.context() as patch:
        patch.setattr("forge_interp.extraction.formats.os.fsync", sync)
        with pytest.raises(OSError, match="No space left") as caught:
            merge(out)
    assert "keeps all rows" in caught.value.__notes__[0]
    assert not out.exists()
    assert sorted(path.name for path in working_folder(out).iterdir()) == ["lock", "rank-00000-of-00001"]
    assert merge(out)
    assert torch.equal(ActivationStore.open(out)[site], torch.ones(3, 2))


def hold_lock(out: Path, held: Path) -> None:
    with lock(working_folder(out) / "lock", 0):
        os.mkfifo(held)
        held.open("wb").close()  # until the other one reads
        threading.Event().wait(0.5)
        assert not out.exists()


def test_merge_waits_for_another_process_that_merges(tmp_path: Path, forks: Forks):
    out, held = tmp_path / "a.npz", tmp_path / "held"
    fill(shard_folder(out, 0, 1), {}, "0:out", torch.ones(3, 2))
    pid = forks.start(hold_lock, out, held)
    while not held.exists():
        time.sleep(0.001)
    held.open("rb").close()
    assert merge(out)
    assert forks.wait(pid) == 0


@pytest.mark.parametrize("name", ["a.npz", "a"])
def test_merge_tidies_up_behind_a_process_that_was_killed(tmp_path: Path, name: str):
    out = tmp_path / name
    fill(shard_folder(out, 0, 1), {}, "0:out", torch.ones(3, 2))
    merge(out)
    made = out.stat().st_ino
    fill(shard_folder(out, 0, 1), {}, "0:out", torch.ones(3, 2))
    assert merge(out) and out.stat().st_ino == made
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_merge_puts_all_names_on_the_disk_before_the_output_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out, synced = tmp_path / "a.zarr", []
    fill(shard_folder(out, 0, 1), {}, "0:out", torch.ones(3, 2))

    def sync(folder: Path) -> None:
        synced.append((folder.name, out.exists()))

    monkeypatch.setattr(merging, "_sync_names", sync)
    assert merge(out)
    assert {("a.zarr", False), ("0:out", False), ("c", False)} <= set(synced)
    assert synced[-1] == (tmp_path.name, True)


def test_extract_goes_on_when_there_is_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    extract(tmp_path / "whole.npz")
    written = []

    def limited(file, data) -> None:
        written.append(len(data))
        if sum(written) > 2000:
            file.write(memoryview(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.write(data)

    with monkeypatch.context() as patch:
        patch.setattr("forge_interp.extraction.journal.write_all", limited)
        with pytest.raises(OSError, match="No space left") as caught:
            extract(tmp_path / "cut.npz")
    assert "call again, and it goes on" in caught.value.__notes__[0]
    with pytest.raises(InterpError, match=r"waits for ranks \[0\]"):
        ActivationStore.open(tmp_path / "cut.npz")
    extract(tmp_path / "cut.npz")
    assert (tmp_path / "cut.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()


def test_extract_says_which_batch_a_disk_has_changed(tmp_path: Path):
    extract(tmp_path / "whole.npz")
    for rank in (0, 1):
        if rank:
            path = working_folder(tmp_path / "bad.npz") / "rank-00000-of-00002" / "1:out.bin"
            data = bytearray(path.read_bytes())
            data[300] ^= 1
            path.write_bytes(data)
            with pytest.raises(InterpError, match="batch 1 is not what was written"):
                extract(tmp_path / "bad.npz", rank=1, world_size=2)
        extract(tmp_path / "bad.npz", rank=0, world_size=2)
    assert (tmp_path / "bad.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
