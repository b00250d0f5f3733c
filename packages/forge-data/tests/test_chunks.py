"""Readers against folders built byte by byte from the published layouts."""

import json
from pathlib import Path

import numpy as np
import pytest
from forge_data.error import DataError
from forge_data.store.chunks import read_chunks
from forge_data.store.formats import import_tokens
from forge_data.tokenizer.tokenizer import BytesConfig

DOCUMENTS = [[1, 2, 256], [3, 256], [4, 5, 6, 7, 256], [8, 256]]


def _items(path: Path, items: list[bytes], between: bytes = b"") -> None:
    """u32 count, u32 offsets, what lies between, the items."""
    begin = 4 * (len(items) + 2) + len(between)
    offsets = begin + np.cumsum([0, *map(len, items)])
    header = np.asarray([len(items), *offsets], "<u4").tobytes()
    path.write_bytes(header + between + b"".join(items))


@pytest.fixture
def litdata(tmp_path: Path) -> Path:
    chunks = []
    for number, documents in enumerate((DOCUMENTS[:3], DOCUMENTS[3:])):
        name = f"chunk-0-{number}.bin"
        _items(tmp_path / name, [np.asarray(document, "<i4").tobytes() for document in documents])
        dim = sum(map(len, documents))
        chunks.append({"chunk_size": len(documents), "dim": dim, "filename": name, "chunk_bytes": 0})
    config = {"data_format": ["no_header_tensor:16"], "compression": None, "item_loader": "TokensLoader"}
    (tmp_path / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
    return tmp_path


def _mds(folder: Path, encoding: str, dtype: str) -> Path:
    """Samples of four tokens that cross documents, after a column of any length."""
    tokens = np.asarray([t for document in DOCUMENTS for t in document], dtype).reshape(-1, 4)
    fixed = encoding.startswith("ndarray:int32:")
    samples = []
    for number, row in enumerate(tokens):
        # an array without a fixed shape: one dimension << 2 | code of a byte for its size, then its size
        shape = bytes([1 << 2 | 0, len(row)]) if encoding == "ndarray:int32" else b""
        name, ids = b"x" * number, shape + row.tobytes()
        sizes = [len(name)] if fixed else [len(name), len(ids)]
        samples.append(np.asarray(sizes, "<u4").tobytes() + name + ids)
    _items(folder / "shard.00000.mds", samples, b'{"version": 2}')
    shard = {
        "column_names": ["name", "tokens"],
        "column_encodings": ["str", encoding],
        "column_sizes": [None, tokens[0].nbytes if fixed else None],
        "compression": None,
        "format": "mds",
        "raw_data": {"basename": "shard.00000.mds"},
        "samples": len(samples),
    }
    (folder / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}))
    return folder


def _documents(folder: Path, out: Path, dtype: str | None = None) -> list[list[int]]:
    store = import_tokens([folder], out, BytesConfig(), dtype)
    tokens = store.read(np.asarray([0]), len(store))[0]
    return [part.tolist() for part in np.split(tokens, store.doc_ends)[:-1]]


@pytest.mark.parametrize(("number", "dtype"), [(16, "<i4"), (20, "<u2")])
def test_litdata_chunks_keep_every_token_and_document(
    litdata: Path, tmp_path: Path, number: int, dtype: str
) -> None:
    for name, documents in (("chunk-0-0.bin", DOCUMENTS[:3]), ("chunk-0-1.bin", DOCUMENTS[3:])):
        _items(litdata / name, [np.asarray(document, dtype).tobytes() for document in documents])
    index = (litdata / "index.json").read_text().replace("no_header_tensor:16", f"no_header_tensor:{number}")
    (litdata / "index.json").write_text(index)
    assert _documents(litdata, tmp_path / "s") == DOCUMENTS


def test_folder_of_token_files_says_what_it_has(tmp_path: Path) -> None:
    for name in ("a.npy", "b.npy", "c.bin"):
        (tmp_path / name).touch()
    with pytest.raises(
        DataError,
        match=r"has no index.json.*it has files: 2 .npy, 1 .bin. Name token files.*`forge-data tokenize`",
    ):
        list(read_chunks(tmp_path))


@pytest.mark.parametrize(
    ("encoding", "stored", "dtype"),
    [
        ("ndarray:int32:4", "<i4", None),
        ("ndarray:int32", "<i4", None),
        ("bytes", "<u2", "uint16"),
        ("bytes", "<i8", "int64"),
    ],
)
def test_mds_keeps_every_token(tmp_path: Path, encoding: str, stored: str, dtype: str | None) -> None:
    assert _documents(_mds(tmp_path, encoding, stored), tmp_path / "s", dtype) == DOCUMENTS


@pytest.mark.parametrize("encoding", ["bytes", "ndarray", "str"])
def test_mds_never_guesses_a_dtype(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(DataError, match="its writer knows it"):
        list(read_chunks(_mds(tmp_path, encoding, "<i4")))


def test_chunks_refuse_a_dtype_that_contradicts(litdata: Path) -> None:
    with pytest.raises(DataError, match="int32; given dtype 'uint16'"):
        list(read_chunks(litdata, "uint16"))


@pytest.mark.parametrize("by", [1, 4, 40])
def test_chunks_that_were_cut_are_named(litdata: Path, by: int) -> None:
    path = litdata / "chunk-0-0.bin"
    path.write_bytes(path.read_bytes()[:-by])
    with pytest.raises(DataError, match=r"chunk-0-0\.bin"):
        list(read_chunks(litdata))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"chunks": [{}], "config": {"data_format": ["str"]}}'])
def test_folder_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(DataError, match=r"neither litData chunks nor MDS|expected token chunks"):
        list(read_chunks(tmp_path))
