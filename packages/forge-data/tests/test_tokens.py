import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from forge_data.error import DataError
from forge_data.store import blocks
from forge_data.store.tokens import MANIFEST, TokenStore, Writer


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
    assert _write(tmp_path / "s", 65536).manifest.dtype == "uint16"
    assert _write(tmp_path / "l", 65537).manifest.dtype == "uint32"


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


@pytest.mark.parametrize("bit", [0, 7])
def test_read_finds_a_flipped_bit_in_the_block_it_touches_and_in_no_other(tmp_path: Path, bit: int) -> None:
    """Block 1 of 64 KiB; bit 7 of the high byte makes an id far beyond the vocabulary."""
    with Writer(tmp_path / "s", 257, "t") as writer:
        writer.add(np.zeros(100_000, dtype=np.int64), [100_000])
    path = tmp_path / "s" / "tokens.bin"
    data = bytearray(path.read_bytes())
    data[65536 + 101] ^= 1 << bit
    path.write_bytes(data)
    store = TokenStore(tmp_path / "s")
    assert not store.read(np.asarray([0, 65536]), 32768).any()
    for start, length in ((32768, 1), (32767, 2), (65535, 1), (0, 100_000)):
        with pytest.raises(DataError, match=r"s/tokens\.bin is damaged in block 1 "):
            store.read(np.asarray([start]), length)


def test_read_checks_blocks_once(tmp_path: Path) -> None:
    store = _write(tmp_path / "s")
    assert store.read(np.asarray([3]), 2).tolist() == [[3, 4]]
    _damage(tmp_path / "s" / "tokens.bin", at=6)
    assert store.read(np.asarray([3]), 2).tolist() == [[2, 4]]


def test_doc_ends_are_checked_when_first_asked_for(tmp_path: Path) -> None:
    _write(tmp_path / "s")
    _damage(tmp_path / "s" / "docs.idx")
    store = TokenStore(tmp_path / "s")
    with pytest.raises(DataError, match=r"docs\.idx is damaged in block 0"):
        _ = store.doc_ends


@pytest.mark.parametrize("name", ["tokens.bin.xxh3", "docs.idx.xxh3"])
def test_open_finds_damaged_digests(tmp_path: Path, name: str) -> None:
    _write(tmp_path / "s")
    _damage(tmp_path / "s" / name)
    with pytest.raises(DataError, match=f"{name} is damaged"):
        TokenStore(tmp_path / "s")


def test_open_says_what_to_do_with_a_store_of_format_1(tmp_path: Path) -> None:
    _write(tmp_path / "s")
    part = {"bytes": 300, "digests": ["0" * 32]}
    _edit(tmp_path / "s", format=1, tokens=part, docs=part)
    with pytest.raises(DataError, match=r"format 1; .* anew with forge-data tokenize"):
        TokenStore(tmp_path / "s")


@pytest.mark.parametrize("name", ["tokens.bin", "docs.idx"])
def test_require_files_finds_what_was_cut_off_while_it_is_open(tmp_path: Path, name: str) -> None:
    store = _write(tmp_path / "s")
    store.require_files()
    os.truncate(tmp_path / "s" / name, 8)
    with pytest.raises(DataError, match=f"{name} has 8 bytes"):
        store.require_files()


def test_writer_says_that_the_disk_is_full_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk; it also strikes when buffers are flushed."""
    code = (
        "import resource, signal, sys, numpy as np; from pathlib import Path\n"
        "from forge_data.store.tokens import Writer; from forge_data.error import DataError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "size = int(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))\n"
        "try:\n"
        f"    with Writer(Path({str(tmp_path)!r}) / 's', 257, 't') as writer:\n"
        "        for _ in range(20): writer.add(np.zeros(1000, dtype=np.int64), [1000])\n"
        "except DataError as error: print(error)\n"
    )
    for size in (100, 39_990, 20_000):
        command = [sys.executable, "-c", code, str(size)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "cannot be written" in done.stdout and "make room" in done.stdout
        assert list(tmp_path.iterdir()) == []


def test_digest_of_a_store_names_where_its_documents_end(tmp_path: Path) -> None:
    digests = []
    for lengths in ([2, 4], [3, 3]):
        with Writer(tmp_path / str(lengths), 257, "t") as writer:
            writer.add(np.arange(6), lengths)
        digests.append(TokenStore(tmp_path / str(lengths)).manifest.digest)
    assert digests[0] != digests[1]


@pytest.mark.parametrize("name", [MANIFEST, "tokens.bin", "tokens.bin.xxh3"])
def test_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    _write(tmp_path / "s")
    (tmp_path / "s" / name).unlink()
    (tmp_path / "s" / name).mkdir()  # reading it is an OSError
    with pytest.raises(DataError, match=rf"{name} (cannot be read: .*Is a directory|has \d+ bytes)"):
        TokenStore(tmp_path / "s").read(np.asarray([0]), 10)


@pytest.mark.parametrize("call", ["mmap.mmap", "os.lseek"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENODEV])
def test_file_that_a_file_system_takes_away_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """As NFS does with a file that was replaced, and some file systems with what they cannot map."""
    store = _write(tmp_path / "s")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(f"forge_data.store.blocks.{call}", refuse)
    with pytest.raises(DataError, match=rf"tokens.bin cannot be read: .*{os.strerror(number)}"):
        store.require_files() if call == "os.lseek" else TokenStore(tmp_path / "s")
