"""The commands of README.md run, shortened; the Python of the package READMEs runs as it stands."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READMES = sorted(set(ROOT.glob("packages/*/README.md")) - {ROOT / "packages/forge-parallel/README.md"})
"""But for the one that forge-parallel runs in its own tests."""
SHORT = ["--train.steps=22", "--train.global_batch=4", "--train.micro_batch=2", "--data.validation_samples=2"]


def commands() -> list[list[str]]:
    """What README.md tells people to type, in order, for this interpreter."""
    here = Path(sys.executable).parent
    programs = {
        "forge": [sys.executable, "-m", "forge_trainer"],
        "forge-config": [str(here / "forge-config")],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
    }
    found = []
    for line in re.findall(r"^\$ uv run (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE):
        program, *arguments = shlex.split(line)
        if program != "pytest":
            found.append([*programs[program], *arguments, *(SHORT if "train" in arguments else [])])
    return found


@pytest.mark.slow
def test_readme_commands_run_in_order(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")  # as a newcomer types them
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    typed = commands()
    assert len(typed) >= 7
    for command in typed:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "exported" / "debug" / "model.safetensors").exists()


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_package_readme_python_runs(path, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    assert blocks
    program = tmp_path / "readme.py"
    program.write_text("\n".join(blocks))
    for name, block in re.findall(r"```toml\n# (\S+\.toml)\n(.*?)```", path.read_text(), re.DOTALL):
        (tmp_path / name).write_text(block)
    done = subprocess.run([sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_test_command_of_the_readme_is_the_one_ci_runs_and_ci_sets_no_variable():
    typed, run = "uv run pytest -n 2", (ROOT / ".ci" / "run").read_text().splitlines()
    assert f"$ {typed}" in (ROOT / "README.md").read_text().splitlines()
    assert typed in run
    assert not [line for line in run if re.match(r"\s*(export\s|[A-Z_]+=)", line)]
