"""Skills for assistants have a header, a preflight and a check, and their commands are the real ones."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import forge_ckpt.cli
import forge_config.cli
import forge_data.cli
import forge_trainer.cli
import pytest

ROOT = Path(__file__).parents[2]
SKILLS = sorted(path.parent.name for path in ROOT.glob("skills/*/SKILL.md"))
NAMES = {
    "add-optimizer", "add-router", "cluster-config", "component-gaps", "diagnose-run", "explain-architecture",
    "migrate", "new-config", "slurm-launch", "smoke-test",
}  # fmt: skip
MAINS = {
    "forge": forge_trainer.cli.main,
    "forge-config": forge_config.cli.main,
    "forge-data": forge_data.cli.main,
    "forge-ckpt": forge_ckpt.cli.main,
}
DONE: set[str] = set()
"""Command lines that have run: skills share their preflight."""
LONG = ("pytest", "forge train", "forge eval", "forge generate", "forge status", "lint-imports")
"""Commands that `--slow` runs, as training takes seconds to minutes; but tests do not start tests."""


def page(name):
    return (ROOT / "skills" / name / "SKILL.md").read_text()


def commands(text, kind):
    """The command lines of all blocks of a kind."""
    blocks = re.findall(rf"^ *```{kind}\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_skills_are_those_that_are_promised():
    assert set(SKILLS) == NAMES
    listed = json.loads((ROOT / ".claude-plugin" / "marketplace.json").read_text())
    assert [plugin["source"] for plugin in listed["plugins"]] == ["./"]
    assert json.loads((ROOT / ".claude-plugin" / "plugin.json").read_text())["name"] == "forge"


@pytest.mark.parametrize("name", SKILLS)
def test_skill_has_a_header_a_preflight_and_a_check(name):
    text = page(name)
    header = dict(re.findall(r"^(\w+): (.+)$", text.split("---")[1], re.MULTILINE))
    assert header["name"] == name and 40 < len(header["description"]) < 400
    first = commands(text, "bash")[0]
    assert first.startswith("uv run forge doctor runs --for ") and first.endswith("--json")
    assert re.search(r"\*\*Check\.\*\*.*```(bash|text)", text, re.DOTALL)


@cache
def help_of(program, command):
    """What a command says of itself; empty if it does not exist."""
    try:
        with redirect_stdout(StringIO()) as said, redirect_stderr(StringIO()):
            MAINS[program]([command, "--help"])
    except SystemExit as end:
        return said.getvalue() if end.code == 0 else ""
    return said.getvalue()


@pytest.mark.parametrize("name", SKILLS)
def test_commands_of_a_skill_are_parsed_by_what_they_call(name):
    for line in commands(page(name), "bash") + commands(page(name), "text"):
        words = shlex.split(line.partition(";")[0])
        if words[:2] != ["uv", "run"] or words[2] not in MAINS:
            continue
        known = help_of(*words[2:4])
        assert known, f"{line}: {words[2]} has no command {words[3]}"
        for flag in (word.partition("=")[0] for word in words[4:] if word.startswith("--")):
            assert "." in flag or flag == "--imports" or flag in known, f"{line}: {flag} is no flag of it"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A folder with what commands look at."""
    folder = tmp_path_factory.mktemp("skills")
    shutil.copytree(ROOT / "configs", folder / "configs")
    for name in ("packages", "apps", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    for block in re.findall(r"```toml\n(.*?)```", page("new-config"), re.DOTALL):
        (folder / "my_run.toml").write_text(re.sub(r"^   ", "", block, flags=re.MULTILINE))
    return folder


@pytest.mark.parametrize("name", SKILLS)
def test_harmless_commands_of_a_skill_run(copy, name, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    for line in commands(page(name), "bash"):
        if any(long in line for long in LONG) or line in DONE:
            continue
        words = shlex.split(line)
        if words[:2] != ["uv", "run"]:
            subprocess.run(words, check=True, capture_output=True)
        elif words[-1] == "--help":
            assert help_of(*words[2:4]), line
        else:
            assert MAINS[words[2]](words[3:]) == 0, f"{line}\n{capsys.readouterr()}"
        DONE.add(line)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["add-router", "smoke-test"])
def test_long_commands_of_a_skill_run_in_order(name, tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    lines = [line for line in commands(page(name), "bash") if any(long in line for long in LONG)]
    ours = [shlex.split(line) for line in lines if line.startswith("uv run forge ")]
    assert ours
    for words in ours:
        command = [sys.executable, "-m", "forge_trainer", *words[3:]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"


def test_only_skills_whose_long_commands_run_have_some():
    train = {name for name in SKILLS for line in commands(page(name), "bash") if "forge train" in line}
    assert train == {"add-router", "smoke-test"}
