import contextlib
import gzip
import importlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from forge_data.error import DataError
from forge_data.sources.columns import TextColumn
from forge_data.sources.files import find_files
from forge_data.store.tokenize import Held, tokenize_files
from forge_data.store.tokens import TokenStore
from forge_data.tokenizer.tokenizer import BytesConfig


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Text, Python, jsonl of many lines, and both of the last gzipped."""
    root = tmp_path / "corpus"
    (root / "deep").mkdir(parents=True)
    draw = random.Random(0)
    rows = [{"text": "é" * draw.randint(0, 200) + str(n), "n": n} for n in range(300)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (root / "a.txt").write_text("first\nlines\n")
    (root / "deep" / "b.py").write_text("x = 1\n" * 50)
    (root / "c.jsonl").write_text(lines)
    (root / "d.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (root / "e.txt.gz").write_bytes(gzip.compress(b"packed"))
    return root


def _run(corpus: Path, out: Path, **settings: object) -> TokenStore:
    return tokenize_files(find_files([str(corpus)]), out, BytesConfig(), root=corpus, **settings)  # type: ignore[arg-type]


def _texts(store: TokenStore) -> list[str]:
    starts = [0, *store.doc_ends.tolist()]
    pieces = [store.read(np.asarray([a]), b - a)[0].tolist() for a, b in itertools.pairwise(starts)]
    assert all(piece[-1] == 256 for piece in pieces)
    return [BytesConfig().build().decode(piece) for piece in pieces]


def _bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.slow
def test_tokenize_writes_the_same_bytes_with_any_number_of_workers(corpus: Path, tmp_path: Path) -> None:
    stores = [_bytes(_run(corpus, tmp_path / f"w{n}", workers=n).folder) for n in (1, 2, 4)]
    assert stores[0] == stores[1] == stores[2]


def test_tokenize_takes_one_process_for_little_text_and_else_one_for_each_core(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    tokenize = importlib.import_module("forge_data.store.tokenize")
    inner = tokenize.in_order
    monkeypatch.setattr(
        tokenize, "in_order", lambda work, tasks, workers: asked.append(workers) or inner(work, tasks, 1)
    )
    monkeypatch.setattr(tokenize, "cores", lambda: 7)
    for small, workers in ((1 << 20, 0), (10, 0), (10, 3)):
        monkeypatch.setattr(tokenize, "SMALL_BYTES", small)
        _run(corpus, tmp_path / f"s{len(asked)}", workers=workers)
    assert asked == [1, 7, 3]


@pytest.mark.parametrize("size", [1, 100, 4096])
def test_tokenize_writes_the_same_bytes_however_files_are_cut(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    whole = _bytes(_run(corpus, tmp_path / "whole").folder)
    monkeypatch.setattr("forge_data.sources.documents.TASK_BYTES", size)
    assert _bytes(_run(corpus, tmp_path / "cut").folder) == whole


def test_tokenize_keeps_every_document_in_order(corpus: Path, tmp_path: Path) -> None:
    rows = [json.loads(line)["text"] for line in (corpus / "c.jsonl").read_text().splitlines()]
    assert _texts(_run(corpus, tmp_path / "s")) == [
        "first\nlines\n",
        *rows,
        *rows,
        "x = 1\n" * 50,
        "packed",
    ] or (_texts(TokenStore(tmp_path / "s")) == ["first\nlines\n", *rows, *rows, "packed", "x = 1\n" * 50])


def test_tokenize_reports_progress_up_to_the_whole(corpus: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    _run(corpus, tmp_path / "s", on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(f.stat().st_size for f in find_files([str(corpus)]))
    assert seen == sorted(seen)


def test_tokenize_splits_documents_once(corpus: Path, tmp_path: Path) -> None:
    parts = [
        _texts(_run(corpus, tmp_path / split, held=Held(split, 0.3)))  # type: ignore[arg-type]
        for split in ("train", "validation")
    ]
    assert sorted(parts[0] + parts[1]) == sorted(_texts(_run(corpus, tmp_path / "all")))
    assert 0.2 < len(parts[1]) / 600 < 0.4


def test_tokenize_reads_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"body": ["one", None, "three"], "n": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "p.parquet", row_group_size=2)
    assert _texts(_run(tmp_path / "p.parquet", tmp_path / "s", columns=TextColumn("body"))) == [
        "one",
        "three",
    ]
    for field in ("text", "n"):
        with pytest.raises(DataError, match=r"p\.parquet"):
            _run(tmp_path / "p.parquet", tmp_path / "x", columns=TextColumn(field))


@pytest.mark.parametrize("kind", ["stream", "file", "jsonl.zst"])
def test_tokenize_reads_arrow_and_zst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    ipc = pytest.importorskip("pyarrow.ipc")
    texts = [f"text {number}" for number in range(50)]
    path = tmp_path / (kind if "." in kind else f"a.{kind}.arrow")
    if "." in kind:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        with pyarrow.output_stream(str(path := tmp_path / "a.jsonl.zst"), compression="zstd") as file:
            file.write(lines.encode())
    else:
        table = pyarrow.table({"text": texts})
        with (ipc.new_stream if kind == "stream" else ipc.new_file)(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    monkeypatch.setattr("forge_data.sources.documents.ARROW_BATCHES", 3)
    assert _texts(_run(path, tmp_path / "s")) == texts


def test_tokenize_replaces_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\xffb")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "c\xfed"}\n{"text": "\\ud800e"}\n')
    files = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    store = tokenize_files(files, tmp_path / "s", BytesConfig(), root=tmp_path)
    assert _texts(store) == ["a\ufffdb", "c\ufffdd", "\ufffde"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"text\0more", "zero bytes"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "y"}\n', "a.jsonl at 14"),
        ("a.jsonl", b"{not json}\n", "a.jsonl at 0"),
        ("a.jsonl", b'{"text": 3}\n', "int, not text"),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000, "a.jsonl at 0: no JSON"),
        ("a.txt.gz", b"not gzip", "a.txt.gz cannot be read or unpacked"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-9],
            "a.jsonl.gz cannot be read or unpacked",
        ),
        ("a.parquet", b"no parquet", "a.parquet cannot be read or unpacked"),
        ("a.parquet", b"", "a.parquet cannot be read or unpacked"),
        ("a.arrow", b"no arrow at all", "a.arrow cannot be read or unpacked"),
        ("a.txt", b"", "no text in 1 files"),
    ],
)
def test_tokenize_refuses_what_is_no_text_and_leaves_nothing(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    if name.endswith((".parquet", ".arrow")):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        tokenize_files([tmp_path / name], tmp_path / "s", BytesConfig(), root=tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == [name]


def test_tokenize_names_the_damaged_part_of_a_parquet_file(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["some text " * 99] * 99}), path, compression="gzip")
    content = bytearray(path.read_bytes())
    content[4:60] = bytes(56)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a.parquet cannot be read or unpacked"):
        tokenize_files([path], tmp_path / "s", BytesConfig(), root=tmp_path)


def test_tokenize_names_a_file_that_has_gone(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone.txt cannot be read.*No such file"):
        tokenize_files([tmp_path / "gone.txt"], tmp_path / "s", BytesConfig(), root=tmp_path)


def test_tokenize_refuses_a_folder_that_exists(corpus: Path, tmp_path: Path) -> None:
    _run(corpus, tmp_path / "s")
    with pytest.raises(DataError, match="exists already"):
        _run(corpus, tmp_path / "s")


SCRIPT = """
import os, sys, time
from pathlib import Path
from forge_data.store.tokenize import tokenize_files
from forge_data.tokenizer.tokenizer import BytesConfig

def stop(done, total):
    print("going", flush=True)
    time.sleep(600)

files = sorted(Path(sys.argv[1]).glob("*.txt"))
if __name__ == "__main__":
    tokenize_files(files, Path(sys.argv[2]), BytesConfig(), root=Path("/"), workers=2, on_progress=stop)
"""


def _alive_with(word: str) -> set[int]:
    """Processes whose environment names a word."""
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word.encode() in (process / "environ").read_bytes():
                found.add(int(process.name))
    return found


def test_killed_tokenize_leaves_no_processes(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for n in range(20):
        (tmp_path / "texts" / f"{n}.txt").write_text("text")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "script.py", tmp_path / "texts", tmp_path / "s"]
    mark = f"FORGE_TEST={tmp_path}"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | dict([mark.split("=", 1)])
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"going\n"
        assert len(_alive_with(mark)) >= 4  # itself, the fork server, two of the pool
        process.kill()
    end = time.monotonic() + 20
    while (left := _alive_with(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.parametrize("commits", [0, 4, 11])
def test_tokenize_goes_on_where_it_was_killed_and_writes_the_same_bytes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    """Killed after some tasks; whatever the disk holds beyond the last commit does not matter."""
    monkeypatch.setattr("forge_data.sources.documents.TASK_BYTES", 1000)
    whole = _bytes(_run(corpus, tmp_path / "whole").folder)
    monkeypatch.setattr("forge_data.store.restart.COMMIT_S", 0.0)
    done: list[str] = []
    work = "forge_data.store.tokenize._tokenize_task"
    tokenize = importlib.import_module("forge_data.store.tokenize")._tokenize_task

    def until_killed(task, **settings):
        if len(done) == commits:
            raise KeyboardInterrupt
        done.append(task)
        return tokenize(task, **settings)

    monkeypatch.setattr(work, until_killed)
    with pytest.raises(KeyboardInterrupt):
        _run(corpus, tmp_path / "s", restart=True)
    with (tmp_path / ".s.partial" / "tokens.bin").open("ab") as file:
        file.write(b"not committed")
    again: list[str] = []
    monkeypatch.setattr(work, lambda task, **settings: again.append(task) or tokenize(task, **settings))
    assert _bytes(_run(corpus, tmp_path / "s", restart=True).folder) == whole
    assert not set(done) & set(again) and not (tmp_path / ".s.partial").exists()


def test_tokenize_begins_anew_when_the_text_has_changed(corpus: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("forge_data.store.restart.COMMIT_S", 0.0)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(corpus, tmp_path / "s", restart=True, on_progress=stop)
    (corpus / "a.txt").write_text("other text")
    assert _texts(_run(corpus, tmp_path / "s", restart=True))[0] == "other text"


def test_error_while_tokenizing_keeps_the_work_that_was_done(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("forge_data.sources.documents.TASK_BYTES", 100)
    rows = [json.dumps({"text": f"text {n} " * 3}) + "\n" for n in range(40)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("".join(rows))
    whole = _bytes(_run(tmp_path / "in", tmp_path / "whole").folder)
    work = importlib.import_module("forge_data.store.tokenize")._tokenize_task
    done: list[object] = []

    def until_it_fails(task, **settings):
        if len(done) == 7:
            raise DataError("one bad row")
        done.append(task)
        return work(task, **settings)

    monkeypatch.setattr("forge_data.store.tokenize._tokenize_task", until_it_fails)
    with pytest.raises(DataError, match="one bad row"):
        _run(tmp_path / "in", tmp_path / "s", restart=True)
    again: list[object] = []
    monkeypatch.setattr(
        "forge_data.store.tokenize._tokenize_task",
        lambda task, **settings: again.append(task) or work(task, **settings),
    )
    assert _bytes(_run(tmp_path / "in", tmp_path / "s", restart=True).folder) == whole
    assert len(done) == 7 and not set(done) & set(again)


def test_kept_work_that_was_cut_is_done_again(corpus: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("forge_data.store.restart.COMMIT_S", 0.0)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    whole = _bytes(_run(corpus, tmp_path / "whole").folder)
    with pytest.raises(KeyboardInterrupt):
        _run(corpus, tmp_path / "s", restart=True, on_progress=stop)
    os.truncate(tmp_path / ".s.partial" / "tokens.bin", 3)
    assert _bytes(_run(corpus, tmp_path / "s", restart=True).folder) == whole


def test_packed_rows_are_read_in_portions_and_go_on_within_a_file(tmp_path: Path, monkeypatch) -> None:
    lines = "".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(300)).encode()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    whole = _bytes(_run(tmp_path / "in", tmp_path / "whole").folder)
    monkeypatch.setattr("forge_data.sources.documents.TASK_BYTES", 500)
    monkeypatch.setattr("forge_data.store.restart.COMMIT_S", 0.0)
    tokenize = importlib.import_module("forge_data.store.tokenize")
    work, sizes = tokenize._tokenize_task, list[int]()

    def counted(task, **settings):
        if len(sizes) == 4:
            raise KeyboardInterrupt
        done = work(task, **settings)
        sizes.append(len(done.tokens))
        return done

    monkeypatch.setattr(tokenize, "_tokenize_task", counted)
    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path / "in", tmp_path / "s", restart=True)
    assert 0 < max(sizes) < 500
    rest: list[int] = []
    monkeypatch.setattr(tokenize, "_tokenize_task", lambda task, **s: rest.append(1) or work(task, **s))
    assert _bytes(_run(tmp_path / "in", tmp_path / "s", restart=True).folder) == whole
    assert 0 < len(rest) < 300


def test_store_is_locked_until_it_is_in_its_place(corpus: Path, tmp_path: Path, monkeypatch) -> None:
    """A second process comes between the last write of the first and its rename."""
    restart = importlib.import_module("forge_data.store.restart")
    publish, said = restart.Writer._publish, list[str]()

    def with_another(writer) -> None:
        with pytest.raises(DataError) as refused:
            _run(corpus, tmp_path / "s", restart=True)
        said.append(str(refused.value))
        publish(writer)

    monkeypatch.setattr(restart.Writer, "_publish", with_another)
    store = _run(corpus, tmp_path / "s", restart=True)
    store.verify()
    assert said and "another process writes" in said[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "s"]


UNGUARDED = """
import sys
from pathlib import Path
from forge_data.config import DataConfig
from forge_data.loading.loader import build_loader
from forge_data.sources.config import FilesConfig
print("runs")
sources = [FilesConfig(paths=[sys.argv[1]])]
config = DataConfig(max_tokens=8, sources=sources, tokenize_workers=2, cache_dir=sys.argv[2])
print(len(build_loader(config, "train", micro_batch=1, global_batch=1).packings[0]) > 0)
"""


@pytest.mark.slow
def test_script_without_a_main_guard_is_not_run_by_its_processes(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED)
    command = [sys.executable, tmp_path / "script.py", corpus, tmp_path / "cache"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "runs\nTrue\n"), ended.stderr
