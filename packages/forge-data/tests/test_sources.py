import fcntl
import importlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.loading.loader import build_loader
from forge_data.sources.config import FilesConfig, PythonStdlibConfig, TokensConfig
from forge_data.sources.files import find_files
from forge_data.store import tokenize
from forge_data.store.tokenize import Making
from forge_data.store.tokens import TokenStore
from forge_data.tokenizer.tokenizer import BytesConfig


def _text(store: TokenStore) -> str:
    return BytesConfig().build().decode(store.read(np.asarray([0]), len(store))[0].tolist())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / ".git").mkdir(parents=True)
    (root / ".git" / "config").write_text("hidden")
    for n in range(100):
        (root / f"{n:02}.txt").write_text(f"<{n}>")
    return root


def test_files_are_split_and_cached(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FilesConfig(paths=[str(folder)], held_out=0.2)
    train, held = (source.open(split, BytesConfig(), tmp_path) for split in ("train", "validation"))
    both = _text(train) + _text(held)
    assert sorted(both.split(">")) == sorted("".join(f"<{n}>" for n in range(100)).split(">"))
    assert train.manifest.num_docs * 0.25 > 5 and held.manifest.num_docs > 5
    monkeypatch.setattr("forge_data.sources.config.tokenize_files", None)
    assert source.open("train", BytesConfig(), tmp_path).manifest == train.manifest


def test_files_are_tokenized_anew_when_they_change(folder: Path, tmp_path: Path) -> None:
    source = FilesConfig(paths=[str(folder / "*.txt")], held_out=0)
    source.open("train", BytesConfig(), tmp_path)
    (folder / "00.txt").write_text("changed")
    assert _text(source.open("train", BytesConfig(), tmp_path)).startswith("changed")


def test_files_are_tokenized_anew_under_other_names_or_for_another_tokenizer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FilesConfig(paths=[str(folder / "*.txt")], held_out=0.2)
    before = _text(source.open("validation", BytesConfig(), tmp_path))
    for path in list(folder.glob("*.txt")):
        path.rename(path.with_stem(f"{path.stem}x"))  # names decide what is held out
    after = _text(source.open("validation", BytesConfig(), tmp_path))
    assert after == _text(source.open("validation", BytesConfig(), tmp_path / "fresh")) != before
    monkeypatch.setattr(type(BytesConfig().build()), "digest", "another")
    assert source.open("validation", BytesConfig(), tmp_path).manifest.tokenizer == "another"


def test_files_read_the_field_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "body": "two"}\n')
    found = [
        _text(
            FilesConfig(paths=[str(tmp_path / "a.jsonl")], held_out=0, field=f).open(
                "train", BytesConfig(), tmp_path
            )
        )
        for f in ("text", "body")
    ]
    assert found == ["one", "two"]


def test_files_may_have_validation_text_of_their_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("held")
    source = FilesConfig(paths=[str(folder)], validation=[str(tmp_path / "held.txt")])
    assert source.open("train", BytesConfig(), tmp_path).manifest.num_docs == 100
    assert _text(source.open("validation", BytesConfig(), tmp_path)) == "held"


def test_files_say_when_no_document_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("one")
    for held_out in (0, 1e-9):
        source = FilesConfig(paths=[str(tmp_path / "one.txt")], held_out=held_out)
        with pytest.raises(DataError, match="held_out"):
            source.open("validation", BytesConfig(), tmp_path)


def test_find_files_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        find_files([str(tmp_path / "nowhere" / "*.txt")])


@pytest.mark.parametrize("by", ["folder", "pattern", "name"])
@pytest.mark.parametrize("kind", ["link to nowhere", "link in a circle", "pipe"])
def test_find_files_refuses_what_is_no_file(tmp_path: Path, kind: str, by: str) -> None:
    (tmp_path / "good.txt").write_text("x")
    wrong = tmp_path / "wrong.txt"
    if kind == "pipe":
        os.mkfifo(wrong)
    else:
        wrong.symlink_to("wrong.txt" if kind == "link in a circle" else "nowhere")
    path = {"folder": tmp_path, "pattern": tmp_path / "*.txt", "name": wrong}[by]
    with pytest.raises(DataError, match=r"is no file that can be read \(a link that leads nowhere"):
        find_files([str(path)])


def test_names_may_hold_anything_but_a_slash(tmp_path: Path) -> None:
    """Bytes that are no UTF-8, a line break, what patterns are made of."""
    (tmp_path / "text").mkdir()
    for name in (b"\xff\xfe.txt", b"new\nline 'q'.txt", b"#*?[].txt", b" .txt"):
        Path(os.fsdecode(bytes(tmp_path) + b"/text/" + name)).write_text("some text")
    source = FilesConfig(paths=[str(tmp_path / "text")], held_out=0.5)
    stores = [source.open(split, BytesConfig(), tmp_path / "ca ch\ne") for split in ("train", "validation")]
    assert sum(store.manifest.num_docs for store in stores) == 4


def test_find_files_reads_each_file_once_where_links_lead_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.txt").write_text("x")
    (tmp_path / "a" / "link.txt").symlink_to("one.txt")
    (tmp_path / "a" / "up").symlink_to("..")
    for path in (tmp_path, tmp_path / "**", tmp_path / "**" / "*.txt"):
        assert find_files([str(path)]) == [tmp_path / "a" / "one.txt"]


def test_find_files_takes_the_folders_before_a_pattern_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A working directory with brackets becomes part of every relative pattern."""
    deep = tmp_path / "a[b]*" / "deep"
    deep.mkdir(parents=True)
    for name in ("one.txt", "two.txt", "c.py"):
        (deep / name).write_text("x")
    expected = [deep / "one.txt", deep / "two.txt"]
    for pattern in ("*.txt", "**/*.txt", "*/*.txt", "d[e]ep/[ot]*.txt"):
        here = deep if pattern == "*.txt" else deep.parent
        monkeypatch.chdir(here)
        assert find_files([pattern]) == find_files([f"{here}/{pattern}"]) == expected


def test_python_stdlib_holds_source_text_without_tests(tmp_path: Path) -> None:
    root, files = PythonStdlibConfig().root_and_files("train")
    names = [str(f.relative_to(root)) for f in files]
    assert files == sorted(files)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not any("site-packages" in name or "/test/" in name or name.startswith("test/") for name in names)
    store = PythonStdlibConfig(held_out=0.01).open("validation", BytesConfig(), tmp_path)
    assert "import " in _text(store)


def test_source_is_built_once_when_several_processes_ask(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from forge_data.sources.config import FilesConfig\n"
        "from forge_data.tokenizer.tokenizer import BytesConfig\n"
        f"s = FilesConfig(paths=[{str(folder)!r}]).open('train', BytesConfig(), Path({str(tmp_path)!r}))\n"
        "s.verify(); assert 'torch' not in sys.modules; print(s.manifest.digest)"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(3)]
    digests = {run.communicate(timeout=60)[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert len(digests) == 1
    assert sum(f.is_dir() for f in (tmp_path / "tokens").iterdir()) == 1


def test_run_tokenizes_its_sources_with_as_many_processes_as_it_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, told = [], []
    inner = tokenize.in_order
    monkeypatch.setattr(
        tokenize, "in_order", lambda work, tasks, workers: asked.append(workers) or inner(work, tasks, 1)
    )
    files = FilesConfig(paths=[str(folder)], held_out=0.2)
    config = DataConfig(max_tokens=8, sources=[files], tokenize_workers=5, cache_dir=str(tmp_path))
    settings = {"micro_batch": 1, "global_batch": 1}
    build_loader(config, "train", **settings, on_progress=lambda done, total: told.append((done, total)))
    assert asked == [5, 5]  # training and validation
    assert len(told) == 200 and told[-1][0] == told[-1][1]


def test_source_waits_for_the_process_that_builds_it(folder: Path, tmp_path: Path) -> None:
    """The other holds the lock: nothing is built before it lets go, and then what it built is used."""
    source = FilesConfig(paths=[str(folder)])
    built = source.open("train", BytesConfig(), tmp_path / "other").folder
    lock = tmp_path / "cache" / "tokens" / f"{built.name}.lock"
    lock.parent.mkdir(parents=True)
    with ThreadPoolExecutor(1) as pool, lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = pool.submit(source.open, "train", BytesConfig(), tmp_path / "cache")
        with pytest.raises(TimeoutError):
            found.result(timeout=0.5)
        assert [f.name for f in lock.parent.iterdir()] == [lock.name]
        shutil.copytree(built, lock.parent / built.name)
        inode = (lock.parent / built.name / "tokens.bin").stat().st_ino
        fcntl.flock(held, fcntl.LOCK_UN)
        opened = found.result(timeout=60).folder
    assert (opened / "tokens.bin").stat().st_ino == inode


def test_tokens_refuses_a_store_of_another_tokenizer(make_store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_store("s", [10])
    assert len(TokensConfig(path=str(path)).open("train", BytesConfig(), path)) == 10
    monkeypatch.setattr("forge_data.tokenizer.tokenizer.Bytes.digest", "other")
    with pytest.raises(DataError, match="bytes-256"):
        TokensConfig(path=str(path)).open("train", BytesConfig(), path)


def test_tokens_needs_a_validation_store_to_validate(make_store) -> None:
    path = make_store("s", [10])
    with pytest.raises(DataError, match="validation"):
        TokensConfig(path=str(path)).open("validation", BytesConfig(), path)


def test_cache_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cache_dir"):
        FilesConfig(paths=[str(folder)]).open("train", BytesConfig(), tmp_path / "file")


def test_cache_is_known_by_content_not_by_size_and_time(folder: Path, tmp_path: Path) -> None:
    source, path = FilesConfig(paths=[str(folder / "*.txt")], held_out=0), folder / "00.txt"
    first = source.open("train", BytesConfig(), tmp_path)
    before = path.stat()
    path.write_text("<X>" if before.st_size == 3 else "x" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert source.open("train", BytesConfig(), tmp_path).manifest.digest != first.manifest.digest
    os.utime(folder / "01.txt")
    names = {f.name for f in (tmp_path / "tokens").iterdir() if f.is_dir()}
    source.open("train", BytesConfig(), tmp_path)
    assert {f.name for f in (tmp_path / "tokens").iterdir() if f.is_dir()} == names


@pytest.mark.parametrize("change", ["grows", "shrinks", "is replaced", "goes"])
@pytest.mark.parametrize("when", ["named", "read"])
def test_text_that_changes_while_it_is_tokenized_is_not_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, when: str
) -> None:
    """Its name in the cache would be that of other text."""
    path, source = folder / "00.txt", FilesConfig(paths=[str(folder / "*.txt")], held_out=0)

    def touch(*_: object) -> None:
        content = path.read_bytes() if path.exists() else b""
        if change == "goes":
            path.unlink(missing_ok=True)
        elif change == "is replaced":
            (folder / "other").write_bytes(content[::-1])
            (folder / "other").replace(path)
        else:
            path.write_bytes(content + b"more" if change == "grows" else content[:1])

    def named(*arguments: Any) -> int:
        name = original(*arguments)
        touch()
        return name

    original = importlib.import_module("forge_data.sources.config")._name
    if when == "named":
        monkeypatch.setattr("forge_data.sources.config._name", named)
    with pytest.raises(DataError, match=r"00.txt (has changed while|cannot be read)"):
        source.open("train", BytesConfig(), tmp_path, Making(1, touch if when == "read" else None))
    assert [file.suffix for file in (tmp_path / "tokens").iterdir()] == [".lock"]


def test_source_goes_on_where_a_killed_process_stopped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, work, done = FilesConfig(paths=[str(folder)], held_out=0.0), tokenize._tokenize_task, []
    whole = source.open("train", BytesConfig(), tmp_path / "other")

    def killed(task: tokenize.Task, **settings: object) -> object:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(task.name)
        return work(task, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr("forge_data.store.restart.COMMIT_S", 0.0)
    monkeypatch.setattr(tokenize, "_tokenize_task", killed)
    with pytest.raises(KeyboardInterrupt):
        source.open("train", BytesConfig(), tmp_path / "cache")
    first, done[:] = done[:], []
    monkeypatch.setattr(
        tokenize, "_tokenize_task", lambda task, **s: (done.append(task.name), work(task, **s))[1]
    )
    again = source.open("train", BytesConfig(), tmp_path / "cache")
    assert again.manifest == whole.manifest and len(first) == 2
    assert done and not set(first) & set(done)


def test_tokens_are_read_when_their_text_is_gone_and_a_line_says_so(tmp_path: Path, capsys) -> None:
    (tmp_path / "in").mkdir()
    for n in range(30):
        (tmp_path / "in" / f"{n}.txt").write_text(f"text {n}")
    source = FilesConfig(paths=[str(tmp_path / "in")], held_out=0.3)
    made = {split: source.open(split, BytesConfig(), tmp_path / "cache") for split in ("train", "validation")}
    shutil.rmtree(tmp_path / "in")
    for split, store in made.items():
        capsys.readouterr()
        assert source.open(split, BytesConfig(), tmp_path / "cache").folder == store.folder
        assert f"there are no files at {tmp_path}/in" in (said := capsys.readouterr().err)
        assert str(store.folder) in said
    other = FilesConfig(paths=[str(tmp_path / "in")], held_out=0.2)
    with pytest.raises(DataError, match="there are no files"):
        other.open("train", BytesConfig(), tmp_path / "cache")


def test_each_file_is_hashed_once_at_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    for n in range(30):
        (tmp_path / "in" / f"{n:02}.txt").write_text(f"text {n}")
    config = importlib.import_module("forge_data.sources.config")
    inner, read = config._content, list[Path]()
    monkeypatch.setattr(config, "_content", lambda path: read.append(path) or inner(path))
    source = FilesConfig(paths=[str(tmp_path / "in")], held_out=0.3)
    data = DataConfig(max_tokens=8, sources=[source], cache_dir=str(tmp_path / "cache"))
    build_loader(data, "train", micro_batch=1, global_batch=1)
    assert sorted(read) == sorted((tmp_path / "in").iterdir())
