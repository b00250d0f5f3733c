"""The commands of docs/data.md."""

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from forge_data.cli import main
from forge_data.config import DataConfig
from forge_data.loading.loader import build_loader

PAGE = Path(__file__).parents[3] / "docs" / "data.md"


def test_commands_from_raw_text_to_a_mixture_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus" / "books").mkdir(parents=True)
    (tmp_path / "corpus" / "web").mkdir()
    for number in range(5):
        (tmp_path / "corpus" / "books" / f"{number}.txt").write_text(f"chapter {number} of a book. " * 40)
    rows = [{"content": f"page {number} of the web"} for number in range(200)]
    (tmp_path / "corpus" / "web" / "pages.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = PAGE.read_text()
    (config,) = re.findall(r"```toml\n(# mixture.toml.*?)```", text, re.S)
    (tmp_path / "mixture.toml").write_text(config)
    (commands,) = re.findall(r"```console\n(.*?)```", text, re.S)
    for line in commands.splitlines():
        command = line.removeprefix("$ uv run forge-data ").replace("--workers 2", "--workers 1")
        assert main(shlex.split(command)) == 0, line
    out = capsys.readouterr().out
    assert "phase 1 from step 50" in out and "padding" in out and "-- step 3, sequence 0 of 8" in out


def test_source_of_your_own_gives_rows_to_each_micro_batch() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    made: dict[str, Any] = {"__name__": "my_points"}
    exec(compile(code, str(PAGE), "exec"), made)
    config = DataConfig(max_tokens=4, sources=[made["PointsConfig"]()])
    for (micro,) in itertools.islice(build_loader(config, "train", micro_batch=8, global_batch=8), 200):
        tokens, points = micro.inputs["tokens"][:, 0], micro.inputs["points"]
        assert (points[:, 0] % 256).tolist() == [t for t in tokens.tolist() for _ in range(t % 4)]
        assert (points[:, 0] == -points[:, 1]).all()
