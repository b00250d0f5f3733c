"""What importing brings: the import graph, public exports, no torch before the config is checked."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.name for path in ROOT.glob("packages/*/src/*") if path.is_dir())


def test_import_contracts_hold():
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(lint)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_types_are_checked_in_folders_that_exist():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    assert settings["include"] and all((ROOT / path).is_dir() for path in settings["include"])


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_can_be_had(package):
    module = importlib.import_module(package)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_job_is_loaded_without_torch():
    code = (
        "import sys\n"
        "from forge_trainer.config.job import load_job\n"
        "import forge_trainer.cli\n"
        "load_job('configs/runs/debug.toml')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
