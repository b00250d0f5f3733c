"""Streams of the hub, against one of this machine: what they read is what the same files read as files."""

import gzip
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.loading.loader import build_loader
from forge_data.sources import documents
from forge_data.sources.hf import HfConfig
from local_hub import LocalHub

T, BATCH = 16, 8


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """Empty; `datasets` and its client talk to it, and cache below `tmp_path`."""
    pytest.importorskip("pyarrow")
    datasets, client = pytest.importorskip("datasets"), pytest.importorskip("huggingface_hub")
    served, cache = LocalHub(), tmp_path / "hf"
    endpoint = client.constants.ENDPOINT
    template = client.constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(endpoint, served.endpoint)
    monkeypatch.setattr(client.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(client.constants, "ENDPOINT", served.endpoint)
    monkeypatch.setattr(client.constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", served.endpoint)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")
    monkeypatch.setenv("HF_HOME", str(cache))
    monkeypatch.setattr("forge_data.sources.remote.FIRST_WAIT_S", 0.01)
    documents._footer.cache_clear()
    yield served
    served.close()


ROWS = [{"text": f"{n} " + "x" * (n * 7919 % 60), "n": n} for n in range(160)]


def _files(folder: Path, kind: str, split: str = "train", rows: list[dict] = ROWS) -> Path:
    """Four files of rows, in a folder named after the split."""
    made = folder / split
    made.mkdir(parents=True)
    for number in range(4):
        part = rows[number::4]
        lines = "".join(json.dumps(row) + "\n" for row in part)
        if kind == "parquet":
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(
                pyarrow.Table.from_pylist(part), made / f"{number}.parquet", row_group_size=10
            )
        elif kind.endswith(".gz"):
            (made / f"{number}.{kind}").write_bytes(gzip.compress(lines.encode()))
        else:
            (made / f"{number}.{kind}").write_text(lines)
    return made


def _config(tmp_path: Path, **source: object) -> DataConfig:
    streamed = msgspec.convert({"streaming": True, "lanes": 4} | source, HfConfig, strict=True)
    return DataConfig(max_tokens=T, sources=[streamed], cache_dir=str(tmp_path / "cache"))


def _steps(config: DataConfig, steps: int, world: int = 1, done: int = 0, state: dict | None = None):
    """The global batches [steps][BATCH][T] and what a checkpoint would hold behind them."""
    given: list[list[list[int]]] = [[] for _ in range(steps)]
    kept: dict = {}
    for rank in range(world):
        place = {"rank": rank, "world_size": world, "first_sample": done * BATCH, "state": state}
        loader = build_loader(config, "train", micro_batch=1, global_batch=BATCH, **place)  # type: ignore[arg-type]
        for step, batch in enumerate(itertools.islice(loader, steps)):
            given[step] += [micro.inputs["tokens"][0].tolist() for micro in batch]
        kept |= loader.state()
        loader.close()
    return given, json.loads(json.dumps(kept))


@pytest.mark.parametrize(
    "kind", ["parquet", "jsonl", *(pytest.param(k, marks=pytest.mark.slow) for k in ("json", "json.gz"))]
)
def test_stream_of_the_hub_reads_what_its_files_read(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("forge_data.sources.documents.TASK_BYTES", 700)
    monkeypatch.setattr("forge_data.sources.remote.BLOCK_BYTES", 1000)
    commit = hub.commit("some/set", _files(tmp_path / "hub", kind).parent)
    local = _files(tmp_path / "local", kind.replace("json", "jsonl") if "json." in f"{kind}." else kind)
    expected, _ = _steps(_config(tmp_path, path=str(local)), 40)
    found, state = _steps(_config(tmp_path, path="some/set"), 17, 2)
    more, _ = _steps(_config(tmp_path, path="some/set"), 23, 4, 17, state)
    assert found + more == expected
    assert state["data.0.version"] == commit
    if kind.startswith("json") and "gz" not in kind:
        whole = {f"train/{file.name}": file.stat().st_size for file in (tmp_path / "hub" / "train").iterdir()}
        assert all(stop - start < whole[name] for name, start, stop in hub.ranges)


@pytest.mark.slow
def test_only_the_row_groups_and_columns_that_are_read_are_asked_for(hub: LocalHub, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw = random.Random(0)
    rows = [{"text": str(n), "other": draw.randbytes(50_000).hex()} for n in range(10)]
    (tmp_path / "hub").mkdir()
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "hub" / "train.parquet", row_group_size=1, compression="none")
    hub.commit("some/set", tmp_path / "hub")
    _steps(_config(tmp_path, path="some/set", lanes=1), 2)
    footer, *others = [stop - start for _, start, stop in hub.ranges]
    assert footer == 1 << 16 and len(others) > 20 and max(others) < 200


def test_broken_connections_lose_nothing(hub: LocalHub, tmp_path: Path) -> None:
    hub.commit("some/set", _files(tmp_path / "hub", "parquet").parent)
    expected, _ = _steps(_config(tmp_path, path="some/set"), 30)
    draw, broken = random.Random(0), []
    hub.drop = lambda *place: draw.random() < 0.6 and not broken.append(place)
    assert _steps(_config(tmp_path, path="some/set"), 30)[0] == expected
    assert len(broken) > 5


def test_hub_that_stays_away_is_an_error_after_a_while(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slept = [1.0]
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr("forge_data.sources.remote.time", clock)
    monkeypatch.setattr("forge_data.sources.remote.PATIENCE_S", 0.3)
    hub.commit("some/set", _files(tmp_path / "hub", "parquet").parent)
    _steps(_config(tmp_path, path="some/set"), 1)
    hub.drop = lambda *_: True
    with pytest.raises(
        DataError, match=r"hf://datasets/some/set@\w+/train/\d.parquet could not be read for 0.3"
    ):
        _steps(_config(tmp_path, path="some/set"), 1)
    assert capsys.readouterr().err.count("tried again in") == len(slept) - 1 > 2


def test_file_that_the_hub_no_longer_has_is_an_error_at_once(hub: LocalHub, tmp_path: Path) -> None:
    commit = hub.commit("some/set", _files(tmp_path / "hub", "parquet").parent)
    _steps(_config(tmp_path, path="some/set"), 1)
    hub.commits["some/set"][commit].clear()
    with pytest.raises(DataError, match=r"train/\d.parquet cannot be read.*404"):
        _steps(_config(tmp_path, path="some/set"), 1)


def test_run_goes_on_with_the_commit_that_it_began_with(hub: LocalHub, tmp_path: Path) -> None:
    config = _config(tmp_path, path="some/set")
    old = hub.commit("some/set", _files(tmp_path / "old", "parquet").parent)
    whole, _ = _steps(config, 20)
    first, state = _steps(config, 9)
    hub.commit("some/set", _files(tmp_path / "new", "parquet", rows=ROWS[:40]).parent)
    rest, _ = _steps(config, 11, 1, 9, state)
    assert first + rest == whole != _steps(config, 20)[0]
    assert _steps(_config(tmp_path, path="some/set", revision=old), 20)[0] == whole


def test_parts_are_found_out_once_a_machine(hub: LocalHub, tmp_path: Path) -> None:
    hub.commit("some/set", _files(tmp_path / "hub", "parquet").parent)
    settings = {"micro_batch": 1, "global_batch": BATCH}
    first = build_loader(_config(tmp_path, path="some/set"), "train", **settings)
    asked = len(hub.ranges)
    again = build_loader(_config(tmp_path, path="some/set"), "train", **settings)
    assert asked and len(hub.ranges) == asked and first.fingerprint == again.fingerprint
    (kept,) = (tmp_path / "cache" / "hub").glob("*.json")
    kept.write_text(kept.read_text()[:-5])
    assert (
        build_loader(_config(tmp_path, path="some/set"), "train", **settings).fingerprint == first.fingerprint
    )


CARD = """---
configs:
- config_name: en
  data_files: [{split: train, path: en/*.parquet}]
- config_name: fr
  data_files: [{split: train, path: fr/*.parquet}, {split: dev, path: dev/*.parquet}]
---
"""


def test_subset_and_split_are_those_of_the_card_and_validation_is_a_split(
    hub: LocalHub, tmp_path: Path
) -> None:
    for name, rows in (("en", ROWS[:40]), ("fr", ROWS[40:120]), ("dev", ROWS[120:])):
        _files(tmp_path / "hub", "parquet", name, rows)
    (tmp_path / "hub" / "README.md").write_text(CARD)
    hub.commit("some/set", tmp_path / "hub")
    config = _config(tmp_path, path="some/set", subset="fr", validation="dev")
    found, _ = _steps(config, 20)
    assert found == _steps(_config(tmp_path, path=str(tmp_path / "hub" / "fr")), 20)[0]
    held = build_loader(config, "validation", micro_batch=1)
    text = bytes(t % 256 for (micro,) in held for t in micro.inputs["tokens"][0].tolist())
    assert b"\x00123 xxx" in text and b"\x0041 " not in text
    with pytest.raises(DataError, match=r"has no such split; its splits are train, dev"):
        _steps(_config(tmp_path, path="some/set", subset="fr", split="test"), 1)
    with pytest.raises(DataError, match=r"subset de.*(?s:.*)en.*fr"):
        _steps(_config(tmp_path, path="some/set", subset="de"), 1)


def test_what_cannot_be_streamed_from_the_hub_is_named(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hub" / "data").mkdir(parents=True)
    (tmp_path / "hub" / "data" / "train.csv").write_text("text\nhello\n")
    hub.commit("some/tables", tmp_path / "hub")
    (tmp_path / "hf" / "datasets" / "allenai___c4").mkdir(parents=True)
    with pytest.raises(DataError, match=r"data/train.csv, which cannot be streamed.*\.parquet.*streaming"):
        _steps(_config(tmp_path, path="some/tables"), 1)
    with pytest.raises(DataError, match=r"none/such.*cannot be had.*in the cache .* are allenai/c4"):
        _steps(_config(tmp_path, path="none/such"), 1)
    with pytest.raises(DataError, match=r"some/tables.*cannot be had.*v7"):
        _steps(_config(tmp_path, path="some/tables", revision="v7"), 1)
    with pytest.raises(DataError, match=r"files of this machine, given subset = 'en'"):
        _steps(_config(tmp_path, path=str(tmp_path / "hub"), subset="en"), 1)
    hub.close()
    with pytest.raises(
        DataError, match=r"some/tables.*cannot be had.*(Connect|Protocol)Error.*are allenai/c4"
    ):
        _steps(_config(tmp_path, path="some/tables"), 1)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"some/tables.*cannot be had.*[Oo]ffline.*are allenai/c4"):
        _steps(_config(tmp_path, path="some/tables"), 1)
