"""The pages of docs/interp run as they stand, offline, block after block; first their commands, shortened."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "interp"
PAGES = sorted(page for page in DOCS.glob("*.md") if page.stem != "reference")  # which conf.py generates
SHORT = ["--train.steps=22", "--train.global_batch=4", "--train.micro_batch=2", "--data.validation_samples=4"]


def python_blocks(page: Path) -> str:
    """All python blocks of a page in order, at their own lines, so that tracebacks point to the page."""
    lines = page.read_text().splitlines()
    inside, kept = False, []
    for line in lines:
        fence = re.match(r"```(\w*)", line)
        if fence:
            inside = fence.group(1) == "python"
        kept.append(line if inside and not fence else "")
    return "\n".join(kept) + "\n"


def prepare(page: Path, folder: Path) -> None:
    """Write the TOML files of a page into a folder and run there what the page tells to type."""
    (folder / "configs").symlink_to(DOCS.parents[1] / "configs")
    for name, block in re.findall(r"```toml\n# (\S+\.toml)\n(.*?)```", page.read_text(), re.DOTALL):
        (folder / name).write_text(block)
    for line in re.findall(r"^\$ uv run forge (.*)$", page.read_text(), re.MULTILINE):
        short = SHORT if line.startswith("train") else []
        command = [sys.executable, "-m", "forge_trainer", *shlex.split(line), *short]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_pages_exist_and_are_in_the_table_of_contents():
    pages = {page.stem for page in PAGES} - {"index"}
    assert pages >= {"capture", "attention", "edit", "extract", "compare_models", "encoding_model"}
    assert all("```python" in page.read_text() for page in PAGES)
    (listed,) = re.findall(r"```{toctree}\n(?::.*\n)*\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    assert set(listed.split()) == pages | {"reference"}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs_offline_block_after_block(page, tmp_path):
    blocks = python_blocks(page)
    pictures = re.findall(r"savefig\(\"(.*?)\"\)", blocks)
    if pictures:
        pytest.importorskip("matplotlib")
    if "transformers" in blocks:
        pytest.importorskip("transformers")
    prepare(page, tmp_path)
    script = tmp_path / f"{page.stem}.py"
    script.write_text(_NO_NETWORK + f"exec(compile({blocks!r}, {str(page)!r}, 'exec'))\n")
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not [name for name in pictures if (tmp_path / name).stat().st_size < 1000]


_NO_NETWORK = """
import socket

def refuse(*args, **kwargs):
    raise OSError("the worked examples must run offline")

socket.socket.connect = refuse
"""
