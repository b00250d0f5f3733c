import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from forge_interp.errors import InterpError
from forge_interp.extraction import journal
from forge_interp.extraction.columns import BLOCK_BYTES
from forge_interp.extraction.journal import Shard, committed_blocks, lock, read_chunks
from forks import Forks
from torch import Tensor

REQUEST = {"batch_size": 2, "sites": ["a:out"]}


def chunk(index: int, rows: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return {
        "a:out": torch.randn(rows, 4, generator=generator),
        "b:out": torch.randn(rows, generator=generator).bfloat16(),
    }


def add(shard: Shard, index: int, rows: int = 3) -> None:
    for name, values in chunk(index, rows).items():
        shard.write(name, values)
    shard.commit(index)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def made(folder: Path, num_chunks: int) -> dict[str, bytes]:
    with Shard(folder, REQUEST) as shard:
        for i in range(num_chunks):
            add(shard, i, rows=i % 4)
        shard.seal()
    return contents(folder)


def go_on(folder: Path, num_chunks: int) -> dict[str, bytes]:
    with Shard(folder, REQUEST) as shard:
        for i in range(shard.batches, num_chunks):
            add(shard, i, rows=i % 4)
        shard.seal()
    return contents(folder)


def test_shard_holds_what_was_committed(tmp_path: Path):
    with Shard(tmp_path, REQUEST) as shard:
        add(shard, 0)
        add(shard, 1, rows=0)
        add(shard, 2, rows=5)
        assert (shard.rows, shard.batches) == (8, 3)
        for column in shard.columns:
            expected = torch.cat([chunk(0)[column.name], chunk(2, 5)[column.name]])
            data = b"".join(bytes(block) for block in committed_blocks(tmp_path, shard.columns, column))
            found = torch.frombuffer(bytearray(data), dtype=column.dtype).view(8, *column.shape)
            assert torch.equal(found, expected)


def test_shard_ends_with_the_same_bytes_when_its_files_are_cut_anywhere(tmp_path: Path):
    whole = made(tmp_path / "whole", 6)
    made(tmp_path / "cut", 6)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        name = sorted(whole)[int(torch.randint(3, (), generator=generator))]
        path = tmp_path / "cut" / name
        os.truncate(path, int(torch.randint(len(whole[name]) + 1, (), generator=generator)))
        assert go_on(tmp_path / "cut", 6) == whole


def test_shard_ends_with_the_same_bytes_when_a_byte_was_changed(tmp_path: Path):
    whole = made(tmp_path / "whole", 6)
    made(tmp_path / "bad", 6)
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        name = ("a:out.bin", "b:out.bin", "journal")[int(torch.randint(3, (), generator=generator))]
        data = bytearray(whole[name])
        data[int(torch.randint(len(data), (), generator=generator))] ^= 0x40
        (tmp_path / "bad" / name).write_bytes(data)
        assert go_on(tmp_path / "bad", 6) == whole


def test_shard_forgets_rows_that_were_not_committed(tmp_path: Path):
    whole = made(tmp_path / "whole", 4)
    with Shard(tmp_path / "left", REQUEST) as shard:
        add(shard, 0, rows=0)
        add(shard, 1, rows=1)
        shard.write("a:out", chunk(2)["a:out"])
    assert go_on(tmp_path / "left", 4) == whole


def test_shard_lists_how_another_request_differs(tmp_path: Path):
    made(tmp_path, 1)
    with pytest.raises(InterpError, match=r"batch_size: 2 there, 3 asked.*pool: null there, \"mean\" asked"):
        Shard(tmp_path, REQUEST | {"batch_size": 3, "pool": "mean"})


def be_refused(folder: Path) -> None:
    journal._LOCK_WAIT_S = 0.1
    with pytest.raises(InterpError, match="another process"):
        Shard(folder, REQUEST)


def test_shard_has_one_writer(tmp_path: Path, forks: Forks):
    with Shard(tmp_path, REQUEST):
        assert forks.run(be_refused, tmp_path) == 0


def test_lock_is_that_of_the_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, take, replaced = tmp_path / "lock", fcntl.lockf, []

    def taken_too_late(file: Any, how: int) -> None:
        take(file, how)
        if not replaced:
            replaced.append(path.stat().st_ino)
            path.rename(tmp_path / "old")
            path.touch()

    monkeypatch.setattr(fcntl, "lockf", taken_too_late)
    with lock(path, 0) as file:
        assert os.fstat(file.fileno()).st_ino == path.stat().st_ino != replaced[0]
    with pytest.raises(FileNotFoundError):
        lock(tmp_path / "gone" / "lock", 0)


def test_shard_puts_its_spec_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    made(tmp_path, 2)
    assert synced == [(tmp_path / "spec.json").stat().st_ino]


def test_shard_refuses_a_spec_that_is_no_json(tmp_path: Path):
    made(tmp_path, 2)
    (tmp_path / "spec.json").write_text("{")
    before = contents(tmp_path)
    with pytest.raises(InterpError, match=r"spec.json is damaged.*extract again"):
        Shard(tmp_path, REQUEST)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"a:out": torch.zeros(3, 5), "b:out": torch.zeros(3).bfloat16()},
            r"a:out has rows \[5\].*\[4\].*pool",
        ),
        (
            {"a:out": torch.zeros(3, 4).half(), "b:out": torch.zeros(3).bfloat16()},
            r"torch.float16.*torch.float32",
        ),
        ({"a:out": torch.zeros(3, 4)}, r"captured nothing at b:out"),
        (
            {"a:out": torch.zeros(3, 4), "b:out": torch.zeros(2).bfloat16()},
            r"rows \{'a:out': 3, 'b:out': 2\}",
        ),
        ({**chunk(1), "c:out": torch.zeros(3)}, r"c:out was captured, but not in the first batch"),
    ],
)
def test_shard_refuses_a_batch_unlike_the_first(tmp_path: Path, values: dict[str, Tensor], text: str):
    with Shard(tmp_path, REQUEST) as shard:
        add(shard, 0)
        with pytest.raises(InterpError, match=text):
            for name, value in values.items():
                shard.write(name, value)
            shard.commit(0)


def test_shard_refuses_a_site_twice_in_a_batch(tmp_path: Path):
    with Shard(tmp_path, REQUEST) as shard:
        shard.write("a:out", torch.zeros(3))
        with pytest.raises(InterpError, match="twice"):
            shard.write("a:out", torch.zeros(3))


def test_read_chunks_gives_rows_and_inputs(tmp_path: Path):
    made(tmp_path, 3)
    chunks = [chunk for chunk, _ in read_chunks(tmp_path)]
    assert [(c.batch, c.rows, c.inputs) for c in chunks if c] == [(0, 0, 0), (1, 1, 1), (2, 2, 2)]
    assert chunks[-1] is None


def test_committed_blocks_refuses_changed_bytes(tmp_path: Path):
    with Shard(tmp_path, REQUEST) as shard:
        shard.write("a:out", torch.zeros(BLOCK_BYTES // 4 + 100, 1))
        shard.commit(0)
        shard.seal()
        sizes = [len(block) for block in committed_blocks(tmp_path, shard.columns, shard.columns[0])]
        assert sizes == [BLOCK_BYTES, 400]
        with (tmp_path / "a:out.bin").open("r+b") as file:
            file.seek(BLOCK_BYTES + 3)
            file.write(b"\x01")
        with pytest.raises(InterpError, match="batch 0 is not what was written"):
            list(committed_blocks(tmp_path, shard.columns, shard.columns[0]))
