"""Folders of tatm against files and metadata written as it writes them."""

import json
from pathlib import Path

import numpy as np
import pytest
from forge_data.cli import main
from forge_data.error import DataError
from forge_data.store.formats import import_tokens
from forge_data.store.tokens import TokenStore
from forge_data.tokenizer.hf import HfTokenizerConfig
from forge_data.tokenizer.tokenizer import BytesConfig

DOCUMENTS = [[1, 2, 256], [3, 256], [4, 5, 6, 7, 256], [8, 256]]
VOCAB = BytesConfig().build().vocab_size
TOLD = {
    "dtype": "uint32",
    "file_extension": "bin",
    "file_prefix": "/n/holylabs/elsewhere/tokenized/tokenized",
    "tatm_version": "0.2.1",
    "tokenizer": "meta-llama/Llama-3.2-1B",
    "tokenizers_version": "0.20.3",
    "vocab_size": VOCAB,
}


def folder(tmp_path: Path, changes=None, dtype="<u4", reserved=50) -> Path:
    """Two files of two documents each; the second is longer than what was written to it."""
    for number, documents in enumerate((DOCUMENTS[:2], DOCUMENTS[2:])):
        tokens = np.asarray([token for document in documents for token in document], dtype)
        tokens = np.concatenate([tokens, np.zeros(reserved * number, dtype)])
        (tmp_path / f"tokenized_{number}.bin").write_bytes(tokens.tobytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    yaml = pytest.importorskip("yaml")
    told = {key: value for key, value in (TOLD | (changes or {})).items() if value is not None}
    whole = {
        "name": "tokenized",
        "dataset_path": str(tmp_path),
        "description": "a text that goes on: and on # until it is folded into several lines by the writer "
        * 2,
        "corpuses": ["a", "b"],
        "data_content": "text",
        "tokenized_info": told,
        "zone": "after it",
    }
    (tmp_path / "metadata.yaml").write_text(yaml.dump(whole))
    return tmp_path


def texts(store: TokenStore) -> list[list[int]]:
    tokens = store.read(np.asarray([0]), len(store))[0]
    return [part.tolist() for part in np.split(tokens, store.doc_ends[:-1])]


def test_folder_becomes_the_documents_that_were_written(tmp_path, capsys):
    store = import_tokens([folder(tmp_path)], tmp_path / "out", BytesConfig())
    assert texts(store) == DOCUMENTS
    assert "tokenized_1.bin: 50 zeros at its end are left out" in capsys.readouterr().err


def test_dtype_is_uint16_where_nothing_is_said_and_json_is_read_too(tmp_path):
    folder(tmp_path, dtype="<u2")
    (tmp_path / "metadata.json").write_text(json.dumps({"tokenized_info": {"tokenizer": "t"}}))
    (tmp_path / "metadata.yaml").unlink()
    assert texts(import_tokens([tmp_path], tmp_path / "out", BytesConfig())) == DOCUMENTS


def test_npy_files_are_read_where_there_are_no_others(tmp_path):
    folder(tmp_path, {"file_extension": None, "file_prefix": None})
    for path in tmp_path.glob("*.bin"):
        path.unlink()
    np.save(tmp_path / "a.npy", np.asarray([9, 256], "<u4"))
    assert texts(import_tokens([tmp_path], tmp_path / "out", BytesConfig())) == [[9, 256]]


@pytest.mark.parametrize(
    ("changes", "dtype", "said"),
    [
        ({"dtype": "float32"}, None, r"metadata\.yaml: tokenized_info\.dtype = 'float32'; expected uint16"),
        ({}, "uint16", r"metadata\.yaml says dtype uint32; given --dtype uint16"),
        (
            {"vocab_size": 128256},
            None,
            r"metadata\.yaml says vocab_size 128256 of tokenizer meta-llama/.*tokenizer\.json",
        ),
        ({"file_prefix": "/a/others"}, None, r"metadata\.yaml describes files others\*\.bin; there are none"),
        ({"dtype": "uint16"}, None, r"tokenized_0\.bin|outside"),
        ({"tokenizer": ["a"]}, None, r"metadata\.yaml:\d+: .*expected `key: value`"),
    ],
)
def test_errors_name_the_file(tmp_path, changes, dtype, said):
    if changes == {"dtype": "uint16"}:  # an odd number of bytes is no whole number of tokens
        folder(tmp_path, changes)
        (tmp_path / "tokenized_0.bin").write_bytes(b"abc")
    else:
        folder(tmp_path, changes)
    with pytest.raises(DataError, match=said):
        import_tokens([tmp_path], tmp_path / "out", BytesConfig(), dtype)
    assert not (tmp_path / "out").exists()


def test_metadata_of_text_and_files_of_zeros_are_refused(tmp_path):
    folder(tmp_path)
    (tmp_path / "tokenized_0.bin").write_bytes(bytes(400))
    with pytest.raises(DataError, match=r"tokenized_0\.bin holds zeros only"):
        import_tokens([tmp_path], tmp_path / "out", BytesConfig())
    (tmp_path / "metadata.yaml").write_text("name: raw\ndata_content: text\n")
    with pytest.raises(DataError, match="has no tokenized_info"):
        import_tokens([tmp_path], tmp_path / "out", BytesConfig())


def test_vocabulary_is_counted_in_entries_as_ids_may_have_gaps(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 5, "</s>": 300}, unk_token="a")
    tokenizers.Tokenizer(model).save(str(tmp_path / "gaps.json"))
    config = HfTokenizerConfig(path=str(tmp_path / "gaps.json"), eos="</s>")
    store = import_tokens([folder(tmp_path, {"vocab_size": 3})], tmp_path / "out", config)
    assert sum(map(len, texts(store))) == 12
    folder(tmp_path, {"vocab_size": 301})
    with pytest.raises(DataError, match="given a tokenizer of 3:"):
        import_tokens([tmp_path], tmp_path / "other", config)


def test_command_takes_a_folder(tmp_path, capsys):
    assert main(["import", str(folder(tmp_path)), "--out", str(tmp_path / "out")]) == 0
    assert "12 tokens in 4 documents" in capsys.readouterr().out
