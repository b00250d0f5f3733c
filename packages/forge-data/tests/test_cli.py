import re
import subprocess
import sys
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
    said = capsys.readouterr().out
    assert "hello" not in said and "name it with --tokenizer" in said


def test_tokenize_names_missing_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", str(tmp_path / "nowhere"), "--out", str(tmp_path / "s")]) == 1
    assert "nowhere" in capsys.readouterr().err


RUN = """
[data]
max_tokens = 8
cache_dir = "{folder}/cache"
[[data.sources]]
type = "files"
held_out = 0.0
paths = ["{folder}/in"]
[train]
steps = 4
global_batch = 2
"""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan --train.steps=0", "train.steps: given 0; expected an integer from 1"),
        ("plan --train.steps=few", "train.steps: given 'few'"),
        ("plan --train.global_batch=-4", "train.global_batch: given -4"),
        ("plan --train.global_batch=1.5", "train.global_batch: given 1.5"),
        ("plan --train.global_batch_tokens=0", "train.global_batch_tokens: given 0"),
        ("plan --data.temperature=1e-6", "data.temperature: given 1e-06; expected number >= 0.1"),
        (
            "plan --data.skip=[{start_step=0,end_step=9223372036854775807}]",
            "end_step: given 9223372036854775807",
        ),
        ("plan --data.skip=[{samples=[9223372036854775807]}]", "samples[0]: given 9223372036854775807"),
        ('plan --data.sources=[{type="files",paths=[]}]', "expected at least one path"),
        ('plan --data.sources=[{type="hf",path=""}]', "given path = ''"),
        ("sample --step 0 --world-size 0", "given step 0, rank 0 of 0"),
        ("sample --step 4", "expected a step from 0 below 4"),
    ],
)
def test_run_that_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, words: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("hello there, hello")
    (tmp_path / "run.toml").write_text(RUN.format(folder=tmp_path))
    name, *others = command.split()
    assert main([name, str(tmp_path / "run.toml"), *others]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "inspect s --docs -1",
        "tokenize in --out t --workers -3",
        "sample r --step -1",
        "sample r --step 0 --limit x",
    ],
)
def test_numbers_below_zero_are_refused(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(command.split())
    assert "expected an integer from 0" in capsys.readouterr().err


def test_output_that_nobody_reads_is_no_traceback(store: Path) -> None:
    code = "import sys; from forge_data.cli import main; sys.exit(main(sys.argv[1:]))"
    with subprocess.Popen(
        [sys.executable, "-c", code, "inspect", str(store)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_error_of_the_system_is_a_line(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error", "some/file")

    monkeypatch.setattr("forge_data.cli.TokenStore", refuse)
    assert main(["inspect", str(store)]) == 1
    assert capsys.readouterr().err == "[Errno 5] Input/output error: 'some/file'\n"


def test_plan_says_why_nothing_is_held_out_and_what_to_set(tmp_path: Path, capsys) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        (tmp_path / "in" / f"{name}.txt").write_text("one document of some words")
    file, told = tmp_path / "run.toml", RUN.format(folder=tmp_path)
    file.write_text(told.replace("held_out = 0.0", "held_out = 0.02"))
    assert main(["plan", str(file)]) == 0
    said = re.search(
        r"not evaluated: .* chooses none of 2 documents .* set held_out = ([\d.]+) to choose one",
        capsys.readouterr().out,
    )
    assert said is not None
    file.write_text(told.replace("held_out = 0.0", f"held_out = {said[1]}"))
    assert main(["plan", str(file)]) == 0
    assert "not evaluated" not in capsys.readouterr().out


@pytest.mark.parametrize(("documents", "expected"), [(1, 0), (3, None)])
def test_plan_refuses_what_holds_everything_out_and_says_what_to_set(
    documents: int, expected: float | None, tmp_path: Path, capsys
) -> None:
    (tmp_path / "in").mkdir()
    for number in range(documents):
        (tmp_path / "in" / f"{number}.txt").write_text("one document of some words")
    file, told = tmp_path / "run.toml", RUN.format(folder=tmp_path)
    file.write_text(told.replace("held_out = 0.0", "held_out = 0.99999"))
    assert main(["plan", str(file)]) == 1
    said = re.search(r"leaves none to train on; set held_out = ([\d.]+),", capsys.readouterr().err)
    assert said is not None and (expected is None or float(said[1]) == expected)
    file.write_text(told.replace("held_out = 0.0", f"held_out = {said[1]}"))
    assert main(["plan", str(file)]) == 0


def test_plan_says_that_temperature_does_not_hold_in_phases(tmp_path: Path, capsys) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one document of some words")
    (tmp_path / "run.toml").write_text(RUN.format(folder=tmp_path))
    more = ["--data.temperature=2.0", "--data.phases=[{start_step=2,weights={0=1.0}}]"]
    assert main(["plan", str(tmp_path / "run.toml"), *more]) == 0
    assert "temperature holds for the first phase only" in capsys.readouterr().out
