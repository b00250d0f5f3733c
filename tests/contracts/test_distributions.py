"""Installing one package brings nothing that it must never drag in, and sibling ranges hold the siblings."""

import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECTS = {
    (data := tomllib.loads(path.read_text())["project"])["name"]: data
    for path in [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("apps/*/pyproject.toml")]
}
ECOSYSTEM = {"datasets", "wandb", "transformers", "tensorboard"}
SIBLINGS = {name for name in PROJECTS if name not in ("forge-config", "forge-trainer")}
FORBIDDEN = {
    "forge-config": {"torch", "numpy", *ECOSYSTEM, *SIBLINGS},
    "forge-interp": {"msgspec", "forge-config", "rich", *ECOSYSTEM, *(SIBLINGS - {"forge-interp"})},
    "forge-vlm": {"pillow", *ECOSYSTEM, *(SIBLINGS - {"forge-vlm", "forge-model"})},
} | {
    name: ECOSYSTEM | (SIBLINGS - {name})
    for name in ("forge-model", "forge-parallel", "forge-data", "forge-ckpt", "forge-resilience")
}


@pytest.mark.parametrize("name", sorted(FORBIDDEN))
def test_package_brings_no_forbidden_distribution(name):
    command = [
        "uv",
        "export",
        "--frozen",
        "--offline",
        "--package",
        name,
        "--no-default-groups",
        "--no-hashes",
    ]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line for line in listed.splitlines() if line and not line.startswith((" ", "#"))]
    installed = {
        Path(line[3:]).name if line.startswith("-e ") else Requirement(line).name.lower() for line in lines
    }
    assert installed, listed
    assert not installed & FORBIDDEN[name]


@pytest.mark.parametrize("name", sorted(PROJECTS))
def test_sibling_ranges_hold_the_version_in_the_workspace(name):
    for text in PROJECTS[name].get("dependencies", []):
        requirement = Requirement(text)
        if requirement.name in PROJECTS:
            assert requirement.specifier, f"{name} takes any {requirement.name}"
            assert requirement.specifier.contains(PROJECTS[requirement.name]["version"]), f"{name}: {text}"


@pytest.mark.parametrize("name", sorted(PROJECTS))
def test_package_has_readme_license_and_typed_marker(name):
    folder = next(p.parent for p in ROOT.glob("*/*/pyproject.toml") if f'name = "{name}"' in p.read_text())
    assert len((folder / "README.md").read_text()) > 300
    assert list(folder.glob("src/*/py.typed"))
    assert PROJECTS[name]["license"] == "MIT"


def test_page_on_installing_says_what_each_package_brings():
    rows = [
        row.split("|")[2:4]
        for row in (ROOT / "docs" / "install.md").read_text().splitlines()
        if "`forge-" in row
    ]
    said = {name.strip(" `"): set(brings.partition(";")[0].strip().split(", ")) for name, brings in rows}
    assert said.pop("forge-trainer") == {"all of Forge"}
    for name, brings in said.items():
        assert brings == {Requirement(text).name for text in PROJECTS[name]["dependencies"]}, name
    assert len(said) == 3
