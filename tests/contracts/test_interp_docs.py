"""The worked examples of docs/interp run as they stand, block after block."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "interp"
PAGES = sorted(page for page in DOCS.glob("*.md") if "```python" in page.read_text())


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


def test_the_worked_examples_exist():
    assert {page.name for page in PAGES} >= {"compare_models.md", "encoding_model.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs_offline_block_after_block(page, tmp_path):
    pytest.importorskip("matplotlib")
    script = tmp_path / f"{page.stem}.py"
    script.write_text(_NO_NETWORK + f"exec(compile({python_blocks(page)!r}, {str(page)!r}, 'exec'))\n")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / f"{page.stem}.png").stat().st_size > 1000


_NO_NETWORK = """
import socket

def refuse(*args, **kwargs):
    raise OSError("the worked examples must run offline")

socket.socket.connect = refuse
"""
