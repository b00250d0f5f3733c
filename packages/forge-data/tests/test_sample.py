"""What `forge-data sample` and `inspect` show, against the loader."""

import itertools
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from forge_data.cli import main
from forge_data.config import DataConfig
from forge_data.loading.loader import build_loader
from forge_data.loading.sample import marked
from forge_data.order.skips import SkipConfig
from forge_data.sources.hf import HfConfig
from forge_data.tokenizer.tokenizer import Bytes

RUN = """
[data]
max_tokens = 16
cache_dir = "{folder}/cache"
[[data.sources]]
type = "hf"
held_out = 0.0
path = "{folder}/rows.jsonl"
{more}
[train]
steps = {steps}
global_batch = 4
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    lines = [
        json.dumps({"text": f"text number {n} of many", "q": f"what is {n}?", "a": f"it is {n}"})
        for n in range(400)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return tmp_path


def _job(folder: Path, more: str = "", train: str = "", steps: int = 40) -> Path:
    path = folder / "run" / "config.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(RUN.format(folder=folder, more=more, steps=steps) + train)
    return path.parent


def _config(folder: Path, skip: list[SkipConfig] | None = None, **source: object) -> DataConfig:
    one = msgspec.convert({"path": f"{folder}/rows.jsonl", "held_out": 0.0} | source, HfConfig, strict=True)
    return DataConfig(max_tokens=16, sources=[one], cache_dir=f"{folder}/cache", skip=skip or [])


def _texts(config: DataConfig, first: int, stop: int, unit: int = 4) -> list[str]:
    """What the loader gives in some items, with special tokens."""
    loader = build_loader(config, "train", micro_batch=unit, global_batch=unit, steps=200)
    items = itertools.islice(loader, first, stop)
    tokens = [row for item in items for micro in item for row in micro.inputs["tokens"].numpy()]
    return [Bytes().spell(row.tolist()) for row in tokens]


def _shown(folder: Path, step: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    assert main(["sample", str(folder), "--step", str(step)]) == 0, capsys.readouterr().err
    heads_and_texts = capsys.readouterr().out.split("\n-- ")
    return [one.partition("\n")[2].removesuffix("\n") for one in heads_and_texts]


def test_sample_replays_rollbacks(rows: Path, capsys) -> None:
    run = _job(rows)
    rollback = {"kind": "rollback", "to": 6, "first": 9, "end": 11, "why": "x", "skip": True, "margin": 1}
    kept = rollback | {"first": 20, "end": 22, "to": 18, "skip": False}
    lines = [{"kind": "other"}, rollback, kept]
    (run / "incidents.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tor')
    config = _config(rows, [SkipConfig(start_step=8, end_step=12)])
    for step in (7, 8, 12, 30):
        assert _shown(run, step, capsys) == _texts(config, step, step + 1)
    assert _shown(run, 8, capsys) == _texts(_config(rows), 12, 13)


def test_sample_shows_streams(rows: Path, capsys) -> None:
    run = _job(rows, "streaming = true")
    assert _shown(run, 5, capsys) == _texts(_config(rows, streaming=True), 5, 6)


def test_sample_shows_steps_while_the_batch_grows(rows: Path, capsys) -> None:
    run = _job(rows, train="batch_warmup = [{ global_batch = 2, steps = 3 }]")
    for step, (first, stop) in {0: (0, 1), 2: (2, 3), 3: (3, 5), 4: (5, 7)}.items():
        assert _shown(run, step, capsys) == _texts(_config(rows), first, stop, unit=2)


def test_sample_and_inspect_show_targets_and_special_tokens(rows: Path, capsys) -> None:
    shown = "".join(_shown(_job(rows, 'prompt = "q"\ncompletion = "a"'), 0, capsys))
    assert "\u27eait is" in shown and "<|endoftext|>\u27eb" in shown
    store = next(path for path in (rows / "cache" / "tokens").iterdir() if path.is_dir())
    assert main(["inspect", str(store), "--docs", "1"]) == 0
    out = capsys.readouterr().out
    assert "what is 0?\u27eait is 0<|endoftext|>\u27eb" in out and "8 of the 18 shown are targets" in out


def test_marks_stand_where_targets_begin_and_end() -> None:
    tokens, targets = np.frombuffer(b"abcdef", np.uint8), np.asarray([0, 1, 1, 0, 0, 1], bool)
    assert marked(Bytes(), tokens, targets) == "a\u27eabc\u27ebde\u27eaf\u27eb"
    assert marked(Bytes(), tokens) == "abcdef"
