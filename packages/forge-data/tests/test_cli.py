from pathlib import Path

import pytest
from forge_data.cli import main


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("hello there")
    assert main(["tokenize", str(tmp_path / "in"), "--out", str(tmp_path / "s"), "--workers", "1"]) == 0
    return tmp_path / "s"


def test_tokenize_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("hello there")
    store = tmp_path / "s"
    main(["tokenize", str(tmp_path / "a.txt"), "--out", str(store), "--workers", "1"])
    assert capsys.readouterr().out == f"{store}: 12 tokens in 1 documents\n"


def test_inspect_shows_counts_and_text(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(store)]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("uint16", "hello there", "intact", "bytes-256"))


def test_inspect_fails_when_a_store_is_damaged(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (store / "tokens.bin").write_bytes(b"x" * 24)
    assert main(["inspect", str(store)]) == 1
    assert "block 0" in capsys.readouterr().err


def test_inspect_of_another_tokenizer_shows_no_text(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = store / "manifest.json"
    manifest.write_text(manifest.read_text().replace("bytes-256", "other"))
    assert main(["inspect", str(store)]) == 0
    assert "hello" not in capsys.readouterr().out


def test_tokenize_names_missing_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", str(tmp_path / "nowhere"), "--out", str(tmp_path / "s")]) == 1
    assert "nowhere" in capsys.readouterr().err
