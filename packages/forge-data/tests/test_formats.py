import struct
from pathlib import Path

import numpy as np
import pytest
from forge_data.cli import main
from forge_data.error import DataError
from forge_data.store.formats import import_tokens, read_foreign
from forge_data.store.tokens import TokenStore
from forge_data.tokenizer.tokenizer import BytesConfig

DOCS = [[1, 2, 3, 256], [4, 256], [5, 6, 7, 8, 9, 256]]
FLAT = [token for doc in DOCS for token in doc]
ENDS = [4, 6, 12]


def _write_megatron(path: Path, code: int, dtype: str) -> Path:
    """Byte by byte from the published layout; the second document is made of two sequences."""
    lengths = [4, 1, 1, 6]
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * np.dtype(dtype).itemsize
    path.write_bytes(np.asarray(FLAT, dtype).tobytes())
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 4, 4)
    index += np.asarray(lengths, "<i4").tobytes() + pointers.astype("<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index + np.asarray([0, 1, 3, 4], "<i8").tobytes())
    return path


def _write_nanoset(path: Path, width: int) -> Path:
    path.write_bytes(np.asarray(FLAT, f"<u{width}").tobytes())
    path.with_name(path.name + ".index").write_bytes(np.asarray(ENDS, "<u8").tobytes())
    path.with_name(path.name + ".metadata").write_text(f"gpt2|{width}\n12\n12 tokens")
    return path


def _write_npy(path: Path) -> Path:
    np.save(path, np.asarray(FLAT, np.uint16))
    return path


def _write_raw(path: Path, dtype: str) -> Path:
    path.write_bytes(np.asarray(FLAT, dtype).tobytes())
    return path


WRITERS = {
    "megatron-u2": lambda p: (_write_megatron(p / "a.bin", 8, "<u2"), None),
    "megatron-i4": lambda p: (_write_megatron(p / "a.bin", 4, "<i4"), None),
    "nanoset-2": lambda p: (_write_nanoset(p / "a.ds", 2), None),
    "nanoset-4": lambda p: (_write_nanoset(p / "a.ds", 4), None),
    "npy": lambda p: (_write_npy(p / "a.npy"), None),
    "raw-uint16": lambda p: (_write_raw(p / "a.bin", "<u2"), "uint16"),
    "headerless-npy-uint32": lambda p: (_write_raw(p / "a.npy", "<u4"), "uint32"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_import_keeps_every_token_and_document(kind: str, tmp_path: Path) -> None:
    path, dtype = WRITERS[kind](tmp_path)
    store = import_tokens([path, path], tmp_path / "out", BytesConfig(), dtype)
    store.verify()
    assert store.read(np.asarray([0]), 24)[0].tolist() == FLAT * 2
    assert store.doc_ends.tolist() == [*ENDS, *(12 + end for end in ENDS)]


def test_import_never_guesses_a_dtype(tmp_path: Path) -> None:
    """An even number of uint16 is a whole number of uint32 too."""
    path = _write_raw(tmp_path / "a.bin", "<u2")
    with pytest.raises(DataError, match="does not say which"):
        import_tokens([path], tmp_path / "out", BytesConfig())
    with pytest.raises(DataError, match="outside the vocabulary of 257; name its own tokenizer and dtype"):
        import_tokens([path], tmp_path / "out", BytesConfig(), "uint32")
    assert not (tmp_path / "out").exists()


def test_read_foreign_refuses_a_dtype_that_contradicts_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="says that it holds uint16"):
        read_foreign(_write_npy(tmp_path / "a.npy"), "uint32")


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_read_foreign_refuses_a_cut_megatron_file(tmp_path: Path, ending: str) -> None:
    path = _write_megatron(tmp_path / "a.bin", 8, "<u2")
    cut = path.with_suffix(ending)
    cut.write_bytes(cut.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"a\.(bin|idx)"):
        read_foreign(path)


def test_read_foreign_refuses_a_cut_npy(tmp_path: Path) -> None:
    path = _write_npy(tmp_path / "a.npy")
    content = path.read_bytes()
    for size in (6, 20, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(DataError, match=r"a.npy cannot be read"):
            read_foreign(path)


def test_import_refuses_files_without_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(0, dtype=np.uint16))
    with pytest.raises(DataError, match=r"no tokens in .*a.npy"):
        import_tokens([tmp_path / "a.npy"], tmp_path / "out", BytesConfig())
    assert not (tmp_path / "out").exists()


def test_read_foreign_refuses_a_nanoset_without_its_index(tmp_path: Path) -> None:
    path = _write_nanoset(tmp_path / "a.ds", 2)
    (tmp_path / "a.ds.index").unlink()
    with pytest.raises(DataError, match=r"needs a.ds.metadata .* and a.ds.index"):
        read_foreign(path)


def test_import_command_makes_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write_raw(tmp_path / "a.bin", "<u2")
    assert main(["import", str(path), "--out", str(tmp_path / "out")]) == 1
    assert "does not say which" in capsys.readouterr().err
    assert main(["import", str(path), "--out", str(tmp_path / "out"), "--dtype", "uint16"]) == 0
    assert "12 tokens in 3 documents" in capsys.readouterr().out
    assert len(TokenStore(tmp_path / "out")) == 12


def test_loss_mask_of_datatrove_makes_targets(tmp_path: Path) -> None:
    path, plain = _write_nanoset(tmp_path / "a.ds", 2), _write_nanoset(tmp_path / "b.ds", 2)
    counted = [True, False, False] * 4
    (tmp_path / "a.ds.loss").write_bytes(np.asarray(counted).tobytes())
    store = import_tokens([path, plain], tmp_path / "out", BytesConfig())
    found = np.ones(24, dtype=bool)
    none = store.no_targets(np.asarray([0]), 24)
    assert none is not None
    found[none[1]] = False
    assert found.tolist() == counted + [True] * 12
    (tmp_path / "a.ds.loss").write_bytes(b"\1" * 11)
    with pytest.raises(DataError, match=r"a.ds.loss has 11 bytes; expected one for each of the 12 tokens"):
        import_tokens([path], tmp_path / "other", BytesConfig())


@pytest.mark.parametrize("head", [b"PK\x03\x04", b"\x1f\x8b", b"\x89HDF", b"PAR1"])
def test_containers_are_no_raw_numbers(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(head + bytes(60))
    with pytest.raises(DataError, match=r"a.npz is .*, no raw numbers"):
        read_foreign(tmp_path / "a.npz", "uint8")
