"""What docs/slurm.md tells to type runs in order and says what the page shows; SLURM is a script."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from forge_trainer.cli import main

ROOT = Path(__file__).parents[2]


def typed(page: str) -> list[tuple[list[str], str]]:
    """Each command of a page, and what it shows below."""
    blocks = re.findall(
        r"^```console\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL
    )
    parts = [
        part.split("\n", 1) for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    ]
    return [(shlex.split(command), shown) for command, shown in parts]


def pattern(shown: str) -> str:
    """Matches what a page shows; a line of `...` stands for any lines, `...` in a line for any words."""
    lines = [r"(?:.*\n)*?" if line == "..." else _line(line) for line in shown.splitlines()]
    return "".join(lines)


def _line(line: str) -> str:
    return ".*".join(re.escape(part) for part in line.split("...")) + r"\n"


@pytest.mark.timeout(300)
def test_commands_of_the_slurm_page_do_what_it_shows(tmp_path, monkeypatch, capsys):
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text('#!/bin/sh\n[ "$1" = --parsable ] && bash -n "$2" && echo 4711\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    commands = typed("slurm.md")
    assert [words[0] for words, _ in commands] == ["uv", "cp", "uv", "uv"]
    for words, shown in commands:
        if words[:3] == ["uv", "run", "forge"]:
            assert main(words[3:]) == 0
        else:
            subprocess.run(words, check=True)
        said = capsys.readouterr().out
        assert re.search(pattern(shown), said), f"{shlex.join(words)}\nshows\n{shown}\nbut says\n{said}"
    assert (tmp_path / "runs" / "slurm" / "debug.sh").is_file()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [pytest.param("study.md", marks=pytest.mark.slow), "mup.md"])
def test_commands_of_the_study_pages_do_what_they_show(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    text = (ROOT / "docs" / page).read_text()
    for name, study in re.findall(r"^```toml\n# (\w+\.toml)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(study)
    for words, shown in typed(page):
        assert words[:3] == ["uv", "run", "forge"]
        assert main(words[3:]) == 0
        said = capsys.readouterr().out
        assert re.search(pattern(shown), said), f"{shlex.join(words)}\nshows\n{shown}\nbut says\n{said}"


@pytest.mark.parametrize(
    ("said", "fits"),
    [("a 1 b\nx\ny\nend\n", True), ("a 1 b\nend\n", True), ("a 1 c\nend\n", False), ("end\na 1 b\n", False)],
)
def test_page_that_shows_something_else_is_found(said, fits):
    assert bool(re.search(pattern("a ... b\n...\nend\n"), said)) is fits
