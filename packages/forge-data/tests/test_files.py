"""Which files of a folder are read, and which are refused or named."""

import gzip
import itertools
import json
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from forge_data.error import DataError
from forge_data.sources.config import FilesConfig
from forge_data.sources.files import files_of_split, find_files
from forge_data.sources.hf import HfConfig
from forge_data.store.tokens import TokenStore
from forge_data.tokenizer.tokenizer import BytesConfig


def _texts(store: TokenStore) -> list[str]:
    starts, decode = [0, *store.doc_ends.tolist()], BytesConfig().build().decode
    return [decode(store.read(np.asarray([a]), b - a)[0].tolist()) for a, b in itertools.pairwise(starts)]


def _write(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    path.write_bytes(gzip.compress(lines.encode()) if path.name.endswith(".gz") else lines.encode())


def _read(kind: type, tmp_path: Path, **values: object) -> list[str]:
    source = msgspec.convert({"held_out": 0.0} | values, kind, strict=True)
    return _texts(source.open("train", BytesConfig(), tmp_path / "cache"))


def test_folder_as_datasets_saves_it_gives_the_rows_of_its_split(tmp_path: Path, capsys) -> None:
    datasets = pytest.importorskip("datasets")
    both = {
        name: datasets.Dataset.from_dict({"text": [f"{name} {n}" for n in range(9)]})
        for name in ("train", "test")
    }
    datasets.DatasetDict(both).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "README.md").write_text("about")
    assert _read(HfConfig, tmp_path, path=str(tmp_path / "saved")) == [f"train {n}" for n in range(9)]
    assert _read(HfConfig, tmp_path, path=str(tmp_path / "saved"), split="test") == [
        f"test {n}" for n in range(9)
    ]
    said = capsys.readouterr().err
    assert all(name in said for name in ("README.md", "dataset_dict.json", "state.json", ", test"))
    with pytest.raises(DataError, match=r"given split = 'dev'.* are those of test, train"):
        _read(HfConfig, tmp_path, path=str(tmp_path / "saved"), split="dev")


def test_split_of_a_file_is_what_its_name_says(tmp_path: Path) -> None:
    for name in (
        "a/train.jsonl",
        "a/valid.jsonl",
        "b/train_sft-00000-of-00002.jsonl",
        "b/test_sft-00000-of-00001.jsonl",
    ):
        _write(tmp_path / name, [name])
    names = {"a": ("train", "validation"), "b": ("train_sft", "test_sft")}
    for folder, splits in names.items():
        for split in splits:
            (file,) = files_of_split(tmp_path / folder, split)
            assert file.name.startswith(split[:5])
    source = msgspec.convert({"path": str(tmp_path / "a"), "validation": "validation"}, HfConfig, strict=True)
    assert _texts(source.open("validation", BytesConfig(), tmp_path / "cache")) == ["a/valid.jsonl"]
    _write(tmp_path / "a" / "more.jsonl", ["more"])
    with pytest.raises(DataError, match=r"more.jsonl is of no split by its name"):
        files_of_split(tmp_path / "a", "train")


def test_split_of_single_files_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "rows.jsonl", ["x"])
    with pytest.raises(DataError, match=r"given split = 'test'.*files are of no split"):
        _read(HfConfig, tmp_path, path=str(tmp_path / "rows.jsonl"), split="test")


def test_text_among_rows_is_refused_and_named(tmp_path: Path) -> None:
    _write(tmp_path / "d" / "rows.jsonl", ["x"])
    (tmp_path / "d" / "notes.txt").write_text("notes")
    with pytest.raises(DataError, match=r"notes.txt has no rows, other files"):
        _read(HfConfig, tmp_path, path=str(tmp_path / "d"))
    with pytest.raises(DataError, match=r"notes.txt has no rows, and messages are asked for"):
        _read(HfConfig, tmp_path, path=str(tmp_path / "d" / "notes.txt"), messages="messages")


@pytest.mark.parametrize("name", ["a.ndjson", "a.JSONL", "a.json", "a.json.gz", "a.JSONL.gz"])
@pytest.mark.parametrize("kind", ["files", "hf"])
def test_rows_are_rows_whatever_the_file_is_called(tmp_path: Path, name: str, kind: str) -> None:
    _write(tmp_path / name, ["one", "two"])
    source, key = (
        (FilesConfig, {"paths": [str(tmp_path / name)]})
        if kind == "files"
        else (HfConfig, {"path": str(tmp_path / name)})
    )
    assert _read(source, tmp_path, **key) == ["one", "two"]


def test_tables_and_other_json_are_refused_unless_they_are_text(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "package.json").write_text('{\n  "name": "x"\n}\n')
    with pytest.raises(DataError, match=r"package.json at 0: no JSON.*as_text"):
        _read(FilesConfig, tmp_path, paths=[str(tmp_path / "in")])
    (tmp_path / "in" / "a.csv").write_text("text\nx\n")
    with pytest.raises(DataError, match=r"a.csv is a table.*as_text"):
        _read(FilesConfig, tmp_path, paths=[str(tmp_path / "in")])
    texts = _read(FilesConfig, tmp_path, paths=[str(tmp_path / "in")], as_text=[".json", ".csv"])
    assert texts == ["text\nx\n", '{\n  "name": "x"\n}\n']


def test_rows_behind_a_link_are_rows_and_folders_behind_links_are_read_once(tmp_path: Path) -> None:
    _write(tmp_path / "blobs" / "3fa1", ["one", "two"])
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "train.jsonl").symlink_to(tmp_path / "blobs" / "3fa1")
    _write(tmp_path / "elsewhere" / "more.jsonl", ["three"])
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "elsewhere" / "circle").symlink_to(tmp_path / "in", target_is_directory=True)
    assert sorted(_read(FilesConfig, tmp_path, paths=[str(tmp_path / "in")])) == ["one", "three", "two"]


def test_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "in" / "closed" / "a.jsonl", ["x"])
    _write(tmp_path / "in" / "b.jsonl", ["y"])
    inner = os.scandir

    def closed(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return inner(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(DataError, match=r"closed cannot be listed: Permission denied"):
        find_files([str(tmp_path / "in")])


def test_source_says_what_it_read_and_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path / "in" / "a.jsonl", ["one", "", "two"])
    (tmp_path / "in" / "b.txt").write_text("three")
    _read(FilesConfig, tmp_path, paths=[str(tmp_path / "in")], name="web")
    said = "the text of web: 3 documents of 2 files (1 .jsonl, 1 .txt), 1 rows without text passed over\n"
    assert said in capsys.readouterr().err


def test_summary_counts_the_last_endings_and_says_how_many_kinds_are_not_listed(tmp_path, capsys) -> None:
    (tmp_path / "in").mkdir()
    for name in ("v1.0.txt", "v2.0.txt", *(f"x.{kind}" for kind in "abcdefghi")):
        (tmp_path / "in" / name).write_text("text")
    _read(
        FilesConfig,
        tmp_path,
        paths=[str(tmp_path / "in")],
        name="web",
        as_text=[f".{k}" for k in "abcdefghi"],
    )
    said = capsys.readouterr().err
    assert "(2 .txt, 1 .a, 1 .b" in said and "1 .g and 2 other endings)" in said
