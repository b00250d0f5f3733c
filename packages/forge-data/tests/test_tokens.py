import os
import pickle
from pathlib import Path

import msgspec
import numpy as np
import pytest
from forge_data import blocks
from forge_data.error import DataError
from forge_data.tokens import MANIFEST, TokenStore, Writer


def _write(folder: Path, vocab_size: int = 257) -> TokenStore:
    with Writer(folder, vocab_size, "bytes-256") as writer:
        for n in range(3):
            writer.add(np.arange(n * 100, n * 100 + 50) % vocab_size, [20, 30])
    return TokenStore(folder)


def _ids(store: TokenStore) -> list[int]:
    return store.read(np.asarray([0]), len(store))[0].tolist()


def test_store_reads_back_what_was_written(tmp_path: Path) -> None:
    store = _write(tmp_path / "s")
    assert len(store) == 150
    assert store.read(np.asarray([50, 0]), 50).dtype == np.uint16
    assert store.read(np.asarray([50, 0]), 50).tolist() == [list(range(100, 150)), list(range(50))]
    assert store.doc_ends.tolist() == [20, 50, 70, 100, 120, 150]
    store.verify()


def test_store_takes_the_dtype_of_its_vocabulary(tmp_path: Path) -> None:
    assert _write(tmp_path / "s", 65536).manifest.dtype == np.uint16
    assert _write(tmp_path / "l", 65537).manifest.dtype == np.uint32


def test_store_pickles_as_its_place(tmp_path: Path) -> None:
    data = pickle.dumps(_write(tmp_path / "s"))
    assert len(data) < 500
    assert _ids(pickle.loads(data)) == _ids(TokenStore(tmp_path / "s"))


def test_writer_refuses_ids_outside_the_vocabulary_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="257"), Writer(tmp_path / "s", 257, "t") as writer:
        writer.add(np.asarray([257]), [1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lengths", [[1], [3, 0], [2, 2]])
def test_writer_refuses_lengths_that_do_not_fit(tmp_path: Path, lengths: list[int]) -> None:
    with pytest.raises(DataError, match="3 ids"), Writer(tmp_path / "s", 257, "t") as writer:
        writer.add(np.arange(3), lengths)


def test_writer_keeps_what_another_published_first(tmp_path: Path) -> None:
    with Writer(tmp_path / "s", 257, "t") as late:
        late.add(np.arange(5), [5])
        first = _write(tmp_path / "s").manifest
    assert TokenStore(tmp_path / "s").manifest == first
    assert [f.name for f in tmp_path.iterdir()] == ["s"]


def test_writer_removes_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "here")
    for name in (
        ".s.here.999999999.old",
        ".s.here.999999999.new",
        ".s.there.999999999.old",
        f".s.here.{os.getpid()}.old",
    ):
        (tmp_path / name).mkdir()
        if name.endswith("old"):
            os.utime(tmp_path / name, (0, 0))
    _write(tmp_path / "s")
    left = {".s.here.999999999.new", ".s.there.999999999.old", f".s.here.{os.getpid()}.old", "s"}
    assert {f.name for f in tmp_path.iterdir()} == left


def _damage(path: Path, at: int = 7) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _edit(store: Path, **changes: object) -> None:
    manifest = msgspec.json.decode((store / MANIFEST).read_bytes())
    (store / MANIFEST).write_bytes(msgspec.json.encode(manifest | changes))


@pytest.mark.parametrize("name", ["tokens.bin", "docs.idx"])
def test_verify_finds_a_flipped_bit(tmp_path: Path, name: str) -> None:
    _write(tmp_path / "s")
    _damage(tmp_path / "s" / name)
    with pytest.raises(DataError, match=f"{name} is damaged in block 0"):
        TokenStore(tmp_path / "s").verify()


def test_verify_names_the_damaged_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)
    store = _write(tmp_path / "s")
    store.verify()
    _damage(tmp_path / "s" / "tokens.bin", at=200)
    with pytest.raises(DataError, match="block 3"):
        TokenStore(tmp_path / "s").verify()


@pytest.mark.parametrize("name", ["tokens.bin", "docs.idx"])
def test_open_finds_a_truncated_file(tmp_path: Path, name: str) -> None:
    _write(tmp_path / "s")
    path = tmp_path / "s" / name
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=name):
        TokenStore(tmp_path / "s")


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "uint32"},
        {"dtype": "float16"},
        {"num_tokens": 149},
        {"num_docs": 7},
        {"format": 9},
        {"vocab": 1},
    ],
)
def test_open_refuses_a_manifest_that_contradicts_itself(tmp_path: Path, changes: dict[str, object]) -> None:
    _write(tmp_path / "s")
    _edit(tmp_path / "s", **changes)
    with pytest.raises(DataError):
        TokenStore(tmp_path / "s")


def test_verify_finds_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    _write(tmp_path / "s")
    _edit(tmp_path / "s", vocab_size=100)
    with pytest.raises(DataError, match="outside"):
        TokenStore(tmp_path / "s").verify()


def test_open_names_the_missing_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        TokenStore(tmp_path / "nowhere")
