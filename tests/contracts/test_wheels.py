"""What would be published: wheels with metadata, licence and types that work in empty environments.

`.ci/isolated.py` runs the tests of each package with only that package installed, from its sources; here
wheels are built, read and installed.
"""

import email
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = [*sorted(ROOT.glob("packages/*")), ROOT / "apps" / "trainer"]
pytestmark = pytest.mark.skipif(shutil.which("uv") is None, reason="uv builds the wheels")


def run(*command, **more):
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, **more)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    run("uv", "build", "--all-packages", "--quiet", "--out-dir", str(out), cwd=ROOT)
    return out


def wheel_of(wheels, folder):
    name = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"].replace("-", "_")
    return name, zipfile.ZipFile(next(wheels.glob(f"{name}-*.whl")))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_wheel_says_what_it_is(wheels, folder):
    name, wheel = wheel_of(wheels, folder)
    names = wheel.namelist()
    info = next(entry.split("/")[0] for entry in names if ".dist-info/" in entry)
    said = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert re.fullmatch(r"\d+\.\d+\.\d+", said["Version"]) and said["Requires-Python"] == ">=3.11"
    assert len(said["Summary"]) > 20 and said["License-Expression"] == "MIT" and said["Author"]
    assert "Typing :: Typed" in said.get_all("Classifier")
    assert said["Description-Content-Type"] == "text/markdown" and len(said.get_payload()) > 100
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    for needed in said.get_all("Requires-Dist", []):
        # an extra may name another one of the same package
        ours = needed.startswith("forge-") and not needed.startswith(said["Name"])
        assert not ours or re.search(r">=0\.1", needed), f"{needed} has no range"
    for entry in (f"{name}/py.typed", f"{info}/WHEEL"):
        assert entry in names


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_wheel_holds_every_file_of_the_package_and_no_test(wheels, folder):
    name, wheel = wheel_of(wheels, folder)
    source = folder / "src"
    there = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    held = {entry for entry in wheel.namelist() if entry.startswith(f"{name}/") and not entry.endswith("/")}
    assert held == there


ALONE = {
    "forge-config": "import forge_config, importlib.util as u; assert u.find_spec('torch') is None",
    "forge-interp": "import forge_interp, importlib.util as u; forge_interp.capture; "
    "assert u.find_spec('forge_config') is None",
    "forge-trainer": "import forge_ckpt, forge_config, forge_data, forge_interp, forge_model\n"
    "import forge_parallel, forge_resilience, forge_vlm, forge_trainer.cli",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("package", ALONE)
def test_wheel_installs_into_an_empty_environment(wheels, package, tmp_path):
    """Ours come from a folder of wheels; what is of others comes from the registry, or the cache of uv."""
    python = tmp_path / "empty" / "bin" / "python"
    run("uv", "venv", "--quiet", "--python", sys.executable, str(tmp_path / "empty"))
    run("uv", "pip", "install", "--quiet", "--python", str(python), "--find-links", str(wheels), package)
    run(str(python), "-c", ALONE[package], cwd=tmp_path)
    if package == "forge-trainer":
        run(str(python.parent / "forge"), "--help", cwd=tmp_path)
        run(str(python.parent / "forge-config"), "schema", cwd=tmp_path)
